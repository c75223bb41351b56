"""How near a step is to what no step can beat: the compute of one process, and the network.

In: what each launch of each mode measured. Out: a `Limit` per planned mode and rate, and text. The
limit of a rate is the longer of one process's step and the time of the fewest bytes that any mode
sends at any rate: each parameter gathered once, each gradient reduced once. It has no latency, no
order and no memory limit, so it may be out of reach; the planner's own lower bound knows the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from bench.interval import Interval, sign_interval
from bench.modes import Mode
from bench.table import Rounds, busy_median, step_median


@dataclass(frozen=True, slots=True)
class Limit:
    """One planned mode at one rate.

    over: its step over the limit; busy_over: its busy time over one process's step; both paired in
    each round. predicted_us, lower_bound_us: of the plan, without the optimizer.
    """

    mode: str
    title: str
    gbit: float
    limit_us: float
    over: Interval
    busy_over: Interval
    predicted_us: float
    lower_bound_us: float


def make_limits(modes: Sequence[Mode], gbits: Sequence[float], rounds: Rounds) -> list[Limit]:
    """Nothing if no mode is one process, or none is sharded."""
    alone = next((mode.name for mode in modes if not mode.sharding), None)
    sent = [rate.steps[0].link_bytes for r in rounds for m in r.values() for rate in m.rates]
    fewest_bytes = min((size for size in sent if size), default=0)
    if alone is None or not fewest_bytes:
        return []
    found = []
    for index, gbit in enumerate(gbits):
        link_us = fewest_bytes * 8 / (gbit * 1e3)
        singles = [step_median(r[alone].rates[index], "step_us") for r in rounds]
        limits = [max(single, link_us) for single in singles]
        for mode in modes:
            rates = [r[mode.name].rates[index] for r in rounds]
            if not rates[0].lower_bound_us:
                continue
            steps = [step_median(rate, "step_us") for rate in rates]
            busy = map(busy_median, rates)
            found.append(
                Limit(
                    mode=mode.name,
                    title=mode.title,
                    gbit=gbit,
                    limit_us=median(limits),
                    over=sign_interval([s / at for s, at in zip(steps, limits, strict=True)]),
                    busy_over=sign_interval([b / s for b, s in zip(busy, singles, strict=True)]),
                    predicted_us=rates[0].predicted_us,
                    lower_bound_us=rates[0].lower_bound_us,
                )
            )
    return found


def render(limits: Sequence[Limit]) -> str:
    """The table, empty without limits."""
    if not limits:
        return ""
    lines = [HEADER]
    for one in limits:
        over, busy = (
            f"{i.median:.3f} [{i.low:.3f}, {i.high:.3f}]" for i in (one.over, one.busy_over)
        )
        lines.append(
            f"{one.gbit:>5g} {one.title:<28}{one.limit_us / 1e3:>9.1f}  {over:<22}  {busy:<22}"
            f"{one.predicted_us / 1e3:>7.1f}{one.lower_bound_us / 1e3:>13.1f}"
        )
    return "\n".join([*lines, "", FOOTER])


HEADER = (
    f"{'gbit':>5} {'mode':<28}{'limit ms':>9}  {'step / limit':<22}  {'busy / one process':<22}"
    f"{'plan':>7}{'lower bound':>13}"
)
FOOTER = (
    "limit: one process's step, or the time of the fewest bytes that any mode sends if longer;\n"
    "lower bound: no schedule of the graph is faster; like plan, without the optimizer."
)
