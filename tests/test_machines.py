"""Presets by rate, by the name that torch reports, and what `graphshard machines` says of them."""

import json

import pytest

from graphshard.cli import main
from graphshard.cost.comm import CollectiveKind, RankGroup
from graphshard.cost.machine import collective_us
from graphshard.cost.presets import (
    Unit,
    facts_of,
    line_rate,
    network_names,
    preset,
    preset_for,
    preset_names,
    rate_name,
    with_network,
)
from graphshard.cost.profile import look_up
from graphshard.cost.roofline import arithmetic_of
from graphshard.errors import CostError, FileError, OptionsError
from graphshard.options import parse_options

GB, GIB = 1e9, 2**30
# GiB that torch reports (`total_memory`); the data sheets say 40, 80, 94, 141, 192 GB.
REPORTED = {
    "a100_40gb": 39.39,
    "a100": 79.14,
    "h100": 79.1,
    "h100_nvl": 93.0,
    "h200": 139.8,
    "b200": 178.35,
    "gb200": 184.3,
    "mi300x": 191.9,
}


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("200Gbit", 25 * GB),
        ("200gbit/s", 25 * GB),
        ("200Gbps", 25 * GB),
        ("25GB/s", 25 * GB),
        ("12.5 GB/s", 12.5 * GB),
        ("12.5gbit", 1.5625 * GB),
        ("0Gbit", None),
        ("200", None),
        ("-200Gbit", None),
        ("200MB", None),
        ("9" * 30 + "Gbit", None),
    ],
)
def test_rates(text, rate):
    assert line_rate(text) == rate
    if rate is not None:
        assert line_rate(rate_name(rate)) == rate


@pytest.mark.parametrize("name", ["h100-200Gbit", "H100-25GB/s", "h100-200gbps"])
def test_a_rate_in_the_place_of_a_network(name):
    machine = preset(name)
    assert machine.name == "h100-200gbit", "one name for one machine: plans are found by it"
    assert preset(machine.name) == machine
    assert machine.network.inter_bytes_per_us == pytest.approx(25e3 * 0.92)
    named = preset("h100-ib200").network
    assert machine.network.protocols == named.protocols
    assert machine.network.intra_bytes_per_us == named.intra_bytes_per_us


def test_what_programs_get_of_a_rate_is_what_they_get_of_infiniband():
    given, known = (preset(n).network.inter_bytes_per_us for n in ("h100-400gbit", "h100-ib400"))
    assert given == pytest.approx(known)


def test_a_faster_network_is_never_slower():
    group = RankGroup(8, 1)
    for names in (("ib100", "ib200", "ib400", "ib800"), ("50gbit", "100gbit", "25GB/s", "400gbit")):
        machines = [preset(f"h100-{name}") for name in names]
        times = [collective_us(m, CollectiveKind.ALL_GATHER, group, 1e9) for m in machines]
        assert times == sorted(times, reverse=True)
        assert len(set(times)) == len(times)
    for gbit in (100, 200, 400, 800):
        ethernet = preset(f"h100-ethernet{gbit}").network.inter_bytes_per_us
        assert ethernet < preset(f"h100-ib{gbit}").network.inter_bytes_per_us


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("h100-200furlongs", "or a rate per GPU such as 200Gbit"),
        ("h100-0Gbit", "or a rate per GPU"),
        ("h100-ib40O", "did you mean 'h100-ib400'"),
        ("mi300-200gbit", "give one of"),
    ],
)
def test_what_is_no_network(name, hint):
    with pytest.raises(CostError, match="GS501: no preset") as raised:
        preset(name)
    assert hint in str(raised.value)


def test_an_option_takes_a_rate():
    for name in ("h100-200gbit", "h100-12.5gbit", "h100-12.5GB/s"):
        assert parse_options({"machine": name}, machine=look_up).machine == name
    with pytest.raises(OptionsError, match=r"GS103: option machine='h100-12\.5mbit': no preset"):
        parse_options({"machine": "h100-12.5mbit"}, machine=look_up)
    with pytest.raises(FileError, match="No such file"):
        look_up("h100.json")


