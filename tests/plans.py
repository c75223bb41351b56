"""Plans made by hand, for the tests of everything that reads plans. Standard library only."""

from collections.abc import Iterable
from dataclasses import replace

from graphshard.schedule.plan import (
    Direction,
    Estimate,
    Figures,
    GroupInfo,
    ParamInfo,
    Plan,
    Schedule,
    Step,
    StepKind,
)

# Of no plan: for what is not about time and memory.
ESTIMATE = Estimate(Figures(30.0, 6.0, 200), Figures(40.0, 15.0, 180), 200, 24.0)

KINDS = {
    "issue": StepKind.GATHER_ISSUE,
    "wait": StepKind.GATHER_WAIT,
    "release": StepKind.RELEASE,
    "reduce": StepKind.REDUCE_ISSUE,
    "reduced": StepKind.REDUCE_WAIT,
    "add": StepKind.ALL_REDUCE_ISSUE,
    "added": StepKind.ALL_REDUCE_WAIT,
}


def group(id: int, fqn: str, num_bytes: int = 100, *, world: int = 2, reshard: bool = True):
    weight = ParamInfo(f"{fqn}.weight", (num_bytes // 4, 1), "float32", True, num_bytes)
    return GroupInfo(id, fqn, (weight,), world, reshard, num_bytes)


def steps(text: str) -> tuple[Step, ...]:
    """ "issue 0, wait 0, compute 3, release 0 kept": the number is a group, or a count of ops.

    "issue 0+1": both groups in one collective. "issue 0:1/2": parameters 1 and 2 of group 0.
    """
    found: list[Step] = []
    done = 0
    for part in filter(None, (p.strip() for p in text.split(","))):
        word, number, *kept = part.split()
        if word == "compute":
            found.append(Step(StepKind.COMPUTE, start=done, stop=done + int(number)))
            done += int(number)
        else:
            found.append(replace(_of_groups(KINDS[word], number), kept=kept == ["kept"]))
    return tuple(found)


def _of_groups(kind: StepKind, text: str) -> Step:
    text, _, params = text.partition(":")
    first, *others = map(int, text.split("+"))
    places = tuple(map(int, filter(None, params.split("/"))))
    return Step(kind, first, with_groups=tuple(others), params=places)


def plan(groups: Iterable[GroupInfo], forward: str, backward: str | None = None, name: str = "toy"):
    return Plan(
        name=name,
        torch_version="2.13.0",
        groups=tuple(groups),
        forward=Schedule(Direction.FORWARD, steps(forward)),
        backward=None if backward is None else Schedule(Direction.BACKWARD, steps(backward)),
        estimate=ESTIMATE,
    )


def two_layers() -> Plan:
    """Layer 0 is resharded after forward; layer 1 is kept gathered until backward."""
    return plan(
        [group(0, "layers.0", 100), group(1, "layers.1", 60, reshard=False)],
        "issue 0, wait 0, issue 1, compute 4, release 0, wait 1, compute 3, release 1 kept",
        "issue 1 kept, issue 0, wait 1 kept, compute 5, release 1, reduce 1, wait 0, compute 6,"
        "release 0, reduce 0, reduced 1, reduced 0",
    )
