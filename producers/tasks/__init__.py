"""Tasks, by name: `task.name` of the run file."""
