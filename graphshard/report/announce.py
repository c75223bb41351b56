"""What a run says of its plans: a block in the log of rank 0, and files for each rank.

In comes a plan that begins to run, or that was measured. Nothing here changes what runs.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch.distributed as dist

from graphshard.capture.root_state import CompiledPlan
from graphshard.compiler.executable import Executable
from graphshard.files.information import informing, write_whole
from graphshard.graph import structured_log
from graphshard.schedule.plan import Plan
from graphshard.view.log_text import collective_names, log_text
from graphshard.view.trace import trace_text

logger = logging.getLogger(__name__)


def announce(compiled: CompiledPlan) -> None:
    """Log it on rank 0, record it for tlparse, and write the files that the options ask for.

    Each of these is `informing`: what fails ends neither training nor the others.
    """
    assert isinstance(compiled.running, Executable)
    plan, options = compiled.plan, compiled.running.options
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank == 0 and logger.isEnabledFor(logging.INFO):
        with informing("the log of a plan", "the log"):
            logger.info("%s", log_text(plan, plan.measured or compiled.measured))
    structured_log.plan_made(plan.to_json, lambda: list(collective_names(plan)))
    if options.dump_dir is not None:
        with informing("dump_dir", options.dump_dir):
            _dump(compiled.running, _stem(options.dump_dir, rank, plan))
    if options.report_dir is not None:
        with informing("report_dir", options.report_dir):
            _report(plan, _stem(options.report_dir, rank, plan))


def _dump(running: Executable, stem: Path) -> None:
    """The plan and the emitted Python."""
    forward, backward = running.code
    write_whole(stem.with_suffix(".plan.json"), running.plan.to_json())
    write_whole(stem.with_suffix(".forward.py"), forward)
    write_whole(stem.with_suffix(".backward.py"), backward)


def _report(plan: Plan, stem: Path) -> None:
    """The plan, its page and its trace; what was measured later replaces them."""
    # Jinja2 takes longer to import than graphshard: only for those who ask.
    from graphshard.view.html import render

    write_whole(stem.with_suffix(".plan.json"), plan.to_json())
    write_whole(stem.with_suffix(".html"), render(plan))
    if plan.forecasts or plan.measured is not None:
        write_whole(stem.with_suffix(".trace.json"), trace_text(plan))


def _stem(folder: Path, rank: int, plan: Plan) -> Path:
    """`folder`/rank0/graph_0_0."""
    return folder / f"rank{rank}" / plan.name.replace(" ", "_").replace("/", "_")
