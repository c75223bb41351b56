"""What runs in a step: gathers, reductions and the live state of each group."""
