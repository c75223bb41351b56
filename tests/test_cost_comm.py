"""Collectives: the ring's numbers by hand, presets, what a measurement changes."""

import math
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphshard.cost.comm import (
    CollectiveKind,
    MeasuredCurve,
    Network,
    Protocol,
    RankGroup,
    bus_bytes_per_us,
    network_us,
    ring_steps,
    wire_bytes,
)
from graphshard.cost.curve import Trust, line
from graphshard.cost.machine import (
    Machine,
    collective_trust,
    collective_us,
    launch_us,
    observed_collective,
    observed_product,
)
from graphshard.cost.presets import (
    network_names,
    preset,
    preset_for,
    preset_names,
    sources,
)
from graphshard.cost.roofline import Attention, OpWork, op_us
from graphshard.errors import CostError, GraphshardWarning

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, BROADCAST = CollectiveKind
# A link of 1000 bytes/us, an adapter of 100; 10 us to start, 2 us a step inside, 5 us between.
TOY = Network(1000.0, 100.0, (Protocol(10.0, 2.0, 5.0, 1.0),))


@pytest.mark.parametrize(
    ("kind", "wire"),
    [(ALL_GATHER, 750), (REDUCE_SCATTER, 750), (ALL_REDUCE, 1500), (BROADCAST, 1000)],
)
def test_bytes_of_a_ring_of_four(kind, wire):
    assert wire_bytes(kind, 4, 1000) == wire
    assert wire_bytes(kind, 1, 1000) == 0


def test_steps_of_a_ring():
    assert ring_steps(ALL_GATHER, RankGroup(8, 8)) == (7, 0)
    assert ring_steps(ALL_GATHER, RankGroup(16, 8)) == (14, 1)
    assert ring_steps(ALL_REDUCE, RankGroup(16, 8)) == (28, 2)
    assert ring_steps(ALL_GATHER, RankGroup(4, 1)) == (0, 3)


def test_bus_bandwidth_by_where_the_ranks_are():
    assert bus_bytes_per_us(TOY, RankGroup(8, 8)) == 1000
    assert bus_bytes_per_us(TOY, RankGroup(2, 8)) == 1000
    assert bus_bytes_per_us(TOY, RankGroup(4, 1)) == 100
    assert bus_bytes_per_us(TOY, RankGroup(16, 4)) == 400
    assert bus_bytes_per_us(TOY, RankGroup(64, 32)) == 1000  # no more than the links inside


def test_times_by_hand():
    assert network_us(TOY, ALL_GATHER, RankGroup(4, 4), 4000) == 10 + 3 * 2 + 3
    assert network_us(TOY, ALL_REDUCE, RankGroup(4, 4), 4000) == 10 + 6 * 2 + 6
    assert network_us(TOY, ALL_GATHER, RankGroup(4, 1), 4000) == 10 + 3 * 5 + 30
    assert network_us(TOY, ALL_GATHER, RankGroup(4, 2), 4000) == 10 + 2 * 2 + 5 + 15
    assert network_us(TOY, ALL_GATHER, RankGroup(1, 1), 4000) == 0


def test_the_fastest_protocol_runs():
    quick = Protocol(1.0, 0.0, 0.0, 0.1)
    network = Network(1000.0, 100.0, (quick, *TOY.protocols))
    assert network_us(network, ALL_GATHER, RankGroup(2, 2), 200) == 1 + 1
    assert network_us(network, ALL_GATHER, RankGroup(2, 2), 200_000) == 10 + 2 + 100


def test_a_library_may_move_more_than_a_ring():
    network = Network(1000.0, 100.0, TOY.protocols, ((REDUCE_SCATTER, 2.0),))
    assert network_us(network, REDUCE_SCATTER, RankGroup(2, 2), 2000) == 10 + 2 + 2
    assert network_us(network, ALL_GATHER, RankGroup(2, 2), 2000) == 10 + 2 + 1


def machine(*measured):
    return Machine("toy", preset("cpu").processor, TOY, measured)


FOUND = MeasuredCurve(ALL_GATHER, RankGroup(4, 4, "dp"), line(32.0, 500.0))


