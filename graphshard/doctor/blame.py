"""Finds whose difference it is: AOTAutograd's, on which graphshard stands, or not.

In: `Facts` of each rank of three runs: with eager FSDP2, with graphshard, with torch's `aot_eager`.
Out: an `Origin`. No torch here.

What is judged is the first step in which graphshard departs from eager: later ones follow from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from graphshard.doctor.facts import Facts, GradientFacts, StepFacts
from graphshard.doctor.origin import Cause, Departure, Doubt, Origin, Param
from graphshard.doctor.verdict import differences, loss_differences, same_number, tolerance_of

# Rounding is a matter of chance: two differences of one cause have about one size.
MOST_TIMES = 8.0


def departure_of(eager: Sequence[Facts], ours: Sequence[Facts]) -> Departure | None:
    """What is to be explained: more than the tolerance; where all ran as ATen ops, any bit."""
    found = _first(eager, ours, tolerance_of(eager))
    if found is None and all(rank.is_exact for rank in ours):
        found = _first(eager, ours, 0.0)
    return found


def origin_of(
    departure: Departure,
    eager: Sequence[Facts],
    ours: Sequence[Facts],
    aot: Sequence[Facts],
) -> Origin:
    """aot: as many ranks and steps as in the other runs; none if that run failed."""
    if not aot:
        return _origin(departure, Cause.UNDECIDED, doubt=Doubt.FAILED)
    if not any(rank.aot_graphs for rank in aot):
        return _origin(departure, Cause.UNDECIDED, doubt=Doubt.NOT_COMPILED)
    if _is_same(departure, ours, aot):
        return _origin(departure, Cause.AOTAUTOGRAD, is_same=True)
    other = _first(eager, aot, departure.allowed)
    if other is not None and _is_alike(departure, other, eager, ours, aot):
        return _origin(departure, Cause.AOTAUTOGRAD)
    # What stays just within the tolerance, or came before, proves nothing.
    other = _first(eager, aot, departure.allowed / MOST_TIMES)
    if other is None or other.step > departure.step:
        return _origin(departure, Cause.OTHER)
    return _origin(departure, Cause.UNDECIDED, doubt=Doubt.ELSEWHERE)


def _origin(
    departure: Departure, cause: Cause, *, is_same: bool = False, doubt: Doubt | None = None
) -> Origin:
    groups = tuple(dict.fromkeys(group for group, _ in departure.params))
    return Origin(cause, departure.step, departure.in_loss, groups, is_same, doubt)


def _first(eager: Sequence[Facts], other: Sequence[Facts], allowed: float) -> Departure | None:
    gaps = zip(loss_differences(eager, other), differences(eager, other), strict=False)
    for step, (loss, groups) in enumerate(gaps):
        params = _other_params(eager, other, step)
        if allowed:
            params = tuple(param for param in params if groups[param[0]] > allowed)
        if loss > allowed or params:
            return Departure(step, allowed, loss > allowed, params)
    return None


def _other_params(eager: Sequence[Facts], other: Sequence[Facts], step: int) -> tuple[Param, ...]:
    """Those of which any bit differs on any rank. A group that one run does not have differs."""
    found: dict[Param, None] = {}
    for left, right in zip(eager, other, strict=True):
        there = {gradient.group: gradient for gradient in right.steps[step].gradients}
        for gradient in left.steps[step].gradients:
            missing = GradientFacts(gradient.group, (), (), ())
            digests = there.get(gradient.group, missing).digests
            for place, digest in enumerate(gradient.digests):
                if place >= len(digests) or digests[place] != digest:
                    found[gradient.group, place] = None
    return tuple(found)


def _is_same(departure: Departure, ours: Sequence[Facts], aot: Sequence[Facts]) -> bool:
    """In all that departs; `aot_eager` may depart in more."""
    step = departure.step
    others = dict.fromkeys(_other_params(ours, aot, step))
    pairs = zip(ours, aot, strict=True)
    return not any(param in others for param in departure.params) and not (
        departure.in_loss
        and any(_losses_differ(left.steps[step], right.steps[step]) for left, right in pairs)
    )


def _losses_differ(left: StepFacts, right: StepFacts) -> bool:
    return len(left.losses) != len(right.losses) or not all(
        same_number(a, b) for a, b in zip(left.losses, right.losses, strict=True)
    )


def _is_alike(
    departure: Departure,
    other: Departure,
    eager: Sequence[Facts],
    ours: Sequence[Facts],
    aot: Sequence[Facts],
) -> bool:
    """`aot_eager` departs there too, not before, and by about as much."""
    step = departure.step
    if other.step != step or (departure.in_loss and not other.in_loss):
        return False
    if not set(departure.params) <= set(other.params):
        return False
    mine, theirs = differences(eager, ours)[step], differences(eager, aot)[step]
    groups = dict.fromkeys(group for group, _ in departure.params)
    sizes = [(mine[group], theirs[group]) for group in groups]
    if departure.in_loss:
        sizes.append((loss_differences(eager, ours)[step], loss_differences(eager, aot)[step]))
    return math.hypot(*(a for a, _ in sizes)) <= MOST_TIMES * math.hypot(*(b for _, b in sizes))
