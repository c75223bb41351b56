"""Ranks as processes that may die: each case has its own, and a store that outlives them all.

The store is the test's, as torchrun's agent keeps it for its ranks. A rank answers once, through a
pipe. `CLOCK_MONOTONIC` is the same for all processes of a machine, so that they may tell times.
"""

import contextlib
import faulthandler
import gc
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist
from warm import leave_out, warm_context

START_S = 90.0  # until every rank has said that it is ready


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank finds the others. faults: it writes there when its fault begins."""

    rank: int
    world_size: int
    port: int
    faults: str

    def note_fault(self) -> None:
        Path(self.faults).write_text(repr(time.monotonic()))


@dataclass(frozen=True, slots=True)
class Ended:
    """How one rank ended. answer: what it returned; None if it died. after_s: since the fault."""

    rank: int
    answer: Any
    exitcode: int | None
    after_s: float
    stack: str = ""


def run(
    world_size: int, work: Callable[..., Any], *args: Any, limit_s: float, patience_s: float
) -> list[Ended]:
    """Run `work(place, *args)` on every rank.

    limit_s: from the fault until every rank has ended that can. patience_s: without a fault. A rank
    that has not ended by then is shown where it is, and killed.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = warm_context()
    with tempfile.TemporaryDirectory(prefix="graphshard-faults-") as folder:
        faults = Path(folder) / "fault"
        ranks = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            place = Place(rank, world_size, store.port, str(faults))
            stack = str(Path(folder) / f"stack{rank}")
            payload = pickle.dumps((work, args))
            process = context.Process(target=_main, args=(theirs, place, stack, payload))
            process.start()
            theirs.close()
            ranks.append(_Rank(rank, process, ours, Path(stack)))
        try:
            _wait(ranks, faults, limit_s, patience_s)
            began = float(faults.read_text()) if faults.exists() else time.monotonic()
            return [rank.ended(began) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()


class _Rank:
    def __init__(self, rank: int, process: Any, conn: Connection, stack: Path) -> None:
        self.rank, self.process, self._conn, self._stack = rank, process, conn, stack
        self._answer: Any = None
        self._ended_at: float | None = None

    @property
    def has_ended(self) -> bool:
        return self._ended_at is not None

    def look(self) -> None:
        """Take what it says; it has ended when its process has."""
        with contextlib.suppress(EOFError, OSError):
            while self._conn.poll():
                self._answer = self._conn.recv()
        if self.process.exitcode is not None and self._ended_at is None:
            self._ended_at = time.monotonic()

    def is_stopped(self) -> bool:
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):  # it has ended since
            return False
        return stat.rsplit(")", 1)[1].split()[0] in "Tt"

    def ended(self, began: float) -> Ended:
        stack = ""
        if not self.has_ended and not self.is_stopped():
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.3)
            stack = self._stack.read_text() or "no stack"
        at = self._ended_at or time.monotonic()
        return Ended(self.rank, self._answer, self.process.exitcode, at - began, stack)

    def kill(self) -> None:
        if self.process.exitcode is None:
            self.process.kill()
        self.process.join()
        self._conn.close()


def _wait(ranks: list[_Rank], faults: Path, limit_s: float, patience_s: float) -> None:
    """Until all have ended that are not stopped for good, or it takes too long."""
    started = time.monotonic()
    while True:
        for rank in ranks:
            rank.look()
        missing = [rank for rank in ranks if not rank.has_ended]
        if not missing:
            return
        began = float(text) if faults.exists() and (text := faults.read_text()) else None
        late = began is not None and time.monotonic() - began > limit_s
        if late or time.monotonic() - started > patience_s:
            return
        if began is not None and all(rank.is_stopped() for rank in missing):
            time.sleep(0.2)
            if all(rank.is_stopped() for rank in missing) and time.monotonic() - began > 4:
                return  # stopped for good: a pause is shorter
        wait([rank.process.sentinel for rank in missing], 0.1)


def _main(conn: Connection, place: Place, stack: str, payload: bytes) -> None:
    for name, value in (("GLOO_SOCKET_IFNAME", "lo"), ("GRAPHSHARD_COMPUTE", "aten")):
        os.environ.setdefault(name, value)
    here = Path(__file__).parent
    sys.path[:0] = [str(here), str(here.parent), str(here.parent / "dist")]
    leave_out()
    gc.freeze()  # the modules: collections pass them over
    with open(stack, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        work, args = pickle.loads(payload)
        conn.send(work(place, *args))
        conn.close()
        sys.stdout.flush()
        os._exit(0)
