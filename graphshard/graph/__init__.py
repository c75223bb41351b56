"""The captured program: an FX graph with marks, and the rules that hold for it."""
