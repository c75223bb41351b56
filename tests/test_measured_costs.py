"""Measured costs on disk: found again by the same problem alone, and never in a damaged file."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from planning import layers

from graphshard.compiler.measured_costs import Posed, load, save
from graphshard.errors import GraphshardWarning
from graphshard.planner.activations import HostLink, Offload
from graphshard.planner.problem import CollectiveLane, Problem
from graphshard.planner.separate_group import reductions_apart

PROBLEM = layers(4, activations=100, root=True)
POSED = Posed(
    "k" * 64,
    replace(
        PROBLEM,
        lanes=(*PROBLEM.lanes, CollectiveLane("offload"), CollectiveLane("reload")),
        host=HostLink(len(PROBLEM.lanes), len(PROBLEM.lanes) + 1, 1.0),
        offloads=(Offload(1, 1, 2, 50, 60.0),),
    ),
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRAPHSHARD_CACHE_DIR", str(tmp_path))
    return tmp_path


def slower(problem: Problem) -> Problem:
    return replace(
        problem,
        forward=tuple(replace(region, us=2 * region.us) for region in problem.forward),
        lanes=tuple(replace(lane, launch_us=lane.launch_us / 2) for lane in problem.lanes),
        offloads=tuple(replace(offload, us=90.0) for offload in problem.offloads),
        groups=tuple(
            replace(g, parts=tuple(replace(p, gather=replace(p.gather, us=7.0)) for p in g.parts))
            for g in problem.groups
        ),
    )


def test_costs_come_back() -> None:
    assert load(POSED) is None
    save(POSED, slower(POSED.problem))
    assert load(POSED) == slower(POSED.problem)
    assert load(replace(POSED, key="other")) is None


def test_costs_of_reductions_on_lanes_of_their_own() -> None:
    """They are found again by the problem as it was before it was planned."""
    save(POSED, reductions_apart(slower(POSED.problem)))
    assert load(POSED) == slower(POSED.problem)


DAMAGE: dict[str, Callable[[str], str]] = {
    "cut": lambda text: text[:-40],
    "list": lambda text: "[]",
    "checksum": lambda text: text.replace("7.0", "8.0"),
    "other key": lambda text: text.replace("kkkk", "kkkj"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_ignored(folder: Path, damage: Callable[[str], str]) -> None:
    save(POSED, slower(POSED.problem))
    (file,) = folder.iterdir()
    file.write_text(damage(file.read_text()))
    with pytest.warns(GraphshardWarning, match="GS706: .*costs.json is ignored"):
        assert load(POSED) is None


CHANGES: dict[str, Callable[[Problem], Problem]] = {
    "fewer groups": lambda p: replace(p, groups=p.groups[:-1]),
    "a region less": lambda p: replace(p, forward=p.forward[:-1]),
    "a smaller group": lambda p: replace(
        p, groups=(replace(p.groups[0], world_size=3), *p.groups[1:])
    ),
    "another budget": lambda p: replace(p, budget_bytes=5),
    "impossible": lambda p: replace(p, forward=tuple(replace(r, us=-1.0) for r in p.forward)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_costs_of_another_problem_are_refused(change: Callable[[Problem], Problem]) -> None:
    other = change(POSED.problem)
    save(replace(POSED, problem=other), other)
    with pytest.warns(GraphshardWarning, match="GS706"):
        assert load(POSED) is None


def test_a_file_is_text_that_people_can_read(folder: Path) -> None:
    save(POSED, slower(POSED.problem))
    (file,) = folder.iterdir()
    problem = json.loads(json.loads(file.read_text())["text"])
    assert problem["groups"][0]["parts"][0]["gather"]["us"] == 7.0
