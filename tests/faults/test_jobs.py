"""Whole jobs as users start and end them: Ctrl-C, a lost rank, a shared cache, a restart, a
replica that is lost and comes back."""

import os
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import Job
from torchft.coordination import LighthouseServer

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]

TWO = ("--standalone", "--nproc-per-node", "2")
START_S = 90.0
CRASHES = ("terminate called", "Fatal Python error", "core dumped", "Segmentation fault", "Abort")


@pytest.mark.parametrize("moment", ["compiling", "step 3 "])
def test_the_first_ctrl_c_ends_all_ranks(moment: str, tmp_path: Path) -> None:
    with Job(TWO, 10**6, tmp_path / "cache", tmp_path / "log") as job:
        job.until(moment, START_S)
        job.interrupt()
        assert job.ended(20.0) != 0
        assert not [word for word in CRASHES if word in job.said], job.said


def test_a_rank_that_is_killed_ends_the_job(tmp_path: Path) -> None:
    with Job(TWO, 10**6, tmp_path / "cache", tmp_path / "log") as job:
        job.until("step 3 ", START_S)
        os.kill(job.ranks()[1], signal.SIGKILL)
        assert job.ended(30.0) != 0


def losses(text: str, world_size: int) -> list[str]:
    return re.findall(rf"^step \d+ of {world_size}: (\S+)$", text, re.M)


def test_two_jobs_share_a_cache(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with (
        Job(TWO, 5, cache, tmp_path / "first") as first,
        Job(TWO, 5, cache, tmp_path / "second") as second,
    ):
        assert [first.ended(START_S), second.ended(START_S)] == [0, 0], first.said + second.said
        found = [losses(job.said, 2) for job in (first, second)]
        assert found[0] == found[1]
        assert len(found[0]) == 5
        assert "Warning" not in first.said + second.said


def wait_for(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.05)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_restart_with_fewer_ranks(tmp_path: Path) -> None:
    """An elastic job of two nodes loses one, and goes on with one rank."""
    port = 20_000 + os.getpid() % 10_000
    nodes = ("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3")
    store = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "one")
    quick = ("--rdzv-conf", "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3")
    launcher = (*nodes, *store, *quick)
    with Job(launcher, 10**6, tmp_path / "cache", tmp_path / "first") as first:
        wait_for(lambda: listens(port))
        with Job(launcher, 10**6, tmp_path / "cache", tmp_path / "second") as second:
            wait_for(lambda: "step 3 of 2" in first.said + second.said)
        first.until("step 3 of 1", START_S)
        assert len(losses(first.said, 1)) >= 4


def replica_steps(job: Job) -> dict[int, tuple[int, str]]:
    """By step: how many replicas took it, and what the parameters are then."""
    # torchft's own log goes to the same file, part of a line at a time.
    found = re.findall(r"step (\d+) of (\d): ([0-9a-f]{64})", job.said)
    return {int(step): (int(count), digest) for step, count, digest in found}


@pytest.mark.timeout(300)
def test_a_torchft_replica_is_lost_and_comes_back(tmp_path: Path) -> None:
    """Each replica is a job of its own, equal to eager FSDP2 to the last bit (`replica.py`)."""
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1)
    address = f"http://localhost:{lighthouse.address().rsplit(':', 1)[1]}"

    def replica(name: str) -> Job:
        more = {"TORCHFT_LIGHTHOUSE": address}
        log = tmp_path / name
        return Job(TWO, 10**6, tmp_path / "cache", log, script="replica.py", more=more)

    with replica("first") as first:
        with replica("second"):
            first.until(" of 2: ", START_S)
        lost_at = max(replica_steps(first))
        first.until(f"step {lost_at + 3} of 1: ", START_S)
        with replica("third") as third:
            third.until(" of 2: ", START_S)
            joined_at = min(replica_steps(third))
            first.until(f"step {joined_at + 5} of 2: ", START_S)
            third.until(f"step {joined_at + 5} of 2: ", START_S)
    ours, theirs = replica_steps(first), replica_steps(third)
    assert lost_at + 3 < joined_at
    assert all(ours[step] == theirs[step] for step in range(joined_at, joined_at + 6))
    lighthouse.shutdown()
