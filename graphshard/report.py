"""What graphshard did: plans, measurements, a short report, one log line per plan."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from graphshard.capture.ports import CompiledPlan, Record, records_under
from graphshard.compiler import GraphCompiler
from graphshard.measured import Measured
from graphshard.options import Options
from graphshard.step_plan import Plan
from graphshard.view.comparison import comparison_text

logger = logging.getLogger(__name__)


def plans(model: nn.Module) -> list[Plan]:
    """The plans that are compiled for `model` (wrapped by torch.compile or not), oldest first."""
    return [compiled.plan for compiled in _compiled(records_under(model))]


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a plan was measured at, the same on all ranks; `str()` of it is a table for people.

    plan: the plan that ran; after `replan_after` forwards another one took its place.
    """

    plan: Plan
    measured: Measured

    def __str__(self) -> str:
        return comparison_text(self.plan, self.plan.compare(self.measured))


def measurements(model: nn.Module) -> list[Measurement | None]:
    """The last measurement behind each plan of `plans(model)`, in the same order.

    None: nothing was measured. Only `options={"replan_after": n}` measures.
    """
    return [_measurement(compiled) for compiled in _compiled(records_under(model))]


def _measurement(compiled: CompiledPlan) -> Measurement | None:
    if compiled.before is None or compiled.measured is None:
        return None
    return Measurement(compiled.before, compiled.measured)


@dataclass(frozen=True, slots=True)
class Report:
    """What runs in a graph, what does not, and why.

    plans: summaries of the compiled plans (see `Plan.summary`), oldest first.
    captured, present: groups whose forward has run in a graph, and all groups of the model.
    reasons: group FQN -> why it runs through eager FSDP2.
    code: for each plan its name, the emitted forward and the emitted backward.
    """

    plans: tuple[dict[str, Any], ...]
    captured: int
    present: int
    reasons: dict[str, str]
    code: tuple[tuple[str, str, str], ...]

    @property
    def graphs(self) -> int:
        """Compiled graphs, forward and backward counted apart."""
        return sum(plan["graphs"] for plan in self.plans)

    def __str__(self) -> str:
        lines = [
            f"graphs       {self.graphs} (forward and backward counted apart)",
            f"groups       {self.captured} of {self.present} run in a graph",
        ]
        lines += [
            f"collectives  {plan['all_gathers']} all-gathers and {plan['reduce_scatters']} "
            f"reduce-scatters per step of {plan['name']}"
            for plan in self.plans
        ]
        lines += [f"eager        {fqn}: because {reason}" for fqn, reason in self.reasons.items()]
        if self.present == 0:
            lines.append("the model has no fully_shard group that graphshard has seen run")
        return "\n".join(lines)


def explain(model: nn.Module) -> Report:
    """A short report about `model`; `str()` of it is for people, `.code` is the emitted Python."""
    records = records_under(model)
    compiled = _compiled(records)
    groups = [live for record in records for live in record.groups]
    return Report(
        plans=tuple(c.plan.summary() for c in compiled),
        captured=sum(live.counters.forwards > 0 for live in groups),
        present=len(groups),
        reasons={k: v for r in records for k, v in {**r.outside, **r.reasons}.items()},
        code=tuple((c.plan.name, c.forward_code, c.backward_code) for c in compiled),
    )


def announce(compiler: GraphCompiler, options: Options) -> None:
    """Log one line on rank 0; write plan and code to the dump folder if there is one."""
    compiled = next(
        (r.plans[compiler.name] for r in compiler.records if compiler.name in r.plans), None
    )
    if compiled is None:
        return
    rank = dist.get_rank() if dist.is_initialized() else 0
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
        _dump(compiled, options, rank)


def _dump(compiled: CompiledPlan, options: Options, rank: int) -> None:
    assert options.dump_dir is not None
    name = compiled.plan.name.replace(" ", "_").replace("/", "_")
    stem = options.dump_dir / f"rank{rank}" / name
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".plan.json").write_text(compiled.plan.to_json())
    stem.with_suffix(".forward.py").write_text(compiled.forward_code)
    stem.with_suffix(".backward.py").write_text(compiled.backward_code)


def _compiled(records: list[Record]) -> list[CompiledPlan]:
    """Each plan once, also if several roots share its graph."""
    found = {id(c): c for record in records for c in record.plans.values()}
    return list(found.values())
