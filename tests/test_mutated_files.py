"""Damaged files, from seeds: every reader and every command behind it ends well or with a code.

GRAPHSHARD_MUTATIONS=5000 pytest -s tests/test_mutated_files.py is the acceptance run (minutes);
GRAPHSHARD_FIRST_SEED=n begins elsewhere. A failure names its seeds.
"""

import hashlib
import json
import os
import random
import re
import resource
import signal
import time
import traceback
import warnings
from contextlib import contextmanager, suppress

import pytest
from forecasts import as_predicted
from forecasts import planned as planned_by_hand
from mutations import mutated
from pictures import every_plan
from planning import layers
from plans import two_layers
from profiles import PROFILE
from traces import trace_of

from graphshard.cli import main
from graphshard.compiler import plan_cache
from graphshard.cost.comm import CollectiveKind, RankGroup
from graphshard.cost.machine import collective_us, launch_us
from graphshard.cost.presets import preset
from graphshard.cost.profile import CostProfile, calibrated, read_profile
from graphshard.cost.roofline import OpWork, op_us
from graphshard.errors import GraphshardError, GraphshardWarning
from graphshard.schedule.plan import Plan
from graphshard.view.costs import profile_lines
from graphshard.view.log_text import log_text

MUTATIONS = int(os.environ.get("GRAPHSHARD_MUTATIONS", "240"))
FIRST = int(os.environ.get("GRAPHSHARD_FIRST_SEED", "0"))
# Of one file and all commands on it; on a busy machine.
LIMIT_S = 20
MOST_GROWTH_BYTES = 2**30
OURS = re.compile(r"graphshard: error: GS\d{3,4}: .*\n")


class TooLong(Exception):
    """A case that does not end."""


@contextmanager
def limit(seconds):
    def stop(*_):
        raise TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def seeds(share):
    """A part of all mutations; each kind of file has seeds of its own."""
    return range(FIRST, FIRST + max(1, round(MUTATIONS * share)))


def failures(kind, share, case):
    """Runs `case(draw)` for each seed; the seeds that raise, with the end of their traceback."""
    found, before = [], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.monotonic()
    for seed in seeds(share):
        try:
            with limit(LIMIT_S):
                case(random.Random(f"{kind} {seed}"))
        except Exception:
            found.append(f"seed {seed}: " + "".join(traceback.format_exc().splitlines(True)[-7:]))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    print(f"{kind}: {len(seeds(share))} files, {time.monotonic() - start:.0f} s, +{grown:,} bytes")
    assert grown < MOST_GROWTH_BYTES
    return found


@pytest.fixture
def answers(capsys):
    """Runs a command; it ends well, or with one line that has a code."""

    def call(*argv):
        status = main([str(word) for word in argv])
        out, err = capsys.readouterr()
        assert status in (0, 2), (argv, status, err)
        assert status == 0 or (OURS.fullmatch(err) and not out), (argv, err)
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", out + err), (argv, out, err)
        return status

    return call


def measured_plan():
    made = planned_by_hand(layers(3, activations=100))
    return made, Plan.from_data({**json.loads(made.to_json()), "measured": _measured(made)})


def _measured(made):
    from graphshard.schedule.steps import to_json

    return json.loads(to_json(as_predicted(made, 1.1, 1.2)))


def base_plans():
    drawn = every_plan()
    names = ("merged", "split", "random", "inference", "one lane", "no costs", "empty")
    return [measured_plan()[1], two_layers(), *(drawn[name] for name in names)]


def test_plans(tmp_path, answers):
    costs_by_point = [plan.to_json().encode() for plan in base_plans()]
    base, file, out = (tmp_path / name for name in ("base.json", "x.plan.json", "out"))

    def case(draw):
        raw = draw.choice(costs_by_point)
        base.write_bytes(raw)
        file.write_bytes(mutated(draw, raw))
        shown = answers("show", file)
        commands = (
            ["show", file, "--json"], ["show", file, "--why"], ["show", file, "--why", "--json"],
            ["show", file, "--group", "layers.0"], ["view", file, "-o", out],
            ["view", file, "--perfetto", out], ["view", file, "--measured", base, "-o", out],
            ["diff", file, base], ["diff", base, file], ["diff", file, base, "--json"],
            ["diff", file], ["diff", base, "--measured", file],
        )  # fmt: skip
        for argv in draw.sample(commands, 3):
            answers(*argv)
        if shown == 0:
            _use(Plan.from_json(file.read_text()))

    assert failures("plan", 0.5, case) == []


