"""Runs the user's command once, watched, and reads what its ranks wrote.

In: a command and how it is to run. Out: a `Run`: the facts of the ranks that left any, the exit
status and the last lines that the command printed. True afterwards: no process of it is left.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from graphshard.doctor.attach import FOLDER, MODE, OURS, STEPS, hook_text
from graphshard.doctor.facts import Facts
from graphshard.errors import DoctorError
from graphshard.files.information import printable
from graphshard.files.reading import reason

# torchrun gives its ranks this long to end after a signal (torch 2.13, elastic/agent/server).
GRACE_S = 30.0
TAIL_LINES = 12
TORCHRUN = "torch/distributed/elastic/multiprocessing/api.py"


@dataclass(frozen=True, slots=True)
class LaunchedRun:
    """One run of the command. facts: by rank. status: None if it ran past its time limit.

    steps_wanted: after which it was ended; 0: it ran until its own end.
    """

    mode: str
    facts: tuple[Facts, ...]
    status: int | None
    steps_wanted: int
    tail: tuple[str, ...]

    @property
    def is_whole(self) -> bool:
        """All ranks reported, and ended by themselves or after the wanted steps."""
        if not self.facts or len(self.facts) != self.facts[0].world_size or self.status is None:
            return False
        was_ended = self.steps_wanted and all(
            len(rank.steps) >= self.steps_wanted for rank in self.facts
        )
        return bool(was_ended) or (self.status == 0 and not any(f.failure for f in self.facts))

    @property
    def why(self) -> str:
        """What went wrong, in a line; only if it is not whole."""
        if self.status is None:
            return "it ran past the time limit and was stopped"
        failures = [rank.failure for rank in self.facts if rank.failure]
        if failures:
            return failures[0]
        if self.status:
            last = f": {self.tail[-1]}" if self.tail else ""
            return f"it ended with status {self.status}{last}"
        if not self.facts:
            return "no process of it called fully_shard or backward"
        return f"only {len(self.facts)} of {self.facts[0].world_size} ranks reported"


def run_watched(command: Sequence[str], mode: str, num_steps: int, limit_s: float) -> LaunchedRun:
    """mode: "eager", "graphshard" or "aot_eager".

    Raises DoctorError GS1141 if it cannot be started.
    """
    with tempfile.TemporaryDirectory(prefix="graphshard-doctor-") as name:
        folder = Path(name)
        (folder / "hook").mkdir()
        (folder / "hook/sitecustomize.py").write_text("\n".join(hook_text()) + "\n")
        with (
            (folder / "log").open("wb") as log,
            _started(command, folder, mode, num_steps, log) as (process),
        ):
            try:
                status: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                status = None
        lines = (folder / "log").read_text(errors="replace").splitlines()
        paths = folder.glob(f"{mode}.*.json")
        facts = [Facts.from_json(path.read_text(encoding="utf-8")) for path in paths]
        facts.sort(key=lambda rank: rank.rank)
        return LaunchedRun(mode, tuple(facts), status, num_steps, _tail(lines))


def _tail(lines: Sequence[str]) -> tuple[str, ...]:
    """The last lines before torchrun's own report, which says no more than the exit status."""
    said = takewhile(lambda line: TORCHRUN not in line, lines)
    return tuple(line for line in said if line.strip())[-TAIL_LINES:]


def _environment(folder: Path, mode: str, num_steps: int) -> dict[str, str]:
    own = {FOLDER: str(folder), MODE: mode, STEPS: str(num_steps)}
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(folder / "hook"), *([before] if before else [])])
    off = {"GRAPHSHARD_DISABLE": "0" if mode == OURS else "1"}
    return {**os.environ, **own, **off, "PYTHONPATH": path}


@contextmanager
def _started(
    command: Sequence[str], folder: Path, mode: str, num_steps: int, log: object
) -> Iterator[subprocess.Popen[bytes]]:
    try:
        process = subprocess.Popen(
            command,
            env=_environment(folder, mode, num_steps),
            stdin=subprocess.DEVNULL,
            stdout=log,  # type: ignore[call-overload]
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:  # ValueError: a null character in a word
        raise DoctorError(
            "GS1141", f"cannot start {printable(command[0])}: {reason(error)}"
        ) from error
    try:
        yield process
    finally:
        _stop(process)
        for pid in _left_over(folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """torchrun, asked kindly, takes its ranks along; they are in sessions of their own."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _left_over(folder: Path) -> list[int]:
    """Processes that have the folder of this run in their environment (Linux)."""
    mark = f"{FOLDER}={folder}".encode()
    found = []
    for entry in sorted(Path("/proc").glob("[0-9]*")):
        with suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found
