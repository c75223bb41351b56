"""Collected only where the frameworks are installed: `make test-integrations`."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("accelerate") else ["test_*.py"]