def test_a_network_of_its_own_or_another():
    assert with_network("h100", "25GB/s") == "h100-25GB/s"
    with pytest.raises(CostError, match="GS501: 'h100-ib400' names its network already"):
        with_network("h100-ib400", "200Gbit")
    with pytest.raises(CostError, match=r"GS501: 'machine\.json' is a profile"):
        with_network("machine.json", "200Gbit")


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100_40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100_pcie"),
        ("NVIDIA A100-PCIE-40GB", "a100_pcie"),
        ("NVIDIA H100 PCIe", "h100_pcie"),
        ("NVIDIA H100 NVL", "h100_nvl"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_the_name_that_says_most_counts(reported, name):
    assert preset_for(reported).name == name


@pytest.mark.parametrize("name", REPORTED)
def test_capacity_is_what_torch_reports(name):
    assert preset(name).processor.capacity_bytes / GIB == pytest.approx(REPORTED[name], rel=1e-3)


# Of the data sheet, in float8 and in bfloat16, as the sources of presets.toml measured it.
MEASURED = {
    "h100": (0.709, 0.803),
    "h200": (0.734, 0.803),
    "b200": (0.763, 0.776),
    "gb200": (0.723, 0.729),
    "h100_500w": (1125.51 / 2, 585.23),
}


@pytest.mark.parametrize("name", MEASURED)
def test_products_in_float8_gain_what_was_measured(name):
    processor = preset(name).processor
    float8, bfloat16 = (
        1 / arithmetic_of(processor, dtype).curve.classes[-1].us_per_unit
        for dtype in ("float8_e4m3fn", "bfloat16")
    )
    assert float8 / bfloat16 == pytest.approx(2 * MEASURED[name][0] / MEASURED[name][1], rel=0.01)


def test_a_rack_is_the_node_where_nvlink_joins_it():
    assert preset("gb200").ranks_per_node == 72
    assert {preset(n).ranks_per_node for n in preset_names() if n != "gb200"} == {8}


# -- the command ---------------------------------------------------------------------------


def test_the_list_has_every_machine(capsys):
    assert main(["machines"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    starts = [line.split()[0] for line in out.splitlines() if line]
    assert [s for s in starts if s in preset_names()] == list(preset_names())
    assert [s for s in starts if s in network_names()] == list(network_names())
    (row,) = [line.split() for line in out.splitlines() if line.startswith("gb200 ")]
    assert row == ["gb200", "184.3", "8", "2,500", "5,000", "721.8", "72", "ib400"]
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize("name", [*preset_names(), *network_names(), "h100-ib200", "gb200-25GB/s"])
def test_one_machine_has_all_its_numbers_and_sources(name, capsys):
    assert main(["machines", name]) == 0
    out = " ".join(capsys.readouterr().out.split())
    facts = facts_of(name)
    assert {fact.table[0] for fact in facts} >= {"network", "library"}
    for fact in facts:
        assert f"{' '.join(fact.path)} " in out
        assert " ".join(fact.source.split()) in out
        assert (fact.share == 1) == (not fact.share_source), fact


def test_what_is_shown_is_what_is_used(capsys):
    assert main(["machines", "h100-200Gbit", "--json"]) == 0
    rows = {tuple(row["path"]): row for row in json.loads(capsys.readouterr().out)}
    machine = preset("h100-200Gbit")

    def told(*path):
        row = rows[path]
        assert row["unit"] == Unit.BYTES_PER_S
        return row["value"] * row["share"] / 1e6

    assert told("inter_bytes_per_s") == pytest.approx(machine.network.inter_bytes_per_us)
    assert told("intra_bytes_per_s") == pytest.approx(machine.network.intra_bytes_per_us)
    memory = machine.processor.memory.classes[0].us_per_unit
    assert told("memory_bytes_per_s") == pytest.approx(1 / memory)
    assert rows["inter_bytes_per_s",]["source"] == "as the name says"


def test_the_list_as_json(capsys):
    assert main(["machines", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert list(told["devices"]) == list(preset_names())
    assert list(told["networks"]) == list(network_names())


def test_a_machine_that_there_is_not(capsys):
    assert main(["machines", "h1000"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "GS501: no preset 'h1000': did you mean 'h100'?" in err
