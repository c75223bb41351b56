"""The emulated network's arithmetic, and that all modes of bench/step.py train the same.

The first run compiles the network (about a minute).
"""

import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from warm import warm_context

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from bench import emulator, limits, peaks, profile, table  # noqa: E402
from bench.launch import Measured, Rate, Request, StepTimes, run  # noqa: E402
from bench.modes import ANY, BY_NAME, MODES, NO_LIMIT_BYTES  # noqa: E402
from bench.step import TOLERANCE, LossesDiffer, budgets, check_losses  # noqa: E402
from graphshard.cost.comm import CollectiveKind, RankGroup  # noqa: E402
from graphshard.cost.curve import Fit, line  # noqa: E402
from graphshard.cost.machine import collective_us  # noqa: E402
from graphshard.cost.presets import preset  # noqa: E402
from graphshard.cost.profile import CostProfile, Origin, calibrated  # noqa: E402
from graphshard.planner.links import LaneQueues  # noqa: E402
from graphshard.planner.problem import CollectiveLane  # noqa: E402

ORIGIN = Origin("cpu", "", 1, 1, 1, "", "", "", "")

RANKS = 4
ALPHA_US = 300.0
BYTES_PER_US = 125.0  # 1 gbit
NUMEL = 40_000  # of a full tensor; 160,000 bytes
RING_US = 160_000 * 3 / 4 / BYTES_PER_US

REQUEST = Request("", "XXS", num_ranks=4, gbits=(1.0,), alpha_us=50.0, num_steps=2)


@pytest.fixture(scope="module")
def extension():
    code = "from bench import emulator; emulator.load_extension()"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)  # compilers warn
    return emulator.load_extension()


@pytest.fixture
def network(extension):
    """Compute takes no time here, but for `network.compute_us`."""
    return emulator.make_network(gbit=1.0, alpha_us=ALPHA_US, cpu_clock=False)


@pytest.fixture
def lane(extension, network):
    return extension.EmulatedBackend(0, RANKS, network)


