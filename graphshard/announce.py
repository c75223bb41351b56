"""What a run says of its plans: a block in the log of rank 0, and files for each rank.

In comes a plan that begins to run, or that was measured. Nothing here changes what runs.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch.distributed as dist

from graphshard import artifacts
from graphshard.capture.ports import CompiledPlan
from graphshard.step_plan import Plan
from graphshard.view.log_text import collective_names, log_text
from graphshard.view.trace import write_trace
from graphshard.watch import Running

logger = logging.getLogger(__name__)


def announce(compiled: CompiledPlan) -> None:
    """Log it on rank 0, record it for tlparse, and write the files that the options ask for."""
    assert isinstance(compiled.running, Running)
    plan, options = compiled.plan, compiled.running.options
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank == 0 and logger.isEnabledFor(logging.INFO):
        logger.info("%s", log_text(plan, plan.measured or compiled.measured))
    artifacts.plan_made(plan.to_json, lambda: list(collective_names(plan)))
    if options.dump_dir is not None:
        stem = _stem(options.dump_dir, rank, plan)
        stem.with_suffix(".plan.json").write_text(plan.to_json())
        stem.with_suffix(".forward.py").write_text(compiled.forward_code)
        stem.with_suffix(".backward.py").write_text(compiled.backward_code)
    if options.report_dir is not None:
        _report(plan, _stem(options.report_dir, rank, plan))


def _report(plan: Plan, stem: Path) -> None:
    """The plan, its page and its trace; what was measured later replaces them."""
    # Jinja2 takes longer to import than graphshard: only for those who ask.
    from graphshard.view.html import render

    stem.with_suffix(".plan.json").write_text(plan.to_json())
    stem.with_suffix(".html").write_text(render(plan), encoding="utf-8")
    if plan.forecasts or plan.measured is not None:
        write_trace(plan, stem.with_suffix(".trace.json"))


def _stem(folder: Path, rank: int, plan: Plan) -> Path:
    """`folder`/rank0/graph_0_0, in a folder that exists."""
    stem = folder / f"rank{rank}" / plan.name.replace(" ", "_").replace("/", "_")
    stem.parent.mkdir(parents=True, exist_ok=True)
    return stem
