"""The plan cache: hit, miss, damaged files, folders that cannot be used."""

import hashlib
import json
import multiprocessing
import os
from dataclasses import replace

import pytest
from planning import layers
from plans import group, two_layers

from graphshard.compiler import plan_cache
from graphshard.errors import FileError, GraphshardWarning, PlanError
from graphshard.files import cache
from graphshard.planner.plan_step import plan_step
from graphshard.planner.problem import CollectiveLane, Problem, Region
from graphshard.schedule.plan import Plan

PROBLEM = Problem(
    groups=(), lanes=(CollectiveLane("lane 0"),), forward=(Region(5.0),), budget_bytes=100
)
PLAN = two_layers()


def key(problem=PROBLEM, groups=PLAN.groups, version="2.13.0"):
    return plan_cache.key_of(problem, None, groups, version)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAPHSHARD_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_miss_then_hit():
    assert plan_cache.load(key(), "graph 1/0") is None
    plan_cache.save(key(), PLAN)
    assert plan_cache.load(key(), "graph 1/0") == replace(PLAN, name="graph 1/0")


def test_the_key_holds_what_matters():
    others = [
        key(replace(PROBLEM, budget_bytes=101)),
        key(replace(PROBLEM, forward=(Region(5.1),))),
        key(groups=PLAN.groups[:1]),
        key(version="2.14.0"),
    ]
    assert len({key(), *others}) == 5
    assert key() == key()


def resealed(text, change):
    """The file with another plan and the right checksum of it."""
    data = json.loads(text)
    plan = json.loads(data["text"])
    change(plan)
    data["text"] = json.dumps(plan)
    data["sha256"] = hashlib.sha256(data["text"].encode()).hexdigest()
    return json.dumps(data)


def edited(text, change):
    data = json.loads(text)
    change(data)
    return json.dumps(data)


