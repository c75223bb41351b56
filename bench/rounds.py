"""Launches of a benchmark: fresh processes that take turns, and the file with what they measured.

In: what to launch. Out: its stdout; a JSON file with command, machine and versions. After an error,
a time limit or Ctrl-C no process that was started is left.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]


class TookTooLong(Exception):
    """A launch was ended at its time limit."""


def python(
    *args: str,
    environment: Mapping[str, str] | None = None,
    limit_s: float | None = None,
    cwd: Path = ROOT,
) -> str:
    """Run Python in its own process: its stdout.

    Raises RuntimeError with stderr if it fails, TookTooLong after `limit_s` seconds.
    """
    process = subprocess.Popen(
        [sys.executable, *args],
        cwd=cwd, env=_environment(environment or {}), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,  # with the compilers that it starts, it is one group to end
    )  # fmt: skip
    try:
        stdout, stderr = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise TookTooLong(f"{' '.join(args)} took more than {limit_s:g} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(args)} failed:\n{stderr}")
    return stdout


@contextmanager
def inductor_cache(*, own: bool) -> Iterator[Mapping[str, str]]:
    """The environment in which launches share a new cache of Inductor's, which is removed at the
    end. own=False: they use the one that is there, as where nobody reads the times."""
    if not own:
        yield {}
        return
    with tempfile.TemporaryDirectory() as folder:
        yield {"TORCHINDUCTOR_CACHE_DIR": folder}


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
        "KINETO_LOG_LEVEL": "99",  # the profiler's own notes on stderr
        **more,
    }


def last_line(stdout: str) -> object:
    """What a launch printed last, as JSON: libraries may print before."""
    return json.loads(stdout.splitlines()[-1])


def turns(modes: Sequence[T], index: int) -> tuple[T, ...]:
    """The modes in the order of round `index`: each round begins with another one."""
    first = index % len(modes)
    return (*modes[first:], *modes[:first])


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def header(script: str, against: Path | None = None) -> dict[str, object]:
    """What every results file begins with. against: another checkout that takes turns with this."""
    from bench import machine  # imports torch, which --help does without

    return {
        "command": " ".join((f"python bench/{script}", *map(_shown, sys.argv[1:]))),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **machine.describe(ROOT),
        **({"against": machine.git(against, "rev-parse", "HEAD")} if against else {}),
    }


def _shown(word: str) -> str:
    """An argument, without the folders of this machine."""
    return Path(word).name if os.path.isabs(word) else word


def write(path: Path, result: Mapping[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def numbers(text: str) -> tuple[int, ...]:
    """Of an argument such as `4,16,64`."""
    return tuple(int(part) for part in text.split(","))
