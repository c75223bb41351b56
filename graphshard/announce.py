"""What a run says of its plans: a block in the log of rank 0, and files for each rank.

In comes a plan that begins to run, or that was measured. Nothing here changes what runs.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch.distributed as dist

from graphshard.capture.ports import CompiledPlan
from graphshard.plan import Plan
from graphshard.watch import Running

logger = logging.getLogger(__name__)


def announce(compiled: CompiledPlan) -> None:
    """Log it on rank 0; write plan and code to the dump folder if there is one."""
    assert isinstance(compiled.running, Running)
    rank = dist.get_rank() if dist.is_initialized() else 0
    options = compiled.running.options
    if rank == 0:
        s = compiled.plan.summary()
        logger.info(
            "%s: %d groups, %d all-gathers and %d reduce-scatters per step, at most %.1f MiB of "
            "gathered parameters",
            s["name"],
            s["groups"],
            s["all_gathers"],
            s["reduce_scatters"],
            s["gathered_peak_bytes"] / 2**20,
        )
    if options.dump_dir is not None:
        stem = _stem(options.dump_dir, rank, compiled.plan)
        stem.with_suffix(".plan.json").write_text(compiled.plan.to_json())
        stem.with_suffix(".forward.py").write_text(compiled.forward_code)
        stem.with_suffix(".backward.py").write_text(compiled.backward_code)


def _stem(folder: Path, rank: int, plan: Plan) -> Path:
    """`folder`/rank0/graph_0_0, in a folder that exists."""
    stem = folder / f"rank{rank}" / plan.name.replace(" ", "_").replace("/", "_")
    stem.parent.mkdir(parents=True, exist_ok=True)
    return stem
