"""A plan as a value and as a file: its steps, what was predicted of them and what was measured."""
