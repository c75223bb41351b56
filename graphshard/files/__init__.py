"""What is read from files and written to them: checked with its place, or written for information.

Standard library only.
"""
