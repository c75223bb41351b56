"""Eager FSDP2 against graphshard: from the facts of both runs to numbers and findings.

In: `Facts` of each rank of both runs, of a second eager run where the first steps differ. Out: a
`Verdict`. No torch here.

A group's difference is ||(a - b)|| / max(||a||, FLOOR x the whole gradient's norm) over what was
recorded of its gradients on all ranks: norms and projections, which differ at least where the
gradients do by more than a rotation that keeps both. The floor keeps rounding in a gradient that is
zero but for rounding (a bias before a norm) from counting as a difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from graphshard.doctor.facts import Facts, GradientFacts, StepFacts
from graphshard.doctor.findings import Finding, fault, some, warning
from graphshard.doctor.origin import Cause, Origin

# What the tests of graphshard allow a tensor to differ by, as a share of its norm, after a few
# steps (docs/design.md, Numerics). By the dtype that compute sees.
TOLERANCES = {"float64": 1e-3, "float32": 1e-3}
NARROW_TOLERANCE = 5e-2
FLOOR = 1e-3
FIX_OF_AOTAUTOGRAD = (
    "torch.compile(backend='aot_eager') differs as well: keep the code that is sensitive to it out "
    "of graphs (torch.compiler.disable), or report it to PyTorch"
)


@dataclass(frozen=True, slots=True)
class Side:
    """One run in numbers. step_time_us: median without the first step, of the slowest rank; 0
    if there was but one step. peak_bytes: of the largest rank. Collectives are per step and rank.
    """

    steps: int
    step_time_us: float
    peak_bytes: int
    all_gathers: float
    reduce_scatters: float
    other_collectives: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """ranks, groups: how many. loss_difference, gradient_difference: the largest of all steps, as
    shares; gradient_group: where. tolerance: what both may be. on_gpu: peaks are the allocator's.
    """

    ranks: int
    groups: int
    in_graph: int
    eager: Side
    graphshard: Side
    loss_difference: float
    gradient_difference: float
    gradient_group: str
    tolerance: float
    on_gpu: bool


def tolerance_of(ranks: Sequence[Facts]) -> float:
    """The widest one of the dtypes in use."""
    dtypes = [group.dtype for rank in ranks for group in rank.groups]
    return max((TOLERANCES.get(dtype, NARROW_TOLERANCE) for dtype in dtypes), default=1e-3)


def verdict_of(eager: Sequence[Facts], ours: Sequence[Facts]) -> Verdict:
    """Both have the same ranks, in order, and at least one."""
    steps = differences(eager, ours)
    worst = max(((d, g) for step in steps for g, d in step.items()), default=(0.0, ""))
    return Verdict(
        ranks=len(eager),
        groups=len(ours[0].groups),
        in_graph=sum(group.in_graph for group in ours[0].groups),
        eager=_side(eager),
        graphshard=_side(ours),
        loss_difference=max(loss_differences(eager, ours), default=0.0),
        gradient_difference=worst[0],
        gradient_group=worst[1],
        tolerance=tolerance_of(eager),
        on_gpu=bool(eager[0].device_id),
    )


def _side(ranks: Sequence[Facts]) -> Side:
    later = [[step.time_us for step in rank.steps[1:]] for rank in ranks]
    steps = ranks[0].steps[1:] or ranks[0].steps
    return Side(
        steps=min(len(rank.steps) for rank in ranks),
        step_time_us=max((median(times) for times in later if times), default=0.0),
        peak_bytes=max(rank.peak_bytes for rank in ranks),
        all_gathers=_mean([step.all_gathers for step in steps]),
        reduce_scatters=_mean([step.reduce_scatters for step in steps]),
        other_collectives=_mean([step.other_collectives for step in steps]),
    )


def _mean(counts: Sequence[int]) -> float:
    return sum(counts) / len(counts) if counts else 0.0


def loss_differences(eager: Sequence[Facts], ours: Sequence[Facts]) -> list[float]:
    """For each step the largest difference of a loss, as a share of the rank's largest loss."""
    found: list[float] = []
    for left, right in zip(eager, ours, strict=True):
        scale = max((abs(loss) for step in left.steps for loss in step.losses), default=0.0)
        for place, (a, b) in enumerate(zip(left.steps, right.steps, strict=False)):
            found += [0.0] * (place + 1 - len(found))
            found[place] = max(found[place], _loss_difference(a, b, scale))
    return found


def _loss_difference(a: StepFacts, b: StepFacts, scale: float) -> float:
    if len(a.losses) != len(b.losses):
        return math.inf
    pairs = zip(a.losses, b.losses, strict=True)
    return max((share(_gap(x, y), scale) for x, y in pairs), default=0.0)


def differences(eager: Sequence[Facts], ours: Sequence[Facts]) -> list[dict[str, float]]:
    """For each step: group -> its gradient's difference, as the module's docstring has it."""
    num_steps = min(len(rank.steps) for rank in (*eager, *ours))
    return [_step_differences(eager, ours, place) for place in range(num_steps)]