def gather(lane, numel=NUMEL):
    return lane._allgather_base(torch.empty(numel), torch.ones(numel // RANKS))


def scatter(lane, op=dist.ReduceOp.SUM):
    options = dist.ReduceScatterOptions()
    options.reduceOp = op
    output = torch.empty(NUMEL // RANKS)
    return lane._reduce_scatter_base(output, torch.ones(NUMEL), options), output


# -- time -----------------------------------------------------------------------------------------


def collectives(lane):
    tensor = torch.ones(NUMEL)
    return {
        "all_gather": lambda: gather(lane),
        "reduce_scatter": lambda: scatter(lane)[0],
        "all_reduce": lambda: lane.allreduce([tensor]),
        "broadcast": lambda: lane.broadcast([tensor]),
        "barrier": lambda: lane.barrier(),
    }


@pytest.mark.parametrize(
    ("kind", "link_bytes"),
    [
        ("all_gather", 120_000),
        ("reduce_scatter", 120_000),
        ("all_reduce", 240_000),
        ("broadcast", 160_000),
        ("barrier", 0),
    ],
)
def test_a_collective_takes_alpha_and_its_bytes(network, lane, kind, link_bytes):
    collectives(lane)[kind]().wait()
    (sent,) = network.timeline()
    assert (sent.kind, sent.lane, sent.link_bytes) == (kind, 0, link_bytes)
    assert sent.end_us - sent.start_us == pytest.approx(ALPHA_US + link_bytes / BYTES_PER_US)
    assert network.now_us() == sent.waited_us == sent.end_us


def test_compute_hides_what_it_overlaps_with(network, lane):
    work = gather(lane)
    network.compute_us(1000)
    assert not work.is_completed()
    work.wait()
    (sent,) = network.timeline()
    assert sent.waited_us == pytest.approx(ALPHA_US + RING_US - 1000)
    work = gather(lane)
    network.compute_us(5000)
    assert work.is_completed()
    work.wait()
    assert network.timeline()[1].waited_us == 0


def test_two_on_one_lane_queue(network, lane):
    first, second = gather(lane), gather(lane)
    second.wait()
    first.wait()
    one, two = network.timeline()
    assert two.start_us == one.end_us == pytest.approx(ALPHA_US + RING_US)
    assert two.end_us == pytest.approx(2 * (ALPHA_US + RING_US))
    assert one.waited_us == 0


def test_two_lanes_share_the_link(extension, network, lane):
    other = extension.EmulatedBackend(0, RANKS, network)
    long, short = gather(lane), gather(other, NUMEL // 4)
    long.wait()
    short.wait()
    one, two = network.timeline()
    assert [one.lane, two.lane] == [0, 1]
    assert one.start_us == two.start_us == 0
    # Both have the link's half until the short one is through; latencies do not use the link.
    assert two.end_us == pytest.approx(ALPHA_US + 2 * RING_US / 4)
    assert one.end_us == pytest.approx(ALPHA_US + RING_US + RING_US / 4)


def test_a_lane_that_comes_later_slows_the_first_one_down(extension, network, lane):
    other = extension.EmulatedBackend(0, RANKS, network)
    first = gather(lane)
    network.compute_us(RING_US / 2)  # the second one's latency ends when half of the bytes are sent
    gather(other)
    first.wait()
    assert network.now_us() == pytest.approx(ALPHA_US + RING_US / 2 + RING_US)
    assert network.in_flight() == 1


def test_links_inside_nodes_are_of_their_own(extension, network):
    emulator.set_rate(network, gbit=1.0, alpha_us=ALPHA_US, nodes=emulator.Nodes(2, 10.0))
    between = extension.EmulatedBackend(0, RANKS, network)
    inside, other = (extension.EmulatedBackend(0, 2, network, emulator.INSIDE) for _ in range(2))
    works = [gather(between), inside._allgather_base(torch.empty(NUMEL), torch.ones(NUMEL // 2))]
    for work in works:
        work.wait()
    far, near = network.timeline()
    # Neither takes anything from the other; latency and rate are those of the link.
    assert far.end_us == pytest.approx(ALPHA_US + RING_US)
    assert near.end_us == pytest.approx(ALPHA_US / 10 + NUMEL * 4 / 2 / (10 * BYTES_PER_US))
    began_us = network.now_us()
    both = [
        lane._allgather_base(torch.empty(NUMEL), torch.ones(NUMEL // 2)) for lane in (inside, other)
    ]
    for work in both:
        work.wait()
    assert network.now_us() - began_us == pytest.approx(
        ALPHA_US / 10 + 2 * NUMEL * 4 / 2 / (10 * BYTES_PER_US)
    )
    with pytest.raises(ValueError, match="without a gap"):
        network.set_link(3, bytes_per_us=1.0, alpha_us=1.0)


def test_nothing_may_be_in_flight_where_a_measurement_begins(network, lane):
    work = gather(lane)
    with pytest.raises(RuntimeError, match="in flight"):
        network.clear()
    with pytest.raises(RuntimeError, match="in flight"):
        emulator.set_rate(network, gbit=2.0, alpha_us=ALPHA_US)
    work.wait()
    network.clear()
    assert network.timeline() == []


def test_the_clock_counts_compute_and_not_sleep(extension):
    network = emulator.make_network(gbit=1.0, alpha_us=ALPHA_US)
    began_us = network.now_us()
    time.sleep(0.2)
    slept_us = network.now_us() - began_us
    until = time.thread_time() + 0.05
    while time.thread_time() < until:
        pass
    assert slept_us < 50_000 < 49_000 + network.now_us() - began_us - slept_us < 150_000


def test_the_clock_counts_compute_at_the_speed_it_was_given(extension):
    network = emulator.make_network(gbit=1.0, alpha_us=ALPHA_US)
    before_us = network.now_us()
    network.set_speed(5.0)
    assert 0 <= network.now_us() - before_us < 10_000  # of the past nothing changes
    began_us, until = network.now_us(), time.thread_time() + 0.1
    while time.thread_time() < until:
        pass
    assert 19_000 < network.now_us() - began_us < 30_000
    with pytest.raises(ValueError, match="positive"):
        network.set_speed(0.0)


def test_the_emulators_own_work_takes_no_time(extension):
    network = emulator.make_network(gbit=1.0, alpha_us=0.0)
    lane = extension.EmulatedBackend(0, RANKS, network)
    output, part = torch.empty(20_000_000), torch.ones(5_000_000)
    began_us, began = network.now_us(), time.thread_time()
    lane._allgather_base(output, part)
    assert network.now_us() - began_us < 0.2 * 1e6 * (time.thread_time() - began)


# -- values ---------------------------------------------------------------------------------------


def test_all_ranks_hold_the_same_values(lane):
    part = torch.arange(3.0)
    full = torch.empty(3 * RANKS)
    lane._allgather_base(full, part).wait()
    assert torch.equal(full, part.repeat(RANKS))
    for op, value in ((dist.ReduceOp.SUM, 4.0), (dist.ReduceOp.AVG, 1.0)):
        work, output = scatter(lane, op)
        work.wait()
        assert torch.equal(output, torch.full((NUMEL // RANKS,), value))
    with pytest.raises(RuntimeError, match="not supported"):
        scatter(lane, dist.ReduceOp.PRODUCT)


def test_what_is_not_emulated_raises_instead_of_being_free(lane):
    with pytest.raises(RuntimeError, match="does not support"):
        lane.alltoall_base(torch.empty(4), torch.empty(4), [], [])


def test_poison_shows_a_missing_wait(network, lane):
    network.poison = True
    full = torch.arange(8.0)  # rank 0's part of an all-gather is often a part of its output
    work = lane._allgather_base(full, full[:2])
    assert full.isnan().all()
    work.wait()
    assert torch.equal(full, torch.tensor([0.0, 1.0]).repeat(RANKS))
    work, output = scatter(lane)
    assert output.isnan().all()
    work.wait()
    assert torch.equal(output, torch.full_like(output, RANKS))


# -- training -------------------------------------------------------------------------------------


def launched(names: Iterable[str], **changed: Any) -> dict[str, Measured]:
    """What `bench.step.launch` measures of each mode, in processes that have torch already."""
    return {name: _launched(replace(REQUEST, mode=name, **changed)) for name in names}


def _launched(request: Request) -> Measured:
    receiver, sender = Pipe(duplex=False)
    process = warm_context().Process(target=_send_measured, args=(sender, request))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    finally:
        process.kill()  # what has compiled takes seconds to leave by itself
        process.join()


def _send_measured(sender: Connection, request: Request) -> None:
    sender.send(run(request))


@pytest.mark.slow
def test_all_modes_train_the_same(extension):
    modes = [mode for mode in MODES if mode.is_exact and not mode.within]
    measured = launched(mode.name for mode in modes)
    check_losses(measured, modes)
    eager, ours = (measured[name].rates[0] for name in ("fsdp2", "graphshard"))
    moved = [step.link_bytes for step in (*eager.steps, *ours.steps)]
    assert len(set(moved)) == 1
    assert moved[0] > 0
    assert 0 < ours.gathered_peak_bytes <= eager.gathered_peak_bytes
    assert measured["single"].rates[0].steps[0].exposed_us == 0


@pytest.mark.slow
def test_modes_by_inductor_train_nearly_the_same(extension):
    names = ("fsdp2_tuned", "blocks_tuned_half", "simple_fsdp", "simple_fsdp_4mb", "fused")
    check_losses(launched(names), [BY_NAME[name] for name in names])


@pytest.mark.slow
def test_no_mode_misses_a_wait(extension):
    names = ("fsdp2", "fsdp2_tuned", "graphshard", "fused")
    check_losses(launched(names, poison=True), [BY_NAME[name] for name in names])


@pytest.mark.slow
def test_ranks_on_nodes_train_the_same(extension):
    names = ("fsdp2_tuned", "fsdp2_tuned_node")
    found = launched(names, ranks_per_node=2, inside=10.0)
    check_losses(found, [BY_NAME[name] for name in names])
    apart, node = (found[name].rates[0].steps[0] for name in names)
    assert node.link_bytes < apart.link_bytes  # half of a group comes from the node, not 3 quarters
    assert node.lane_us < apart.lane_us


@pytest.mark.slow
def test_replicas_on_nodes_train_the_same(extension):
    """An all-reduce goes between nodes, all else inside; nobody misses a wait for it."""
    names = ("fsdp2", "graphshard")
    nodes = {"ranks_per_node": 2, "inside": 10.0, "replicas": 2}
    found = launched(names, **nodes, poison=True, gbits=(1.0, 0.01))
    check_losses(found, [BY_NAME[name] for name in names])
    eager, ours = (found[name].rates for name in names)
    for mine, theirs in zip(ours, eager, strict=True):
        (own, *_), (their, *_) = mine.steps, theirs.steps
        assert (own.link_bytes, own.collectives) == (their.link_bytes, their.collectives)
        assert own.exposed_us < their.exposed_us  # FSDP2 waits at once on a CPU
    fast, slow = (rate.steps[0] for rate in ours)
    assert slow.exposed_us > 5 * fast.lane_us  # however long a busy machine computes


FORGETFUL = """
from bench import launch, modes
modes.AsyncReduceScatter.wait = lambda self: self.pending.clear()
request = launch.Request("fsdp2_tuned", "XXS", 4, (1000.0,), 0.0, 1, poison=True)
print(launch.run(request).losses[1])
"""


@pytest.mark.slow
def test_a_mode_that_misses_a_wait_has_no_loss(extension):
    done = subprocess.run(
        [sys.executable, "-c", FORGETFUL], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "nan", done.stderr


def measured_with(losses):
    return Measured(losses, [rate_with(1.0, 0)], 0)


def rate_with(step_us, peak_bytes):
    return Rate([StepTimes(step_us, 0.0, 0.0, 0, 0)], 0, 0, peak_bytes)


def test_other_losses_are_an_error():
    fsdp2, ours = (m for m in MODES if m.name in ("fsdp2", "graphshard"))
    same = measured_with([2.0, 1.0])
    check_losses({"fsdp2": same, "graphshard": same}, [fsdp2, ours])
    for other in ([2.0, 1.0000001], [2.0, float("nan")]):
        with pytest.raises(LossesDiffer, match="step 1: graphshard has loss"):
            check_losses({"fsdp2": same, "graphshard": measured_with(other)}, [fsdp2, ours])


def test_losses_by_inductor_may_differ_a_little():
    modes = [BY_NAME[name] for name in ("fsdp2", "fused")]
    same = measured_with([2.0, 1.0])
    check_losses({"fsdp2": same, "fused": measured_with([2.0, 1 + 0.9 * TOLERANCE])}, modes)
    with pytest.raises(LossesDiffer, match="step 1: fused has loss"):
        check_losses({"fsdp2": same, "fused": measured_with([2.0, 1 + 1.1 * TOLERANCE])}, modes)


# -- arithmetic of the report ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "low", "high", "coverage"),
    [(5, 1, 5, 0.9375), (6, 1, 6, 0.96875), (20, 6, 15, 0.9586105)],
)
def test_the_interval_is_that_of_the_sign_test(count, low, high, coverage):
    interval = table.sign_interval([float(v) for v in range(count, 0, -1)])
    assert interval.median == (count + 1) / 2
    assert (interval.low, interval.high) == (low, high)
    assert interval.coverage == pytest.approx(coverage)


@pytest.mark.parametrize(
    ("limit", "best", "speedup"),
    [(None, "fsdp2_tuned", 2.0), (150, "fsdp2_tuned", 2.0), (200, "fsdp2_tuned_keep", 1.5)],
)
def test_the_baseline_is_the_best_that_fits_the_memory(limit, best, speedup):
    times = {"fsdp2_tuned": (4.0, 100), "fsdp2_tuned_keep": (3.0, 200), "planned": (2.0, 90)}
    modes = [mode for mode in MODES if mode.name in times]
    measured = {name: Measured([], [rate_with(*two)], 0) for name, two in times.items()}
    limits = dict.fromkeys(times) | {"planned": limit}
    rows = table.make_rows(modes, (1.0,), [measured], limits)
    (ours,) = (row for row in rows if row.mode == "planned")
    assert (ours.against, ours.speedup.median) == (best, speedup)
    assert all(row.speedup is None for row in rows if row is not ours)


def at_rate(step_us, exposed_us, link_bytes, *, bound_us=0.0):
    times = StepTimes(step_us, exposed_us, 0.0, link_bytes, 1)
    return Rate([times], 0, 0, 0, lower_bound_us=bound_us)


def test_the_limit_is_the_link_or_one_process():
    """1 MB takes 8 ms at 1 gbit and 2 ms at 4 gbit; one process takes 5 ms."""
    alone = Measured([], [at_rate(5e3, 0.0, 0)] * 2, 0)
    peer = Measured([], [at_rate(20e3, 1e3, 10**6), at_rate(9e3, 1e3, 10**6)], 0)
    ours = [at_rate(12e3, 6e3, 2 * 10**6, bound_us=9e3), at_rate(7e3, 1e3, 2 * 10**6, bound_us=6e3)]
    modes = [BY_NAME[name] for name in ("single", "fsdp2_tuned", "planned")]
    measured = {"single": alone, "fsdp2_tuned": peer, "planned": Measured([], ours, 0)}
    slow, fast = limits.make_limits(modes, (1.0, 4.0), [measured])
    assert [slow.mode, slow.limit_us, slow.lower_bound_us] == ["planned", 8e3, 9e3]
    assert [slow.over.median, slow.busy_over.median] == [1.5, 1.2]
    assert [fast.limit_us, fast.over.median, fast.busy_over.median] == [5e3, 1.4, 1.2]
    text = limits.render([slow, fast])
    assert "8.0  1.500 [1.500, 1.500]" in text
    assert limits.make_limits(modes[1:], (1.0, 4.0), [measured]) == []


def test_a_budget_is_the_peak_of_another_mode(monkeypatch):
    found = {"fsdp2_tuned": 100, "blocks_tuned": 70, "blocks_tuned_across": 90}

    def short(request):
        return Measured([], [rate_with(1.0, found[request.mode])], 0)

    monkeypatch.setattr("bench.step.launch", short)
    names = ("planned_low", "fused_low", "fused_between", "planned", "graphshard")
    assert budgets([BY_NAME[name] for name in names], REQUEST) == {
        "planned_low": 100,
        "fused_low": 70,
        "fused_between": 80,
        "planned": NO_LIMIT_BYTES,
        "graphshard": None,
    }


def test_every_budget_has_its_mode():
    assert {name for mode in MODES for name in mode.within} <= {*ANY, *BY_NAME}


def test_the_profile_has_the_emulators_arithmetic(network, lane):
    empty = CostProfile(ORIGIN, (), (), (), Fit(line(1.0, 1.0), ()))
    told = profile.with_network(empty, num_ranks=RANKS, gbit=1.0, alpha_us=ALPHA_US)
    machine = calibrated(preset("cpu"), CostProfile.from_json(told.to_json()))
    ranks = RankGroup(RANKS, RANKS, "lane 0")
    for kind in (
        CollectiveKind.ALL_GATHER,
        CollectiveKind.REDUCE_SCATTER,
        CollectiveKind.ALL_REDUCE,
    ):
        network.clear()
        collectives(lane)[kind]().wait()
        (sent,) = network.timeline()
        took_us = collective_us(machine, kind, ranks, 4 * NUMEL)
        assert took_us == pytest.approx(sent.end_us - sent.start_us)


def test_the_profile_tells_links_inside_nodes_from_those_between():
    empty = CostProfile(ORIGIN, (), (), (), Fit(line(1.0, 1.0), ()))
    nodes = emulator.Nodes(2, 10.0)
    told = profile.with_network(empty, num_ranks=RANKS, gbit=1.0, alpha_us=ALPHA_US, nodes=nodes)
    machine = calibrated(preset("cpu"), CostProfile.from_json(told.to_json()))
    gather = CollectiveKind.ALL_GATHER
    between = collective_us(machine, gather, RankGroup(RANKS, 2, "lane 0"), 4 * NUMEL)
    inside = collective_us(machine, gather, RankGroup(2, 2, "lane 0, node"), 4 * NUMEL)
    assert between == pytest.approx(ALPHA_US + RING_US)
    assert inside == pytest.approx(ALPHA_US / 10 + 4 * NUMEL / 2 / (10 * BYTES_PER_US))
    # Two replicas, one on each node.
    add = collective_us(machine, CollectiveKind.ALL_REDUCE, RankGroup(2, 1, "lane 1"), 4 * NUMEL)
    assert add == pytest.approx(ALPHA_US + 2 * 4 * NUMEL / 2 / BYTES_PER_US)


def test_peaks_follow_addresses():
    def change(ts, address, num_bytes):
        return {"name": "[memory]", "ts": ts, "args": {"Addr": address, "Bytes": num_bytes}}

    span = {"name": "FSDP::all_gather", "cat": "user_annotation", "ts": 10, "dur": 5}
    events = [
        span, change(1, 1, 100), change(11, 2, 40), change(12, 3, 40), change(20, 2, -40),
        change(21, 9, -7), change(22, 4, 50), change(23, 1, -100),
    ]  # fmt: skip
    assert peaks.peaks_of(events) == peaks.Peaks(gathered_bytes=80, allocated_bytes=190)


@pytest.mark.parametrize("seed", range(20))
def test_the_planner_and_the_network_share_a_link_alike(extension, network, seed):
    """`graphshard.planner.links` against the emulated network: the same collectives, two lanes."""
    random = Random(seed)
    lanes = [extension.EmulatedBackend(0, RANKS, network) for _ in range(2)]
    wires = LaneQueues(tuple(CollectiveLane(str(place), ALPHA_US, "link") for place in range(2)))
    works = {}
    for job in range(12):
        place = random.randrange(2)
        works[job] = gather(lanes[place], RANKS * random.randrange(1, 20_000))
        link_us = network.timeline()[-1].link_bytes / BYTES_PER_US
        wires.issue(job, place, ALPHA_US + link_us, network.now_us())
        if random.random() < 0.4:
            first = random.choice(list(works))
            works.pop(first).wait()
            assert network.now_us() >= wires.end_us(first) - 0.1
        network.compute_us(random.uniform(0.0, 500.0))
    for work in works.values():
        work.wait()
    theirs = [sent.end_us for sent in network.timeline()]
    assert [wires.end_us(job) for job in range(12)] == pytest.approx(theirs, abs=0.1)
