"""In one place for `graphshard.__version__` and for what stands below the package."""

__version__ = "0.1.0"
