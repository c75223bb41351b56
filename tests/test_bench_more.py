"""More of bench/: its arithmetic, and a launch of each."""

import ctypes
import json
import resource
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import astuple
from multiprocessing import Pipe
from pathlib import Path

import pytest
from warm import warm_context

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from smoke import smoke  # noqa: E402

from bench import (  # noqa: E402
    adapt,
    apart,
    emulator,
    fronts,
    gloo_memory,
    memory,
    netns,
    profile,
    single,
    sockets,
)
from bench.adapt_rank import Trained  # noqa: E402
from bench.launch import Rate, Request, StepTimes  # noqa: E402
from bench.memory import Spot  # noqa: E402
from bench.single_launch import Measured as Alone  # noqa: E402
from bench.sockets_rank import Measured, Times  # noqa: E402
from graphshard.cost.curve import Fit, line  # noqa: E402
from graphshard.cost.presets import preset  # noqa: E402
from graphshard.cost.profile import CostProfile, Origin, calibrated  # noqa: E402
from graphshard.cost.roofline import FREE, Attention, OpWork, region_us  # noqa: E402
from graphshard.planner import separate_group  # noqa: E402


def test_budgets_go_evenly_from_the_first_to_the_highest():
    spots = memory.budgets(95_000_000, 200_000_000, 4)
    sizes = [spot.budget_bytes for spot in spots]
    assert (sizes[0], sizes[-1]) == (95_000_000, 200_000_000)
    assert sizes == sorted(sizes)


def test_the_picture_has_what_was_measured():
    spots = [
        Spot("blocks_tuned", None, 600e3, 100_000_000),
        Spot("budget 90", 90_000_000, failed="does not fit"),
        Spot("budget 120", 120_000_000, 500e3, 118_000_000),
    ]
    root = ET.fromstring(memory.picture(spots, "S < 8"))
    circles = list(root.iter("{http://www.w3.org/2000/svg}circle"))
    assert len(circles) == 2 + 2, "with the legend"
    assert "does not fit" in memory.render(spots)


def test_compute_is_compared_with_a_plan_without_a_budget():
    spot = Spot("budget 120", 120_000_000)
    request = memory.asked(Request("", "XXS", 4, (1.0,), 50.0, 2), spot)
    assert (request.mode, request.budget_bytes, request.beside) == ("fused_low", 120_000_000, True)
    assert not memory.asked(request, Spot("blocks_tuned", None)).beside
    times = [StepTimes(us, us / 4, 0.0, 0, 0) for us in (4e3, 8e3)]
    rates = [
        Rate(times, 0, 0, 5, 9e3, busy_ratio=ratio, predicted_busy_ratio=1.5)
        for ratio in (1.2, 1.6)
    ]
    found = memory.with_numbers(spot, rates)
    assert (found.busy_us, found.busy_ratio, found.predicted_busy_ratio) == (4.5e3, 1.4, 1.5)
    assert "1.400    1.500" in memory.render([found])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_budgets_on_a_real_rank(tmp_path, monkeypatch):
    out = tmp_path / "gloo.json"
    command = "--config XXS --ranks 1 --machine cpu --budgets 2 --steps 2 --json"
    smoke(monkeypatch, gloo_memory, *command.split(), str(out))
    low, high = json.loads(out.read_text())["spots"]
    assert low["budget_bytes"] < high["budget_bytes"]
    for spot in (low, high):
        assert spot["predicted_peak_bytes"] <= spot["budget_bytes"]
        assert spot["peak_bytes"] == pytest.approx(spot["predicted_peak_bytes"], rel=0.1)
        assert spot["busy_ratio"] > 0
    assert high["predicted_busy_ratio"] == 1


def test_a_front_compares_the_plan_with_the_best_that_fits():
    def cells(*steps_us):
        return [None if us is None else fronts.Cell(us, 2**30) for us in steps_us]

    rows = {
        fronts.PLAN: cells(9e5, 8e5, None),
        fronts.NO_HOST: cells(9e5, 1.1e6, None),
        "a": cells(None, 1e6, 7e5),
        "b": cells(None, 2e6, 6e5),
    }
    found = fronts.Front("8b", "h100-ib400", [2**30, 2**31, 2**32], rows)
    assert found.ratios() == [None, 0.8, None]
    assert found.ratios(fronts.NO_HOST) == [None, 1.1, None]
    assert "0.800" in fronts.table(found)
    assert fronts.picture([found, found]).count("<polyline") == 8
    assert fronts._faster(rows["a"][1], rows["b"][1]) == rows["a"][1]


def test_a_launch_is_the_median_of_ratios_of_neighbours():
    steps = {"inductor": [1.0, 2.0, 4.0], "graphshard_single": [1.0, 2.2, 4.4], "graphshard": [2.0]}
    alone = Alone(steps, {}, {})
    assert single.ratio(alone, "graphshard_single") == pytest.approx(1.1)


def rank(own_us, machine_us, wall_us=1e6):
    return Measured({"fused": [Times(wall_us, own_us, machine_us)]}, {})


