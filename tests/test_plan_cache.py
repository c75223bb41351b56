"""The plan cache: hit, miss, damaged files, folders that cannot be used."""

import warnings
from dataclasses import replace

import pytest
from plans import two_layers

from graphshard import plan_cache
from graphshard.errors import GraphshardWarning
from graphshard.planner.problem import Lane, Problem, Region

PROBLEM = Problem(groups=(), lanes=(Lane("lane 0"),), forward=(Region(5.0),), budget_bytes=100)
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


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: '{"key": "x", "plan": "{}"}',
        lambda text: text.replace("gather_issue", "guess"),
        lambda text: text.replace('\\"schema\\":', '\\"schema_\\":'),
    ],
)
def test_a_damaged_file_is_ignored_with_a_warning(folder, damage):
    plan_cache.save(key(), PLAN)
    (file,) = folder.iterdir()
    text = file.read_text()
    assert damage(text) != text
    file.write_text(damage(text))
    with pytest.warns(GraphshardWarning, match="GS706: .*plan.json is ignored"):
        assert plan_cache.load(key(), "g") is None
    plan_cache.save(key(), PLAN)
    assert plan_cache.load(key(), "g") is not None


def test_a_folder_that_cannot_be_written_to(folder):
    folder.write_text("a file, not a folder")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan_cache.save(key(), PLAN)
    assert folder.read_text() == "a file, not a folder"


def test_nothing_is_left_behind(folder):
    plan_cache.save(key(), PLAN)
    plan_cache.save(key(), PLAN)
    assert len(list(folder.iterdir())) == 1
