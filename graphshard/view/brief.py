"""A plan in a few words: the headline of every screen, what `repr` and a notebook show.

In come a plan and, if there is one, what was measured; out come rows of a name and a text, plain
text, or a small table. All figures are predicted unless their row says otherwise.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from graphshard.schedule.estimate import Limit
from graphshard.schedule.measured import Measured
from graphshard.schedule.plan import Estimate, Plan
from graphshard.view.names import shown
from graphshard.view.optimizer import took_text
from graphshard.view.templates import template
from graphshard.view.text import WIDTH, bytes_text, count_text, ranks_text
from graphshard.view.units import change_text, share_text, time_text

LABEL_WIDTH = 13
# Of the limit: less that is left is worth no word.
UNUSED = 0.02
# Of a step: a smaller difference is none.
ALIKE = 0.0005
LIMITS = {Limit.BUDGET: "a budget that was set", Limit.FSDP2: "FSDP2's own peak"}


@dataclass(frozen=True, slots=True)
class Row:
    """fsdp2, change: empty where FSDP2 has nothing of that. more: what else is to be said."""

    name: str
    value: str
    fsdp2: str = ""
    change: str = ""
    more: str = ""


def brief_rows(estimate: Estimate, measured: Measured | None = None) -> Iterator[Row]:
    """Step, exposed, peak, limit and gain, in this order. measured: of this plan."""
    ours, theirs = estimate.ours, estimate.fsdp2
    whole = estimate.whole_step_us, estimate.whole_fsdp2_us
    part = ""
    if estimate.optimizer is not None:
        part = f"of it optimizer {took_text(estimate)}"
    yield _compared("step", *whole, more=part)
    yield _compared("exposed", ours.exposed_us, theirs.exposed_us)
    more_bytes = ours.peak_bytes - theirs.peak_bytes
    sign = "-" if more_bytes < 0 else "+"
    change = f"{sign}{bytes_text(abs(more_bytes))}"
    yield Row("peak", bytes_text(ours.peak_bytes), bytes_text(theirs.peak_bytes), change)
    yield Row("limit", bytes_text(estimate.budget_bytes), more=LIMITS[estimate.limit])
    yield Row("gain", gain_text(estimate), more=left_text(estimate))
    if enough := enough_text(estimate):
        yield Row("enough", bytes_text(ours.peak_bytes), more=enough)
    if measured is not None:
        without = "" if estimate.optimizer is None else " without the optimizer"
        took, waited = time_text(measured.step_time_us), time_text(measured.exposed_us)
        yield Row("measured", took + without, more=f"exposed {waited}")


def brief_lines(estimate: Estimate, measured: Measured | None = None) -> Iterator[str]:
    """`brief_rows` for a terminal."""
    for row in brief_rows(estimate, measured):
        value = f"{row.value} predicted" if row.name == "step" else row.value
        theirs = f"FSDP2 {row.fsdp2}{f' ({row.change})' if row.change else ''}"
        words = [value, theirs if row.fsdp2 else "", row.more]
        text = row.name.ljust(LABEL_WIDTH) + "; ".join(filter(None, words))
        yield from textwrap.wrap(text, WIDTH, subsequent_indent=" " * LABEL_WIDTH)


def step_change(estimate: Estimate) -> float:
    """From FSDP2's whole step to the plan's, as a share of FSDP2's; 0 if they are alike."""
    theirs_us = estimate.whole_fsdp2_us
    change = (estimate.whole_step_us - theirs_us) / theirs_us if theirs_us else 0.0
    return 0.0 if abs(change) <= ALIKE else change


def gain_text(estimate: Estimate) -> str:
    """Against FSDP2's own schedule: "22.6 % less time than FSDP2"."""
    change = step_change(estimate)
    if change == 0:
        return "as much time as FSDP2"
    return f"{share_text(abs(change), 1.0)} {'less' if change < 0 else 'more'} time than FSDP2"


def left_us(estimate: Estimate) -> float:
    """No schedule of this graph takes less of the step by more than this, whatever its memory."""
    return max(estimate.whole_step_us - estimate.whole_bound_us, 0.0)


def left_text(estimate: Estimate) -> str:
    """The same as a share of the step, as changes are told: "at most 2.4 % left to gain"."""
    return f"at most {share_text(left_us(estimate), estimate.whole_step_us)} left to gain"


@dataclass(frozen=True, slots=True)
class Rest:
    """What a plan leaves of its limit. saved: of the whole step, if it were spent, too."""

    bytes: int
    saved: float


def rest_of(estimate: Estimate) -> Rest | None:
    """None where that is too little for a word, and nobody knows what it would bring."""
    own, more = estimate.ours, estimate.all_spent
    rest_bytes = estimate.budget_bytes - own.peak_bytes
    if more is not None and estimate.whole_step_us:
        saved = (own.step_time_us - more.step_time_us) / estimate.whole_step_us
        return Rest(rest_bytes, max(0.0, saved))
    return Rest(rest_bytes, 0.0) if rest_bytes > UNUSED * estimate.budget_bytes else None


def enough_text(estimate: Estimate) -> str:
    """What the rest of the limit would bring: "the other 10.8 GiB would bring 0.3 %"; empty where
    the plan takes all of it."""
    rest = rest_of(estimate)
    if rest is None:
        return ""
    saved = share_text(rest.saved, 1.0) if rest.saved > ALIKE else "nothing"
    return f"the other {bytes_text(rest.bytes)} would bring {saved}"


def title_line(plan: Plan) -> str:
    """The plan, its ranks, the machine and how compute is priced."""
    words = [plan.name, ranks_text(plan), *_priced(plan), f"torch {plan.torch_version}"]
    return ", ".join(words)


def _priced(plan: Plan) -> Iterator[str]:
    if plan.priced_on is not None:
        yield f"priced on {plan.priced_on.machine}"
        yield compute_text(fused=plan.priced_on.fused)


def compute_text(*, fused: bool) -> str:
    """The compute mode that is priced, named as the option that chooses it."""
    return "compute by Inductor" if fused else "compute op by op (aten)"


def brief_text(plan: Plan) -> str:
    """One line: `Plan(llama: step 677 ms, FSDP2 875 ms; peak 29.2 GiB of 40.0 GiB; 33 groups)`."""
    plan = shown(plan)
    own = plan.estimate
    return (
        f"Plan({plan.name}: step {time_text(own.whole_step_us)}, FSDP2 "
        f"{time_text(own.whole_fsdp2_us)}; peak {bytes_text(own.peak_bytes)} of "
        f"{bytes_text(own.budget_bytes)}; {count_text(len(plan.groups), 'group')})"
    )


def brief_html(plan: Plan) -> str:
    """A small table that needs nothing else."""
    plan = shown(plan)
    rows: Sequence[Row] = list(brief_rows(plan.estimate, plan.measured))
    return template("brief.html.j2").render(title=title_line(plan), rows=rows)


def _compared(name: str, ours_us: float, theirs_us: float, more: str = "") -> Row:
    change = change_text(ours_us, theirs_us)
    return Row(name, time_text(ours_us), time_text(theirs_us), change, more)
