"""bench/host.py: its arithmetic with made-up numbers, and that it runs."""

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from smoke import smoke  # noqa: E402

from bench import emulator, host, peers, rounds  # noqa: E402
from bench.host_launch import Measured, StepTimes  # noqa: E402
from bench.interval import compare, verdict  # noqa: E402
from bench.ways import choose, exists  # noqa: E402

WAYS = choose("single,inductor,fsdp2,simple_fsdp,graphshard_aten")


def measured(step_us, exposed_us=0.0):
    times = [StepTimes(step_us * part, step_us / 3, exposed_us, 4) for part in (0.5, 1.0, 9.0)]
    return Measured(times, first_s=1.0)


def one_round(single, inductor, fsdp2, simple_fsdp, ours):
    times = (single, inductor, fsdp2, simple_fsdp, ours)
    return {way.name: measured(us) for way, us in zip(WAYS, times, strict=True)}


ROUNDS = [one_round(1e3, 800.0, 11e3, 6e3, 5e3), one_round(2e3, 900.0, 22e3, 12e3, 10e3)]


def test_host_time_is_what_sharding_adds_in_the_same_round():
    rows = {way.name: host.make_row(way, 200, ROUNDS) for way in WAYS}
    assert rows["single"].host_us is None
    assert rows["inductor"].host_us is None
    ours = rows["graphshard_aten"]
    assert (ours.host_low_us, ours.host_us, ours.host_high_us) == (4e3, 6e3, 8e3)
    assert ours.over_compiled_us == (4.2e3 + 9.1e3) / 2
    assert (ours.step_us, ours.forward_us) == (7.5e3, 2.5e3)


def test_ratios_are_paired_and_judged_by_their_near_end():
    against_fsdp2, against_simple = host.comparisons(WAYS, ROUNDS)
    assert (against_fsdp2.peer, against_simple.peer) == ("fsdp2", "simple_fsdp")
    assert against_fsdp2.ratio.median == pytest.approx(0.4)
    assert against_fsdp2.met
    assert not against_simple.met  # 4/5 in both rounds
    assert "0.80 [0.80, 0.80], target 0.70: MISSED" in verdict(against_simple)
    slower = [(mine * 1.019, theirs) for mine, theirs in ((4e3, 10e3), (9e3, 20e3))]
    assert compare("ours", "peer", 0.4, slower).met  # 0.4076, within 2 %
    assert not compare("ours", "peer", 0.4, [(4.1, 10.0)]).met


def test_no_ratio_to_a_peer_that_adds_nothing():
    free = one_round(1e3, 800.0, 11e3, 900.0, 700.0)
    against_fsdp2, against_simple = host.comparisons(WAYS, [free])
    assert against_fsdp2.ratio.median == pytest.approx(-0.03)
    assert against_fsdp2.met
    assert against_simple.ratio is None
    assert not against_simple.met
    assert verdict(against_simple).endswith("no ratio")
    assert "Faster than one eager process without sharding: SimpleFSDP, Inductor, graphshard" in (
        host.notes([host.make_row(way, 200, [free]) for way in WAYS])
    )


def test_without_the_single_process_there_is_no_host_time():
    ways = choose("fsdp2,graphshard_aten")
    assert host.comparisons(ways, ROUNDS) == []
    rounds_without = [{way.name: each[way.name] for way in ways} for each in ROUNDS]
    assert host.make_row(ways[1], 200, rounds_without).host_us is None


def test_waiting_is_said():
    way = choose("fsdp2")[0]
    row = host.make_row(way, 200, [{"fsdp2": measured(1e3, exposed_us=2.0)}])
    assert "Waits for the link are in the steps of: FSDP2" in host.notes([row])
    assert host.notes([replace(row, exposed_us=0.5)]) == ""


def test_each_round_begins_with_another_way():
    assert [rounds.turns("abc", index) for index in range(4)] == [
        tuple("abc"), tuple("bca"), tuple("cab"), tuple("abc"),
    ]  # fmt: skip


def test_a_launch_ends_at_its_limit_with_its_children():
    code = "import subprocess, sys, time; subprocess.run([sys.executable, '-c', '{}'])"
    sleeping = code.replace("{}", "import time; time.sleep(60)")
    with pytest.raises(rounds.TookTooLong, match=r"more than 0.5 s"):
        rounds.python("-c", sleeping, limit_s=0.5)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        rounds.python("-c", "1 / 0")


def test_a_peer_that_cannot_be_had_is_an_error_that_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "FOLDER", tmp_path / "peers" / "none")
    monkeypatch.setattr(peers, "SOURCE", tmp_path / "none.py")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(peers.PeerMissing, match=r"torchtitan==0.3.0, which could not be inst"):
        peers.install()
    assert list((tmp_path / "peers").iterdir()) == []


def test_ways_with_options_of_the_future_are_left_out():
    assert all(exists(way) for way in WAYS)
    with pytest.raises(argparse.ArgumentTypeError, match="unknown: fsdp3"):
        choose("fsdp2,fsdp3")


@pytest.mark.alone  # times are compared
@pytest.mark.slow
def test_a_tiny_run(tmp_path, monkeypatch, capsys):
    code = "from bench import emulator; emulator.load_extension()"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)  # compilers warn
    assert emulator.load_extension()
    out = tmp_path / "host.json"
    ways = ("--modes", "single,fsdp2,graphshard_aten")
    smoke(monkeypatch, host, "--smoke", *ways, "--json", str(out))
    stdout = capsys.readouterr().out
    assert "graphshard_aten / fsdp2" in stdout
    result = json.loads(out.read_text())
    assert {"command", "machine", "versions", "rows", "ratios", "launches"} <= set(result)
    single, eager, ours = result["rows"]
    assert single["host_us"] is None
    assert 0 < eager["host_us"] < eager["step_us"]
    assert ours["exposed_us"] <= 1e-3 * ours["step_us"]
    assert "Waits for the link" not in stdout
