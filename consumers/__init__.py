"""The training side of Echo: consumes trajectories and updates the policy. Knows `echo`, never `producers`."""
