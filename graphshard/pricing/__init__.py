"""A placed graph becomes the planner's problem: costs of ops, liveness, where regions may end."""