def test_a_step_counts_where_others_took_little(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    quiet = [rank(0.9e6, 2.0e6), rank(1.0e6, 2.0e6, 1.1e6)]
    assert sockets.quiet_steps(quiet, "fused") == [1.1e6]
    assert sockets.quiet_steps([rank(0.9e6, 2.0e6), rank(0.8e6, 2.0e6)], "fused") == []


def test_graphshard_is_compared_with_the_fastest_peer():
    def both(**wall_us):
        steps = {mode: [Times(us, us, us)] for mode, us in wall_us.items()}
        idle = {mode: [Times(us, 0.0, us)] for mode, us in wall_us.items()}
        return [Measured(steps, {}), Measured(idle, {})]

    launches = [both(fsdp2_tuned=4e5, blocks_tuned=3e5, fused=2e5)] * 2
    rows = sockets.make_rows(1.0, ("fsdp2_tuned", "blocks_tuned", "fused"), launches)
    assert [row.against for row in rows] == ["", "", "blocks_tuned"]
    assert rows[-1].speedup.median == pytest.approx(1.5)


def test_a_changed_rate_is_held_against_a_run_that_began_with_it():
    before, after, late = adapt.SETTLE + adapt.USUAL, adapt.ADAPT, adapt.USUAL
    step_us = (100e3,) * before + (300e3,) * after + (210e3,) * late
    plan = (0,) * 8 + (1,) * (before - 8) + (1,) * 20 + (2,) * (after - 20 + late)
    fresh = Trained((200e3,) * (adapt.SETTLE + adapt.USUAL), (0,), ())
    found = adapt.result(Trained(step_us, plan, ()), fresh)
    assert (found.before_ms, found.at_once_ms, found.adapted_ms) == (100, 300, 210)
    assert found.ratio == pytest.approx(1.05)
    assert found.adapted_after == 20
    assert adapt.num_changes(Trained(step_us, plan, ())) == 1, "not counted until it had settled"


def new_pages(sent, keeps):
    """How many it takes to have 64 MiB again that were given back, at best."""
    c_library = ctypes.CDLL(None)
    c_library.malloc.restype = ctypes.c_void_p
    if keeps:
        emulator.keep_memory()
    taken = []
    for _ in range(16):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        held = ctypes.c_void_p(c_library.malloc(2**26))
        ctypes.memset(held, 1, 2**26)
        c_library.free(held)
        taken.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    sent.send(min(taken))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
def test_what_is_freed_on_the_emulated_network_stays_with_the_process():
    found = {}
    for keeps in (False, True):
        receiver, sender = Pipe()
        process = warm_context().Process(target=new_pages, args=(sender, keeps))
        process.start()
        found[keeps] = receiver.recv() if receiver.poll(60) else None
        process.join(10)
    assert found[True] < 16 < found[False]  # 64 MiB are 32 pages where they are huge ones


def profile_of(*, arithmetic, attention, base_us, bytes_per_us):
    """Of float32, in flops per us."""
    products, attends = (Fit(line(1.0, rate), ()) for rate in (arithmetic, attention))
    memory = Fit(line(base_us, bytes_per_us), ())
    origin = Origin("cpu", "host", 1, 1, 8, "gloo", "2.13.0", "", "")
    return CostProfile(origin, (), (("float32", products),), (("float32", attends),), memory)


REGIONS = [
    [OpWork(4e6, 1e4), OpWork(0, 2e5), FREE],
    [OpWork(1e6, 1e4, attention=Attention(64, 128)), OpWork(0, 3e5, launches=0)],
    [OpWork(0, 1e5), OpWork(0, 1e5), OpWork(0, 4e6)],
    [OpWork(9e6, 1e4)],
]


def test_what_slows_kernels_in_a_step_is_found_by_kind():
    """Arithmetic, launches and memory traffic, each of which moves its own rates."""
    alone = profile_of(arithmetic=1e5, attention=5e4, base_us=4.0, bytes_per_us=2e4)
    ratios = profile.InStep(arithmetic=1.1, launch=3.5, memory=2.0)
    machine = calibrated(preset("cpu"), profile.moved(alone, ratios)).processor
    took_us = [region_us(machine, region, 0, len(region)) for region in REGIONS]
    found = profile.fitted(took_us, [profile.alone_us(alone, region) for region in REGIONS])
    assert astuple(found) == pytest.approx(astuple(ratios))


@pytest.mark.slow
def test_compute_on_one_process_is_measured(tmp_path, monkeypatch, capsys):
    out = tmp_path / "single.json"
    command = ("--models", "XXS", "--launches", "1", "--steps", "2", "--json", str(out))
    smoke(monkeypatch, single, *command)
    stdout = capsys.readouterr().out
    assert "XXS, graphshard_single / inductor:" in stdout
    assert "graphshard: " in stdout


@pytest.mark.alone  # only quiet steps count
@pytest.mark.slow
@pytest.mark.skipif(netns.missing() is not None, reason=str(netns.missing()))
def test_two_ranks_over_sockets_train_the_same():
    command = ["bench/sockets.py", "--config", "XXS", "--gbit", "1", "--launches", "1"]
    modes = ["--steps", "1", "--modes", "fsdp2_tuned,fused,fused_free"]
    done = subprocess.run(
        [sys.executable, *command, *modes], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Inductor, no limit" in done.stdout


@pytest.mark.slow
def test_a_second_process_group_is_compared(tmp_path, monkeypatch):
    out = tmp_path / "apart.json"
    smoke(monkeypatch, apart, "--smoke", "--json", str(out))
    (row,) = json.loads(out.read_text())["rows"]
    assert row["is_chosen"] == (row["gain"] >= separate_group.WORTH)
    assert row["together_us"] >= row["lower_bound_us"]
