"""Predicted against measured as plain text, 92 columns wide, times in microseconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from graphshard.schedule.comparison import Comparison, ComparisonRow, Pair
from graphshard.schedule.plan import Plan, Step, StepKind
from graphshard.view.names import shown
from graphshard.view.text import count_text, group_name

WIDTH = 92
COLUMNS = {"predicted us": 14, "measured us": 14, "error": 10}
COLLECTIVES = {
    StepKind.GATHER_ISSUE: "all-gather",
    StepKind.REDUCE_ISSUE: "reduce-scatter",
    StepKind.ALL_REDUCE_ISSUE: "all-reduce",
    StepKind.OFFLOAD_ISSUE: "offload",
    StepKind.RELOAD_ISSUE: "reload",
}


def comparison_text(plan: Plan, found: Comparison) -> str:
    """Step and exposed time, then each region and each collective in the order of `plan`."""
    plan = shown(plan)
    names = {g.id: group_name(g) for g in plan.groups}
    lines = [f"{plan.name}  (medians over {count_text(found.num_steps, 'step')})", ""]
    lines += [_line("", COLUMNS), _pair("step", found.step_time), _pair("exposed", found.exposed)]
    lines += [_pair(f"exposed in {d}", pair) for d, pair in found.exposed_by_direction]
    lines += ["", *_table("regions", found.regions, found.region_error, _ops)]
    lines += [
        "",
        *_table(
            "collectives",
            found.collectives,
            found.collective_error,
            lambda step: f"{COLLECTIVES[step.kind]} {', '.join(names[g] for g in step.groups)}",
        ),
    ]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _ops(step: Step) -> str:
    return f"ops {step.start} to {step.stop - 1}"


def _table(
    title: str, rows: Sequence[ComparisonRow], error: float | None, name: Callable[[Step], str]
) -> Iterator[str]:
    middle = "" if error is None else f", median error {error:.1%}"
    yield f"{len(rows)} {title}{middle}"
    yield from (_pair(f"{row.direction}, {name(row.step)}", row.us) for row in rows)


def _pair(name: str, pair: Pair) -> str:
    error = "" if pair.error is None else f"{pair.error:+.1%}"
    return _line(name, (f"{pair.predicted_us:,.1f}", f"{pair.measured_us:,.1f}", error))


def _line(name: str, cells: Iterable[str]) -> str:
    widths = COLUMNS.values()
    room = WIDTH - sum(widths)
    if len(name) > room:
        # The end of an FQN tells more than its beginning.
        name = "..." + name[len(name) - room + 3 :].lstrip(".")
    pairs = zip(cells, widths, strict=True)
    return name.ljust(room) + "".join(cell.rjust(width) for cell, width in pairs)
