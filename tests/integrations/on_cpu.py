"""Runs a script as it is, with frameworks that shard on a CPU too: `on_cpu.py SCRIPT`."""

import runpy
import sys

from run_script import shard_on_cpu

if __name__ == "__main__":
    shard_on_cpu()
    sys.argv[:] = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