DAMAGE = {
    "empty": lambda text: "",
    "cut": lambda text: text[: len(text) // 2],
    "list": lambda text: "[]",
    "other plan": lambda text: edited(text, lambda d: d.update(key="x")),
    "no checksum": lambda text: edited(text, lambda d: d.pop("sha256")),
    "a word": lambda text: text.replace("gather_issue", "guess"),
    "a name": lambda text: text.replace("layers.0", "layers.9"),
    "schema": lambda text: text.replace('\\"schema\\":', '\\"schema_\\":'),
    "nested": lambda text: "[" * 10**5,
    "deep plan": lambda text: edited(text, lambda d: d.update(text="[" * 10**5)),
    "resealed schema": lambda text: resealed(text, lambda p: p.update(schema=99)),
    "resealed, no steps": lambda text: resealed(text, lambda p: p["forward"].update(steps=[])),
    "resealed, no wait": lambda text: resealed(text, lambda p: p["backward"]["steps"].pop()),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_ignored_with_a_warning(folder, damage):
    plan_cache.save(key(), PLAN)
    (file,) = folder.iterdir()
    text = file.read_text()
    assert damage(text) != text
    file.write_text(damage(text))
    # What suits the problem is asked last; these files differ from what was planned.
    with pytest.warns(GraphshardWarning, match="GS706: .*plan.json is ignored") as found:
        assert plan_cache.load(key(), "g", is_planned) is None
    assert len(found) == 1
    plan_cache.save(key(), PLAN)
    assert plan_cache.load(key(), "g", is_planned) is not None


def is_planned(plan):
    if plan != PLAN:
        raise PlanError("GS603", "another plan")


def planned():
    """A problem with a plan of it, as the compiler has them."""
    problem = layers(4, activations=100, root=True)
    found = plan_step(problem)
    groups = tuple(group(i, g.fqn) for i, g in enumerate(problem.groups))
    made = Plan(
        "toy", "2.13.0", groups, *found.schedules,
        estimate=found.estimate, reasons=found.reasons, forecasts=found.forecasts,
        fsdp2=found.fsdp2,
    )  # fmt: skip
    return problem, groups, made


def without(kinds):
    def change(data):
        for direction in ("forward", "backward"):
            data[direction]["steps"] = [
                s for s in data[direction]["steps"] if s["kind"] not in kinds
            ]
        data["forecasts"], data["estimate"]["ours"]["peak_at"] = [], None

    return change


def moved(data):
    steps = data["backward"]["steps"]
    place = max(i for i, s in enumerate(steps) if s["kind"] == "gather_issue")
    steps.insert(0, steps.pop(place))


@pytest.mark.parametrize(
    "change",
    [
        without(("reduce_issue", "reduce_wait")),
        without(("release",)),
        without(("gather_issue", "gather_wait", "release")),
        moved,
        lambda d: d["groups"][0].update(fqn="other"),
        lambda d: d.update(torch_version="2.12.0"),
        lambda d: d.update(recompute={"activations": [{"group": "layers.0", "number": 0}]}),
        lambda d: d.update(backward=None, forecasts=[]),
        lambda d: d.update(reduces_apart=True),
    ],
)
def test_a_plan_that_does_not_suit_the_problem(change):
    problem, groups, made = planned()
    data = json.loads(made.to_json())
    change(data)
    plan_cache.check(made, problem, groups, "2.13.0")
    with pytest.raises((PlanError, FileError)):
        plan_cache.check(Plan.from_json(json.dumps(data)), problem, groups, "2.13.0")


def _save_twice():
    plan_cache.save(key(), PLAN)
    plan_cache.save(key(), PLAN)


def test_a_folder_that_cannot_be_written_to(folder):
    folder.write_text("a file, not a folder")
    with pytest.warns(GraphshardWarning, match="GS1201: the cache is not written") as found:
        _save_twice()
    assert len(found) == 1
    assert folder.read_text() == "a file, not a folder"


def test_a_file_that_cannot_be_read(folder):
    plan_cache.save(key(), PLAN)
    (file,) = folder.iterdir()
    file.unlink()
    file.mkdir()
    with pytest.warns(GraphshardWarning, match="GS706: .*it is a folder"):
        assert plan_cache.load(key(), "g") is None
    plan_cache.save(key(), PLAN)


def test_nothing_is_left_behind(folder):
    plan_cache.save(key(), PLAN)
    plan_cache.save(key(), PLAN)
    assert len(list(folder.iterdir())) == 1


def test_what_was_not_used_for_longest_goes(folder, monkeypatch):
    plan_cache.save(key(), PLAN)
    (file,) = folder.iterdir()
    keys = [hashlib.sha256(bytes([n])).hexdigest() for n in range(5)]
    stranger = folder / "notes.txt"
    stranger.write_text("of the user")
    os.utime(stranger, (0, 0))
    for age, name in enumerate(keys[:3]):
        plan_cache.save(name, PLAN)
        os.utime(folder / f"{name[:32]}.plan.json", (100 + age, 100 + age))
    left = folder / ".killed.part"
    left.write_text("")
    os.utime(left, (0, 0))
    assert plan_cache.load(keys[0], "g") is not None, "used now"
    monkeypatch.setattr(cache, "MOST_BYTES", int(3.5 * file.stat().st_size))
    plan_cache.save(keys[3], PLAN)
    stay = {f"{name[:32]}.plan.json" for name in (key(), keys[0], keys[3])}
    assert {f.name for f in folder.iterdir()} == stay | {"notes.txt"}


def _writer(number):
    for _ in range(20):
        plan_cache.save(key(), replace(PLAN, name=f"of {number}"))


def test_launches_that_share_a_folder(folder):
    others = [multiprocessing.get_context("fork").Process(target=_writer, args=(n,)) for n in "ab"]
    for process in others:
        process.start()
    seen = 0
    while any(process.is_alive() for process in others):
        seen += plan_cache.load(key(), "g") is not None  # never a damaged one: warnings are errors
    for process in others:
        process.join(30)
    assert [process.exitcode for process in others] == [0, 0]
    assert plan_cache.load(key(), "g") == replace(PLAN, name="g")
    assert len(list(folder.iterdir())) == 1
