"""Calls into the backend that take no time limit: a thread makes them, and who waits has one.

In: a call. Out: a `Task`, which says within so many seconds whether the call is over. A call that
never ends keeps its thread; the next one gets another.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

import torch.distributed as dist

# How long this process waits at exit for calls that are still being made. For collectives that were
# given up, rank 0 and the others: they end when the other ranks leave.
LEAVE_S = 8.0, 20.0
ANSWER_S = 2.0  # for calls that are answered at once or never
# Gloo's threads free the tensors of the last collectives, and need the interpreter for it: where it
# is torn down meanwhile, the process aborts (github.com/pytorch/pytorch/pull/179291).
LET_GO_S = 0.05


@dataclass(slots=True, eq=False)
class Task:
    """One call. over: locked until it is. call: None then, so that nothing of it is held on to."""

    call: Callable[[], Any] | None
    over: Lock = field(default_factory=Lock)
    result: Any = None
    error: BaseException | None = None

    def is_over_within(self, seconds: float) -> bool:
        """Raises what the call raised."""
        if not self.over.acquire(timeout=seconds):
            return False
        self.over.release()
        if self.error is not None:
            raise self.error
        return True


def begin(call: Callable[[], Any], *, answered_at_once: bool = False) -> Task:
    """Make `call` in another thread. answered_at_once: or never."""
    task = Task(call)
    task.over.acquire()
    try:
        thread = _IDLE.pop()
    except IndexError:
        thread = _CallingThread()
        thread.start()
    thread.leave_s = ANSWER_S if answered_at_once else None
    thread.is_calling = True
    thread.tasks.put(task)
    return task


class _CallingThread(Thread):
    """is_calling: from when it is given a task. leave_s: how long an exit waits for it then; None:
    as LEAVE_S says."""

    def __init__(self) -> None:
        super().__init__(name="graphshard-wait", daemon=True)
        self.tasks: SimpleQueue[Task] = SimpleQueue()
        self.is_calling = False
        self.leave_s: float | None = None

    def run(self) -> None:
        while True:
            task = self.tasks.get()
            try:
                assert task.call is not None
                task.result = task.call()
            except BaseException as error:
                task.error = error
            task.call = None
            self.is_calling = False
            _IDLE.append(self)
            task.over.release()
            del task


# Of this process: threads that wait for a task, as many as there ever were calls at one time. A
# child that is forked has none of them.
_IDLE: list[_CallingThread] = []
os.register_at_fork(after_in_child=_IDLE.clear)


def _let_calls_end() -> None:
    """At exit: calls that are being made come back first, as far as they can be waited for.

    Before Python 3.14 a thread that comes back from the backend while the interpreter is torn down
    aborts the process. One rank does not wait as long for the others, so that it leaves first. An
    interrupt does not cut the wait short: torchrun passes on the one that the terminal has sent
    already.
    """
    first = not dist.is_initialized() or dist.get_rank() == 0
    most_s = LEAVE_S[0 if first else 1]
    began, called = time.monotonic(), False
    for thread in threading.enumerate():
        if isinstance(thread, _CallingThread):
            called = True
            ends = began + (most_s if thread.leave_s is None else thread.leave_s)
            while thread.is_calling and time.monotonic() < ends:
                with contextlib.suppress(KeyboardInterrupt):
                    time.sleep(0.01)  # then it stands at its queue, where nothing wakes it
    if called:
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(LET_GO_S)


atexit.register(_let_calls_end)
