"""In one place for `graphshard.__version__` and for what stands below the package."""

__version__ = "0.1.0"

# The torch versions that the tests run with (`make test-torch`).
OLDEST_TORCH = (2, 11)
NEWEST_TORCH = (2, 15)
