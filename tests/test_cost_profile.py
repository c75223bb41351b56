"""The profile file: round trip, damage, joining a preset; its text."""

import json
from dataclasses import replace

import pytest
from profiles import PROFILE

from graphshard.cost.comm import CollectiveKind, RankGroup
from graphshard.cost.curve import Fit, Sample, Trust, line
from graphshard.cost.machine import collective_us, host_copy_us
from graphshard.cost.machine_text import from_text, to_text
from graphshard.cost.presets import preset, preset_names
from graphshard.cost.profile import CostProfile, calibrated, read_profile
from graphshard.cost.roofline import Attention, OpWork, arithmetic_of, op_us
from graphshard.errors import CostError
from graphshard.view.costs import profile_lines


def test_round_trip():
    text = PROFILE.to_json()
    assert CostProfile.from_json(text) == PROFILE
    assert json.loads(text)["comm"][0]["residuals"] == [-0.0537, -0.0001]


def test_what_was_measured_wins():
    machine = calibrated(preset("cpu"), PROFILE)
    assert op_us(machine.processor, OpWork(1e6, 0)) == 2 + 20
    assert op_us(machine.processor, OpWork(1e6, 0, attention=Attention(64, 1024))) == 3 + 100
    assert op_us(machine.processor, OpWork(0, 20_000)) == 1 + 1
    assert arithmetic_of(machine.processor, "float32").trust is Trust.CALIBRATED
    assert arithmetic_of(machine.processor, "bfloat16").trust is Trust.PRESET
    group = RankGroup(2, 2, "world")
    assert collective_us(machine, CollectiveKind.ALL_GATHER, group, 16384) == pytest.approx(112.288)
    assert collective_us(machine, CollectiveKind.BROADCAST, group, 16384) == collective_us(
        preset("cpu"), CollectiveKind.BROADCAST, group, 16384
    )


def test_a_link_to_a_host_may_have_been_measured():
    fit = Fit(line(10.0, 40_000.0), (Sample(1e6, 35.0), Sample(1e8, 2510.0)))
    profile = replace(PROFILE, host=fit)
    assert CostProfile.from_json(profile.to_json()) == profile
    host = calibrated(preset("h100"), profile).host
    assert host_copy_us(host, 4_000_000) == 10 + 100
    assert host.trust is Trust.CALIBRATED
    assert "copy to the host or back" in profile_lines(profile)
    # What was not measured stays the preset's; a device without one has no host.
    assert calibrated(preset("h100"), PROFILE).host == preset("h100").host
    assert calibrated(preset("cpu"), PROFILE).host is None


def test_what_collectives_take_of_compute_may_have_been_measured():
    profile = replace(PROFILE, issue_us=300.5, wait_us=100.25)
    assert CostProfile.from_json(profile.to_json()) == profile
    machine = calibrated(preset("cpu"), profile)
    assert (machine.issue_us, machine.wait_us) == (300.5, 100.25)
    assert from_text(to_text(machine)) == machine
    machine = calibrated(preset("cpu"), PROFILE)
    assert (machine.issue_us, machine.wait_us) == (0.0, 0.0), "as in the preset"


def test_h100s_copy_to_their_host_at_pcies_rate():
    assert 35_000 < 1e9 / host_copy_us(preset("h100").host, 1e9) < 64_000


def damaged(**changes):
    return json.dumps({**json.loads(PROFILE.to_json()), **changes})


ZERO = [{"upto": None, "us_per_unit": 0}]
FIT = json.loads(PROFILE.to_json())["memory"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not JSON"),
        ("[]", "version 1 expected, found None"),
        (damaged(version=2), "version 1 expected, found 2"),
        (damaged(origin={}), "origin: entry 'device' is missing"),
        (damaged(memory={}), "memory: entry 'base_us' is missing"),
        (damaged(memory=None), "memory: expected an object, found None"),
        (
            damaged(memory={**FIT, "base_us": -1}),
            "memory.base_us: expected a number from 0 on, found -1",
        ),
        (damaged(memory={**FIT, "classes": []}), "memory: size classes must rise"),
        (damaged(memory={**FIT, "base_us": 0, "classes": ZERO}), "memory: work that takes no time"),
        (damaged(comm=[{**FIT, "kind": "all_gather", "group": {}}]), "comm[0].group: entry"),
        (damaged(memory={**FIT, "base_us": "x"}), "memory.base_us: expected a number, found 'x'"),
        (
            damaged(memory={**FIT, "samples": [[0, 1]]}),
            "memory: samples have amounts and times above 0",
        ),
        (damaged(comm=[{"kind": "gossip"}]), "comm[0]"),
        (damaged(comm=[{**FIT, "kind": "gossip", "group": {}}]), "expected one of all_gather"),
        (damaged(wait_us=-1), "wait_us: expected a number from 0 on, found -1"),
        (damaged(arithmetic=[]), "arithmetic: expected an object, found a list of 0"),
        ("[" * 10**5, "nested too deeply"),
    ],
)
def test_a_damaged_file(text, says, tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(CostError, match=r"GS503: .*machine.json: ") as caught:
        read_profile(path)
    assert says in str(caught.value)


def test_a_file_that_is_not_text(tmp_path):
    path = tmp_path / "machine.json"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(CostError, match=r"GS503: .*not JSON: .*utf"):
        read_profile(path)


def test_as_text():
    head, _, *rows = profile_lines(PROFILE).splitlines()
    assert head == (
        "cpu (x86_64) on node1, 2 ranks, gloo, 1 threads, torch 2.13.0, 2026-01-01T00:00:00+00:00"
    )
    assert [" ".join(row.split()) for row in rows] == [
        "base us rate by size class median worst",
        "all_gather world, 2 ranks 100.0 1, 0.5 GB/s 3% 5%",
        "matrix product float32 2.0 50 Gflop/s 0% 0%",
        "attention float32 3.0 10 Gflop/s 0% 0%",
        "pointwise op 1.0 20 GB/s 0% 0%",
    ]
    assert max(map(len, rows)) <= 92


def test_nodes_are_told():
    comm = replace(PROFILE.comm[0], group=RankGroup(16, 8, "world"))
    assert "world, 2 x 8 ranks" in profile_lines(replace(PROFILE, comm=(comm,)))


@pytest.mark.parametrize("name", [*preset_names(), "h100-ib400", "calibrated"])
def test_other_ranks_read_the_same_machine(name):
    machine = calibrated(preset("cpu"), PROFILE) if name == "calibrated" else preset(name)
    assert from_text(to_text(machine)) == machine
