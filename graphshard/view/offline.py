"""What `graphshard plan` prints: one plan against FSDP2's, or a table of many."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from graphshard.schedule.groups import received_bytes
from graphshard.schedule.plan import Estimate, Plan
from graphshard.schedule.reasons import Gain
from graphshard.view.brief import LIMITS, enough_text, left_text
from graphshard.view.names import shown
from graphshard.view.optimizer import optimizer_text
from graphshard.view.reasons import DECISIONS
from graphshard.view.recomputed import recomputed_text
from graphshard.view.text import WIDTH, bytes_text, count_text

COLUMN = 13
# Time and memory of a row that no other row beats in both.
BEST = "*"


@dataclass(frozen=True, slots=True)
class Effort:
    """What planning took. num_nodes: of the captured step, forward and backward together.

    num_repeated: blocks that were not captured because they are like others. passes_s: of the
    partition and the verified passes.
    """

    num_nodes: int
    num_groups: int
    num_repeated: int
    num_params: int
    capture_s: float
    passes_s: float
    plan_s: float


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One point of a sweep; times and bytes are None where nothing fits.

    step_time_us, fsdp2_step_time_us: of forward and backward; the optimizer comes on top of both.
    stragglers_us: expected on top of all; None: not known.
    tokens_per_s: of one rank, None if the point does not say how many tokens a step has.
    """

    world_size: int
    hardware: str
    budget_bytes: int | None
    sizes: tuple[tuple[str, int], ...]
    step_time_us: float | None = None
    optimizer_us: float = 0.0
    stragglers_us: float | None = None
    exposed_us: float | None = None
    peak_bytes: int | None = None
    fsdp2_step_time_us: float | None = None
    fsdp2_peak_bytes: int | None = None
    tokens_per_s: float | None = None
    why_not: str = ""


def plan_text(plan: Plan, where: str, effort: Effort, path: str) -> str:
    """The screen of one plan. where: machine and ranks, in words. Needs a plan with costs."""
    plan = shown(plan)
    lines = [f"{plan.name}  {where}", "predicted: no weights, no GPU used", ""]
    lines += _effort(effort)
    lines += ["", *_comparison(plan, plan.estimate), "", *_reasons(plan)]
    if again := recomputed_text(plan):
        lines += textwrap.wrap(again, WIDTH)
    lines += ["", f"wrote {path}", f"next  graphshard view {path}"]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def sweep_text(
    title: str, rows: Sequence[SweepRow], effort: Effort, picture: str | None = None
) -> str:
    """A table of all points; those that no other beats in time and memory are marked. picture: the
    file that has them drawn."""
    lines = [title, "", *_effort(effort), ""]
    names = list(dict.fromkeys(key for row in rows for key, _ in row.sizes))
    heads = ["world", "hardware", "budget", *names]
    heads += [
        "step",
        "optimizer",
        "stragglers",
        "exposed",
        "peak",
        "FSDP2 step",
        "its peak",
        "tokens/s/rank",
        "",
    ]
    front = pareto(rows)
    table = [heads, *(_cells(row, names, index in front) for index, row in enumerate(rows))]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        lines.append("  ".join(c.rjust(w) for c, w in zip(cells, widths, strict=True)))
    lines += ["", f"{BEST} no other row is both faster (per token and rank) and smaller"]
    lines += [f"  {row.world_size:,} ranks, {row.hardware}: {row.why_not}" for row in _failed(rows)]
    lines += [f"  time against peak: {picture}"] if picture else []
    return "\n".join(line.rstrip() for line in lines) + "\n"


def pareto(rows: Sequence[SweepRow]) -> frozenset[int]:
    """Indices of the rows that no other row beats in time (of a token, or of a step) and peak."""
    found = [
        (index, _cost(row), row.peak_bytes) for index, row in enumerate(rows) if row.peak_bytes
    ]
    return frozenset(
        index
        for index, us, peak in found
        if not any(u <= us and p <= peak and (u, p) != (us, peak) for _, u, p in found)
    )


def _cost(row: SweepRow) -> float:
    if row.tokens_per_s:
        return 1e6 / row.tokens_per_s
    return (row.step_time_us or 0.0) + row.optimizer_us


def _effort(effort: Effort) -> Iterator[str]:
    params = f"{effort.num_params / 1e9:,.2f} B" if effort.num_params > 1e8 else effort.num_params
    captured = (
        f"{count_text(effort.num_groups, 'group')}, {params} parameters, "
        f"{count_text(effort.num_nodes, 'node')}"
    )
    if effort.num_repeated:
        captured += f" ({count_text(effort.num_repeated, 'block')} alike)"
    for name, text, seconds in (
        ("capture", captured, effort.capture_s),
        ("passes", "every check passed after each", effort.passes_s),
        ("plan", "simulated, with its reasons", effort.plan_s),
    ):
        yield f"{name:8}{seconds:8.1f} s  {text}"