def test_a_measurement_wins_on_its_group():
    there = machine(FOUND)
    assert collective_us(there, ALL_GATHER, RankGroup(4, 4), 4000) == 32 + 6
    assert collective_trust(there, ALL_GATHER, RankGroup(4, 4)) is Trust.CALIBRATED
    assert collective_us(there, ALL_REDUCE, RankGroup(4, 4), 4000) == 10 + 6 * 2 + 6
    assert collective_trust(there, ALL_REDUCE, RankGroup(4, 4)) is Trust.PRESET


def test_a_measurement_is_carried_over_to_other_sizes_of_group():
    # The formula's constant grows from 10 + 3 * 2 = 16 to 10 + 7 * 2 = 24: by one half.
    assert collective_us(machine(FOUND), ALL_GATHER, RankGroup(8, 8), 8000) == 32 * 1.5 + 14
    # With two nodes it is 10 + 6 * 2 + 5 = 27, and the bandwidth falls from 1000 to 400.
    dp = RankGroup(8, 4, "dp")
    assert collective_us(machine(FOUND), ALL_GATHER, dp, 8000) == 32 * 27 / 16 + 14 / 0.4


def test_the_groups_name_wins_then_the_nearest_of_its_sort():
    small = MeasuredCurve(ALL_GATHER, RankGroup(2, 2), line(1.0, 1.0))
    between = MeasuredCurve(ALL_GATHER, RankGroup(4, 1), line(7.0, 1.0))
    there = machine(small, FOUND, between)
    assert collective_us(there, ALL_GATHER, RankGroup(4, 4, "dp"), 4) < 33
    assert collective_us(there, ALL_GATHER, RankGroup(2, 2), 2) == 1 + 1
    assert collective_us(there, ALL_GATHER, RankGroup(4, 1), 4) == 7 + 3
    assert collective_trust(machine(between), ALL_GATHER, RankGroup(8, 8)) is Trust.PRESET


kinds = st.sampled_from(list(CollectiveKind))
groups = st.builds(RankGroup, st.integers(1, 2048), st.integers(1, 16))


@given(st.sampled_from(["h100", "a100-ethernet100", "cpu"]), kinds, groups,
       st.integers(0, 10**11), st.integers(0, 10**11))  # fmt: skip
def test_more_bytes_are_never_cheaper(name, kind, group, first, second):
    low, high = sorted((first, second))
    found = MeasuredCurve(kind, RankGroup(4, 4), line(20.0, 1e4))
    for there in (
        preset(name),
        Machine("m", preset(name).processor, preset(name).network, (found,)),
    ):
        before, after = (collective_us(there, kind, group, n) for n in (low, high))
        assert 0 <= before <= after * (1 + 1e-12)


@given(kinds, st.integers(1, 512), st.integers(1, 10**10))
def test_more_ranks_are_never_cheaper_on_one_kind_of_link(kind, ranks, size):
    h100 = preset("h100").network
    one, more = (network_us(h100, kind, RankGroup(n, 1), size) for n in (ranks, ranks + 1))
    assert one <= more * (1 + 1e-12)


# -- presets -------------------------------------------------------------------------------


def test_presets_are_complete():
    assert {"a100", "h100", "h200", "b200", "cpu"} <= set(preset_names())
    assert {"ib200", "ib400", "ethernet100", "gloo"} <= set(network_names())
    for name in preset_names():
        processor, network = preset(name).processor, preset(name).network
        dtypes = {a.dtype for a in processor.arithmetic}
        assert {"float32", "bfloat16"} <= dtypes
        costs = [a.curve for a in processor.arithmetic] + [processor.memory]
        assert all(c.base_us > 0 and c.classes[0].us_per_unit > 0 for c in costs)
        assert math.isfinite(network.intra_bytes_per_us * network.inter_bytes_per_us)
        assert network.protocols
        if name not in ("cpu", "unknown"):
            assert processor.capacity_bytes >= 40e9


def test_every_number_has_a_source():
    found = sources()
    assert len(found) > 80
    assert all(text.strip() and text != "PENDING" for text in found.values())
    assert "device.h100.memory_bytes_per_s.share" in found


def test_no_number_of_the_presets_is_without_a_source():
    """Numbers stand in tables with `from` only (and `share` with `share_from`), but for those that
    say what an entry is of."""
    from graphshard.cost import presets

    def walk(table, path=()):
        if isinstance(table, list):
            table = dict(enumerate(table))
        for key, value in table.items():
            if isinstance(value, dict | list):
                if key != "match":
                    walk(value, (*path, key))
            elif isinstance(value, int | float) and key not in ("head_dim", "backward"):
                assert key in ("value", "share"), path
                assert ("from" if key == "value" else "share_from") in table, path

    walk(presets._tables())


