"""Cases drawn at random, the same ones for the same seed."""

from collections.abc import Iterator
from random import Random
from typing import Any

from actions import ACTIONS, SETTINGS
from points import POINTS
from worker import OWN_POINTS, Case, Fault

# How often a point is passed in a run, about: counts are drawn below.
PASSAGES = {
    "capture": 1,
    "agreement": 1,
    "finish": 5,
    "replan": 1,
    "save": 1,
    "checkpoint": 1,
    "hook": 30,
    "step": 5,
}
MANY = 40


def drawn(seed: int, number: int) -> Iterator[Case]:
    random = Random(seed)
    for _ in range(number):
        yield draw(random)


def draw(random: Random) -> Case:
    action = random.choice([*ACTIONS, *ACTIONS, *SETTINGS])
    point = random.choice([*POINTS, *OWN_POINTS])
    if action == "full disk":
        point = random.choice(["capture", "save", "replan", "checkpoint"])
    if action in SETTINGS:
        point = "step"
    replicas = random.choice([1, 1, 1, 2])
    if point.startswith("all-reduce"):
        replicas = 2
    world_size = random.choice([2, 2, 3] if replicas == 1 else [2, 4])
    rank = -1 if action == "interrupt" else random.randrange(world_size)
    count = random.randrange(PASSAGES.get(point, MANY))
    if action in SETTINGS:  # before the first call they are eager FSDP2's, which then hangs
        count = max(count, 1)
    fault = Fault(action, point, count, rank)
    saves = point == "checkpoint" or random.random() < 0.1
    micro_steps = random.choice([1, 1, 2])
    return Case(
        world_size,
        fault,
        options(random, action, point),
        micro_steps,
        replicas,
        saves,
        rehearsed=action.startswith("unshard") and random.random() < 0.5,
    )


def options(random: Random, action: str, point: str) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if point == "save" or action == "full disk":
        made[random.choice(["dump_dir", "report_dir"])] = True
    if point == "replan" or random.random() < 0.2:
        made["replan_after"] = random.choice([2, 3])
    if random.random() < 0.2:
        made["overlap_optimizer"] = True
    if random.random() < 0.1:
        made["verify"] = "every"
    return made
