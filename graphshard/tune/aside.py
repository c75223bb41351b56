"""Work beside this process's own: in forks of it, which have all that was built and captured.

In: functions whose results can be pickled. Out: these results. Where there cannot be a fork, or
where it failed, the work is done here, so that errors are raised here. Work in a fork may go on in
forks of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TypeVar

T = TypeVar("T")


def side_by_side(works: Sequence[Callable[[], T]]) -> list[T]:
    """What each of them returns. As many are done at a time as there are cores, or one more so that
    no core waits for the last one alone; the first of them here. Raises what the first one raises
    that does."""
    found: list[T] = []
    rounds = ceil(len(works) / (_num_cores() + 1)) if _may_fork() else len(works)
    at_a_time = ceil(len(works) / max(1, rounds)) or 1
    for start in range(0, len(works), at_a_time):
        own, *others = works[start : start + at_a_time]
        forks: list[_Fork] = []
        try:
            forks.extend(map(_forked, others))
            found += [own(), *(_wait(*fork) for fork in zip(forks, others, strict=True))]
        finally:
            for fork in forks:
                fork.process.terminate()  # it is done, or nobody waits for it any more
                fork.process.join()
    return found


@dataclass(frozen=True, slots=True)
class _Fork:
    """result: where it can be read, or nothing if the work failed."""

    process: BaseProcess
    result: Connection


def _forked(work: Callable[[], object]) -> _Fork:
    context = multiprocessing.get_context("fork")
    result, sending = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(work, sending))
    with warnings.catch_warnings():
        # Python 3.12 warns of any thread of the system; what torch leaves are OpenMP's idle ones.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    sending.close()
    return _Fork(process, result)


def _wait(fork: _Fork, work: Callable[[], T]) -> T:
    with fork.result:
        try:
            found: T = fork.result.recv()
        except EOFError:
            return work()
    return found


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _may_fork() -> bool:
    """Other threads do not live on in a fork, nor does CUDA. `threading` does not know them all."""
    import torch

    return (
        sys.platform == "linux"
        and len(sys._current_frames()) == 1
        and not torch.cuda.is_initialized()
        and not multiprocessing.current_process().daemon  # which may have no children
    )


def _leave(*_: object) -> None:
    """Of a fork that nobody waits for any more: it ends its own ones first."""
    sys.exit(1)


def _send(work: Callable[[], object], to: Connection) -> None:
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who waits, and ends this one
    signal.signal(signal.SIGTERM, _leave)
    torch.set_num_threads(1)  # OpenMP's threads do not live on in a fork either
    with to:
        try:
            to.send(work())
        except Exception:  # who waits finds nothing, does the work itself, and raises it
            return