def _use(plan):
    """What users do with a plan in Python; a figure that it does not have is a ValueError."""
    assert Plan.from_json(plan.to_json()) == plan
    log_text(plan, plan.measured)
    assert len(plan.residency()) <= sum(len(s.steps) for s in plan.schedules)
    for figure in ("step_time", "peak_bytes"):
        if plan.forecasts and plan.priced_on is None:
            with pytest.raises(ValueError, match="what it was priced for"):
                plan.formula(figure)
    if plan.measured is not None and plan.forecasts:
        with suppress(ValueError):  # of another order of the graph than the plan's
            str(plan.compare(plan.measured))


def test_traces(tmp_path, answers):
    plan = planned_by_hand(layers(3, activations=100))
    base, file, out = (tmp_path / name for name in ("base.json", "x.trace.json", "out"))
    base.write_text(plan.to_json())
    raw = json.dumps(trace_of(plan)).encode()
    file.write_bytes(raw)
    assert answers("diff", base, "--measured", file) == 0

    def case(draw):
        file.write_bytes(mutated(draw, raw))
        answers("diff", base, "--measured", file)
        answers("diff", base, "--measured", file, "--json")
        answers("view", base, "--measured", file, "-o", out)
        answers("view", base, "--perfetto", out, "--merge", file)

    assert failures("trace", 0.2, case) == []


def test_profiles(tmp_path):
    file = tmp_path / "machine.json"
    raw = PROFILE.to_json().encode()

    def case(draw):
        file.write_bytes(mutated(draw, raw))
        try:
            profile = read_profile(file)
        except GraphshardError:
            return
        assert CostProfile.from_json(profile.to_json()) == profile
        profile_lines(profile)
        machine = calibrated(preset("cpu"), profile)
        for kind in CollectiveKind:
            for group in (RankGroup(2, 2, "world"), RankGroup(16, 8, "world"), RankGroup(1, 1)):
                assert collective_us(machine, kind, group, 2**20) >= 0
                assert launch_us(machine, kind, group, 2**20) >= 0
        assert op_us(machine.processor, OpWork(1e9, 1e6)) >= 0

    assert failures("profile", 0.15, case) == []


def test_cache_entries(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAPHSHARD_CACHE_DIR", str(tmp_path))
    made = planned_by_hand(layers(3, activations=100))
    problem = layers(3, activations=100)
    key = plan_cache.key_of(problem, None, made.groups, "2.13.0")
    plan_cache.save(key, made)
    (file,) = tmp_path.glob("*.plan.json")
    raw = file.read_bytes()

    def suits(plan):
        plan_cache.check(plan, problem, made.groups, "2.13.0")

    assert plan_cache.load(key, "toy", suits) == made

    def case(draw):
        change = draw.choice((_mutated_entry, _resealed))
        file.write_bytes(change(draw, raw))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = plan_cache.load(key, "toy", suits)
        assert [w.category for w in said] == ([] if found else [GraphshardWarning])
        # What is not part of the schedule may differ, if its checksum is right.
        assert found is None or found.schedules == made.schedules or change is _resealed

    assert failures("cache", 0.15, case) == []


def _mutated_entry(draw, raw):
    return mutated(draw, raw)


def _resealed(draw, raw):
    """The plan inside is changed, and the checksum with it."""
    entry = json.loads(raw)
    entry["text"] = mutated(draw, entry["text"].encode()).decode("utf-8", "replace")
    entry["sha256"] = hashlib.sha256(entry["text"].encode(errors="replace")).hexdigest()
    return json.dumps(entry).encode()
