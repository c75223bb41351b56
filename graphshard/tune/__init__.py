"""The best settings of a sharded model on machines that nobody has here: mesh, groups and more."""
