"""Runs a script of examples/integrations/ as one of some CPU processes: `run_script.py SCRIPT`.

The script leaves `model` and `losses`, or the `metrics` that its own workers have reported. Rank 0
prints these losses and how many groups run in graphs, how many there are, and the number of plans,
as JSON.
"""

import json
import os
import runpy
import sys
from importlib.util import find_spec
from typing import Any

import torch.distributed as dist


def shard_on_cpu() -> None:
    """accelerate shards on accelerators alone; the code that it runs there is the same."""
    from accelerate.state import AcceleratorState, DistributedType

    os.environ["ACCELERATE_USE_CPU"] = "true"
    made = AcceleratorState.__init__

    def make(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        made(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    AcceleratorState.__init__ = make


def main(script: str) -> None:
    if find_spec("accelerate") is not None:
        shard_on_cpu()
    left = runpy.run_path(script, run_name="__main__")

    import graphshard

    metrics = left.get("metrics") or graphshard.metrics(left["model"])
    groups = [int(metrics[f"graphshard/{key}"]) for key in ("groups_in_graphs", "groups", "plans")]
    losses = left["losses"] if "losses" in left else metrics["losses"]
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(json.dumps({"losses": losses, "groups": groups}))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
