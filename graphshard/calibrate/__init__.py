"""What this machine does in how long: measured, and fitted into a cost profile."""
