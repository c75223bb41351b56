"""Starts a whole job (a script by torchrun), reads what it says and sees to its end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent


class Job:
    """A launcher with its ranks, in a session of their own: what a terminal would interrupt.

    script: in this folder; its argument is the number of steps.
    """

    def __init__(
        self,
        launcher: Sequence[str],
        steps: int,
        cache: Path,
        log: Path,
        *,
        script: str = "job.py",
        more: Mapping[str, str] | None = None,
    ) -> None:
        self._log = log
        environment = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "GRAPHSHARD_CACHE_DIR": str(cache),
            "PYTHONPATH": str(ROOT),
            **(more or {}),
        }
        command = [sys.executable, "-m", "torch.distributed.run", *launcher, str(HERE / script)]
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [*command, str(steps)],
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for left in self.ranks():
            os.kill(left, signal.SIGKILL)
        self.process.kill()
        self.process.wait()

    @property
    def said(self) -> str:
        return self._log.read_text()

    def until(self, text: str, limit_s: float) -> None:
        """Wait until the job has said `text`."""
        ends = time.monotonic() + limit_s
        while text not in self.said:
            assert self.process.poll() is None, f"ended before {text!r}:\n{self.said}"
            assert time.monotonic() < ends, f"no {text!r} in {limit_s} s:\n{self.said}"
            time.sleep(0.05)

    def ranks(self) -> list[int]:
        """Process ids of the ranks that are alive."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (FileNotFoundError, ProcessLookupError):  # it has ended since
                continue
            if parent == self.process.pid:
                found.append(int(folder.name))
        return found

    def interrupt(self) -> None:
        """Ctrl-C: the terminal tells every process of the job."""
        os.killpg(self.process.pid, signal.SIGINT)

    def ended(self, limit_s: float) -> int:
        """The launcher's exit status; its ranks have ended with it."""
        try:
            status = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not end in {limit_s} s:\n{self.said}") from None
        assert not self.ranks(), self.said
        return status