def _step_differences(
    eager: Sequence[Facts], ours: Sequence[Facts], place: int
) -> dict[str, float]:
    gaps: dict[str, float] = {}
    norms: dict[str, float] = {}
    for left, right in zip(eager, ours, strict=True):
        others = {g.group: g for g in right.steps[place].gradients}
        for gradient in left.steps[place].gradients:
            name = gradient.group
            other = others.get(name, GradientFacts(name, (), ()))
            gaps[name] = math.hypot(gaps.get(name, 0.0), _distance(gradient, other))
            norms[name] = math.hypot(norms.get(name, 0.0), *map(_number, gradient.norms))
    floor = FLOOR * math.hypot(*norms.values())
    return {name: share(gaps[name], max(norms[name], floor)) for name in gaps}


def _distance(a: GradientFacts, b: GradientFacts) -> float:
    if len(a.norms) != len(b.norms):
        return math.inf
    pairs = zip((*a.norms, *a.projections), (*b.norms, *b.projections), strict=True)
    return math.hypot(*(_gap(_number(x), _number(y)) for x, y in pairs))


def _number(value: float | None) -> float:
    return 0.0 if value is None else value


def same_number(x: float, y: float) -> bool:
    return x == y or (math.isnan(x) and math.isnan(y))


def _gap(x: float, y: float) -> float:
    """|x - y|; what is infinite or not a number in both runs is no difference between them."""
    if same_number(x, y):
        return 0.0
    gap = abs(x - y)
    return gap if math.isfinite(gap) else math.inf


def share(gap: float, scale: float) -> float:
    if gap == 0:
        return 0.0
    return gap / scale if scale > 0 else math.inf


def starts_alike(eager: Sequence[Facts], ours: Sequence[Facts]) -> bool:
    """The first step, which no update precedes, is within the tolerance. Its losses alone do not
    tell: two numbers can be close by chance.
    """
    return max(_first_gaps(eager, ours)) <= tolerance_of(eager)


def _first_gaps(eager: Sequence[Facts], ours: Sequence[Facts]) -> tuple[float, float]:
    """Of the first step's losses, and of its gradients."""
    losses, gradients = loss_differences(eager, ours), differences(eager, ours)
    return (
        losses[0] if losses else 0.0,
        max(gradients[0].values(), default=0.0) if gradients else 0.0,
    )


def repeats(eager: Sequence[Facts], again: Sequence[Facts]) -> bool:
    """again: a second eager run, made where the first steps differ, else none. If it differs from
    the first one too, the script does not repeat itself, and nothing can be said about graphshard.
    """
    return not again or starts_alike(eager, again)


def compare(
    eager: Sequence[Facts],
    ours: Sequence[Facts],
    again: Sequence[Facts] = (),
    origin: Origin | None = None,
) -> tuple[Finding, ...]:
    """What is wrong with the numbers, at most one finding.

    again: as in `repeats`. origin: whose the difference is, if that was looked for.
    """
    if not repeats(eager, again):
        loss, gradient = _first_gaps(eager, again)
        return (
            warning(
                "GS1113",
                f"the first losses of two eager runs are {loss:.1e} apart, the first gradients "
                f"{gradient:.1e}: the script is not seeded, so that its numbers cannot be "
                "compared with graphshard's",
                "torch.manual_seed(0) at the start, and a fixed order of the data",
            ),
        )
    found = tuple(_differing(eager, ours, tolerance_of(eager)))
    if origin is not None and origin.cause is Cause.AOTAUTOGRAD:
        return tuple(replace(finding, fix=FIX_OF_AOTAUTOGRAD) for finding in found)
    return found


def _differing(eager: Sequence[Facts], ours: Sequence[Facts], allowed: float) -> Iterator[Finding]:
    losses = loss_differences(eager, ours)
    for place, groups in enumerate(differences(eager, ours)):
        if losses[place] > allowed:
            yield _loss_finding(place, losses[place], allowed)
            return
        wrong = {name: d for name, d in groups.items() if d > allowed}
        if wrong:
            yield _gradient_finding(place, wrong, len(groups), allowed)
            return


def _loss_finding(place: int, gap: float, allowed: float) -> Finding:
    return fault(
        "GS1112",
        f"the loss of step {place} differs by {gap:.1e} of its size (allowed {allowed:g}), though "
        "all gradients before it agree",
        "run with GRAPHSHARD_COMPUTE=aten: if the difference goes away, compiled code is its cause",
    )


def _gradient_finding(
    place: int, wrong: Mapping[str, float], count: int, allowed: float
) -> Finding:
    names = sorted(wrong, key=lambda name: -wrong[name])
    return fault(
        "GS1111",
        f"the gradients of {some(names)} differ by {wrong[names[0]]:.1e} of their norm in step "
        f"{place} (allowed {allowed:g}); those of {count - len(names)} other groups agree",
        "look at hooks and custom communication of the group; run with GRAPHSHARD_COMPUTE=aten: if "
        "the difference goes away, compiled code is its cause, else please report it",
    )