def _comparison(plan: Plan, estimate: Estimate) -> Iterator[str]:
    ours, theirs = estimate.ours, estimate.fsdp2
    their_schedules = plan.fsdp2.schedules if plan.fsdp2 else ()
    received = [received_bytes(plan.groups, s) for s in (their_schedules, plan.schedules)]
    yield _line("", "FSDP2", "graphshard", "change")
    whole = estimate.whole_fsdp2_us, estimate.whole_step_us
    yield _line("step time", *map(_time, whole), _percent(*whole))
    if estimate.optimizer is not None:
        took = _time(estimate.optimizer_us)
        yield _line("  of it optimizer", took, took) + f"   {optimizer_text(estimate)}"
    if (late := estimate.stragglers) is not None:
        their, own = whole[0] + late.fsdp2_us, whole[1] + late.ours_us
        row = _line("  with stragglers", _time(their), _time(own), _percent(their, own))
        yield f"{row}   at {late.ranks:,} ranks"
    yield _line(
        "exposed communication",
        _time(theirs.exposed_us),
        _time(ours.exposed_us),
        _percent(theirs.exposed_us, ours.exposed_us),
    )
    yield _line(
        "peak memory",
        bytes_text(theirs.peak_bytes),
        bytes_text(ours.peak_bytes),
        _difference(theirs.peak_bytes, ours.peak_bytes),
    )
    sizes = {category: size for category, size in theirs.peak_by_category}
    for category, size in ours.peak_by_category:
        their = sizes.get(category, 0)
        yield _line(f"  {category}", bytes_text(their), bytes_text(size), _difference(their, size))
    fits = "" if theirs.peak_bytes <= estimate.budget_bytes else "; FSDP2 does not fit"
    limit = _line("limit", bytes_text(estimate.budget_bytes))
    yield f"{limit}   {LIMITS[estimate.limit]}{fits}"
    if enough := enough_text(estimate):
        yield _line("enough", bytes_text(ours.peak_bytes)) + f"   {enough}"
    yield _line(
        "received per rank",
        bytes_text(received[0]),
        bytes_text(received[1]),
        _difference(*received),
    )
    bound = _line("no schedule is below", "", _time(estimate.whole_bound_us))
    yield f"{bound}   {left_text(estimate)}"


def _reasons(plan: Plan) -> Iterator[str]:
    """What each kind of decision saves; the rows add up to the change above."""
    gains = [reason for reason in plan.reasons if isinstance(reason, Gain)]
    yield "why".ljust(46) + "saves".rjust(COLUMN) + "costs".rjust(COLUMN)
    for reason in gains:
        yield (
            DECISIONS[reason.decision].ljust(46)
            + _time(reason.gain_us).rjust(COLUMN)
            + _more(-reason.gain_bytes)
        )
    if not gains:
        yield "nothing: FSDP2's own schedule is as good as any that was found"


def _more(size: int) -> str:
    return (_difference(0, size) if size else "").rjust(COLUMN)


def _failed(rows: Sequence[SweepRow]) -> list[SweepRow]:
    return [row for row in rows if row.why_not]


def _cells(row: SweepRow, names: Sequence[str], best: bool) -> list[str]:
    sizes = dict(row.sizes)
    budget = "-" if row.budget_bytes is None else bytes_text(row.budget_bytes)
    cells = [f"{row.world_size:,}", row.hardware, budget]
    cells += [f"{sizes[name]:,}" if name in sizes else "-" for name in names]
    if row.step_time_us is None or row.exposed_us is None or row.peak_bytes is None:
        return [*cells, "does not fit", "", "", "", "", "", "", "", ""]
    assert row.fsdp2_step_time_us is not None
    assert row.fsdp2_peak_bytes is not None
    tokens = "-" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}"
    return [
        *cells,
        _time(row.step_time_us + row.optimizer_us),
        _time(row.optimizer_us),
        _stragglers(row),
        _time(row.exposed_us),
        bytes_text(row.peak_bytes),
        _time(row.fsdp2_step_time_us + row.optimizer_us),
        bytes_text(row.fsdp2_peak_bytes),
        tokens,
        BEST if best else "",
    ]


def _stragglers(row: SweepRow) -> str:
    """How much longer they make the step."""
    if row.stragglers_us is None or row.step_time_us is None:
        return "-"
    whole_us = row.step_time_us + row.optimizer_us
    return _percent(whole_us, whole_us + row.stragglers_us)


def _line(name: str, *cells: str) -> str:
    return name.ljust(24) + "".join(cell.rjust(COLUMN) for cell in cells)


def _time(us: float) -> str:
    if abs(us) >= 1e6:
        return f"{us / 1e6:,.3f} s"
    return f"{us / 1e3:,.3f} ms"


def _percent(before: float, after: float) -> str:
    return f"{(after - before) / before:+.1%}" if before else ""


def _difference(before: int, after: int) -> str:
    sign = "-" if after < before else "+"
    return f"{sign}{bytes_text(abs(after - before))}"
