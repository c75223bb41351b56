"""Models to try commands with, as `demo:llama3_8b`: their shapes, and no weights."""
