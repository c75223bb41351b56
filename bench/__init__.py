"""Measurements of graphshard. Not part of the wheel; `python bench/step.py` is the way in."""
