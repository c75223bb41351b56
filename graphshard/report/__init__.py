"""What a run tells its user: the log, explain, measurements and profiles."""
