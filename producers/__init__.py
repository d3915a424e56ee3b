"""The inference side of Echo: samples trajectories and publishes them. Knows `echo`, never `consumers`."""
