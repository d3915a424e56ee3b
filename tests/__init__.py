"""Echo's tests: `pytest` from the project's root."""
