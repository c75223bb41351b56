"""Collected only where the libraries are installed: `make test-models`."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("diffusers") else ["test_*.py"]