def test_h100_by_hand():
    # 8 ranks, NVLink, 1 GB: Simple is fastest. 8.4 + 7 * 3.4 + 875 MB / 360 GB/s.
    us = collective_us(preset("h100"), ALL_GATHER, RankGroup(8, 8), 1e9)
    assert us == pytest.approx(8.4 + 7 * 3.4 + 875e6 / 360e3)
    # 4 KiB: LL. 6.6 + 7 * 0.6 + 3584 / 90 GB/s.
    us = collective_us(preset("h100"), ALL_GATHER, RankGroup(8, 8), 4096)
    assert us == pytest.approx(6.6 + 7 * 0.6 + 3584 / 90e3)


def test_the_device_name_finds_the_preset():
    assert preset_for("NVIDIA H100 80GB HBM3").name == "h100"
    assert preset_for("NVIDIA A100-SXM4-80GB", "ib400").name == "a100-ib400"
    assert preset_for("cpu (x86_64)").name == "cpu"


def test_an_unknown_device_warns_once_and_is_slow():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(3):
            machine = preset_for("Quadro 9")
    assert [str(w.message)[:5] for w in seen] == ["GS502"]
    assert issubclass(seen[0].category, GraphshardWarning)
    group = RankGroup(8, 8)
    known = preset("a100")
    assert collective_us(machine, ALL_GATHER, group, 1e8) > collective_us(
        known, ALL_GATHER, group, 1e8
    )


@pytest.mark.parametrize("name", ["z80", "h100-carrier-pigeon", ""])
def test_no_such_preset(name):
    with pytest.raises(CostError, match=r"GS501: no preset .*give one of a100, h100"):
        preset(name)


# -- what a job sees -----------------------------------------------------------------------


def test_launch_is_what_merging_saves():
    assert launch_us(machine(), ALL_GATHER, RankGroup(4, 4), 4000) == 10 + 3 * 2
    assert launch_us(machine(FOUND), ALL_GATHER, RankGroup(4, 4), 4000) == 32


@pytest.mark.parametrize("before", [machine(), machine(FOUND)])
def test_what_a_job_sees_moves_the_curve(before):
    group = RankGroup(4, 4, "dp")
    sizes = (4e6, 8e6, 16e6)
    seen = [(n, 3 * collective_us(before, ALL_GATHER, group, n)) for n in sizes]
    after = observed_collective(before, ALL_GATHER, group, seen)
    assert collective_trust(after, ALL_GATHER, group) is Trust.MEASURED
    for size, us in seen:
        assert collective_us(after, ALL_GATHER, group, size) == pytest.approx(us)
    other = collective_us(after, ALL_REDUCE, group, 4e6)
    assert other == collective_us(before, ALL_REDUCE, group, 4e6)
    assert observed_collective(before, ALL_GATHER, group, []) is before
    again = observed_collective(after, ALL_GATHER, group, [(4e6, 5 * seen[0][1])])
    assert collective_us(again, ALL_GATHER, group, 4e6) == pytest.approx(5 * seen[0][1])
    assert len(again.measured) == 1


product_us = st.floats(20, 1e6)  # twice a launch at least


@given(dtype=st.sampled_from(["float16", "bfloat16"]), flops=st.floats(1e6, 1e12), us=product_us)
def test_a_product_that_a_job_sees_moves_its_dtype_alone(dtype, flops, us):
    before = preset("h100")
    after = observed_product(before, dtype, flops, us)
    assert op_us(after.processor, OpWork(flops, 0, dtype)) == pytest.approx(us)
    attention = OpWork(flops, 0, dtype, attention=Attention(128, 4096))
    for work in (OpWork(flops, 0, "float32"), attention, OpWork(0, 1e6)):
        assert op_us(after.processor, work) == op_us(before.processor, work)


def test_what_seems_quicker_than_a_launch_takes_a_launch_and_more():
    before = preset("h100")
    after = observed_product(before, "bfloat16", 1e9, us=1e-3)
    launch_us = op_us(before.processor, OpWork(0, 0))
    assert op_us(after.processor, OpWork(1e9, 0, "bfloat16")) == pytest.approx(launch_us + 5e-4)
