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


def gain_text(estimate: Estimate) -> str:
    """Against FSDP2's own schedule: "1.29 x as fast as FSDP2"."""
    ours_us = estimate.whole_step_us
    ratio = estimate.whole_fsdp2_us / ours_us if ours_us else 1.0
    return f"{ratio:.2f} x as fast as FSDP2"


def left_text(estimate: Estimate) -> str:
    """How much less no schedule of this graph can take, however much memory it had."""
    return f"at most {share_text(estimate.gap, 1.0)} left to gain"


def enough_text(estimate: Estimate) -> str:
    """What the rest of the limit would bring: "the other 10.8 GiB would bring 0.3 %"; empty where
    the plan takes all of it."""
    own, more = estimate.ours, estimate.all_spent
    rest_bytes = estimate.budget_bytes - own.peak_bytes
    if more is not None:
        share = (own.step_time_us - more.step_time_us) / estimate.whole_step_us
        text = f"would bring {share_text(max(0.0, share), 1.0)}"
    elif rest_bytes > UNUSED * estimate.budget_bytes:
        text = "would bring nothing"
    else:
        return ""
    return f"the other {bytes_text(rest_bytes)} {text}"


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
