"""Calls into the backend that take no time limit: a thread makes them, and who waits has one.

In: a call. Out: a `Task`, which says within so many seconds whether the call is over. A call that
never ends keeps its thread; the next one gets another.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

import torch.distributed as dist

LEAVE_S = 8.0, 20.0  # at exit, for calls that were given up: rank 0, the others


@dataclass(slots=True, eq=False)
class Task:
    """One call. over: locked until it is. call: None then, so that nothing of it is held any more.
    awaited: it may come back while this process exits."""

    call: Callable[[], Any] | None
    awaited: bool
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


def begin(call: Callable[[], Any], *, awaited: bool = True) -> Task:
    """Make `call` in another thread."""
    task = Task(call, awaited)
    task.over.acquire()
    try:
        thread = _IDLE.pop()
    except IndexError:
        thread = _CallingThread()
        thread.start()
    thread.tasks.put(task)
    return task


class _CallingThread(Thread):
    def __init__(self) -> None:
        super().__init__(name="graphshard-wait", daemon=True)
        self.tasks: SimpleQueue[Task] = SimpleQueue()
        self.is_awaited = False

    def run(self) -> None:
        while True:
            task = self.tasks.get()
            self.is_awaited = task.awaited
            try:
                assert task.call is not None
                task.result = task.call()
            except BaseException as error:
                task.error = error
            task.call = None
            self.is_awaited = False
            _IDLE.append(self)
            task.over.release()
            del task


# Of this process: threads that wait for a task, as many as there ever were calls at one time. A
# child that is forked has none of them.
_IDLE: list[_CallingThread] = []
os.register_at_fork(after_in_child=_IDLE.clear)


def _let_calls_end() -> None:
    """At exit: a wait that was given up ends when the other ranks leave.

    Before Python 3.14 a thread that comes back from the backend while the interpreter is torn down
    aborts the process. One rank does not wait as long for the others, so that it leaves first.
    """
    first = not dist.is_initialized() or dist.get_rank() == 0
    ends = time.monotonic() + LEAVE_S[0 if first else 1]
    for thread in threading.enumerate():
        while isinstance(thread, _CallingThread) and thread.is_awaited and time.monotonic() < ends:
            time.sleep(0.01)  # then it stands at its queue, where nothing wakes it


atexit.register(_let_calls_end)
