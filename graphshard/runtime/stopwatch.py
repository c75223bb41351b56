"""Times of a running direction: a mark before each segment, and when each collective was done.

On a CPU marks are the host's clock, since the host computes; on any other device they are events
in its stream, read only when the direction is long over, so that nothing is held up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeAlias

import torch

from graphshard.schedule.measured import CollectiveTiming, DirectionRun

# `dist.Work`, or what stands for it.
Work: TypeAlias = Any

# A wait that takes less found its collective done: waking a thread alone takes this long.
NOT_YET_DONE_NS = 200_000


class Stopwatch(Protocol):
    """What a run tells of itself."""

    def mark(self, index: int) -> None:
        """Segment `index` begins."""

    def watch(self, work: Work) -> Work:
        """The segment that runs now has issued `work`; the result is to be waited for instead."""

    def taken(self) -> DirectionRun:
        """Everything since the first mark; blocks until the device is done with it."""


class HostStopwatch:
    """For a CPU. A collective's end is noted by the backend's own thread where it can do that.

    Where it cannot (gloo's reduce-scatter), it is known only if somebody had to wait for it.
    """

    def __init__(self) -> None:
        self._marks: list[int] = []
        self._issued: dict[int, int] = {}
        self._finished: dict[int, int] = {}

    def mark(self, index: int) -> None:
        self._marks.append(time.perf_counter_ns())

    def watch(self, work: Work) -> Work:
        index = len(self._marks) - 1
        self._issued[index] = time.perf_counter_ns()

        def note(*_: object) -> None:
            self._finished[index] = time.perf_counter_ns()

        try:
            future = work.get_future()
        except RuntimeError:  # not implemented by this kind of work
            return TimedWork(work, note)
        future.add_done_callback(note)
        return work

    def taken(self) -> DirectionRun:
        start = self._marks[0]
        timings = {
            index: CollectiveTiming((at - start) / 1e3, (done - start) / 1e3 if done else None)
            for index, at in self._issued.items()
            for done in (self._finished.get(index),)
        }
        return DirectionRun(tuple((mark - start) / 1e3 for mark in self._marks), timings)


class TimedWork:
    """A collective that calls `note` if somebody had to wait for it."""

    def __init__(self, work: Work, note: Callable[[], None]) -> None:
        self.inner = work
        self._note = note

    def is_completed(self) -> bool:
        return bool(self.inner.is_completed())

    def wait(self, *timeout: timedelta) -> None:
        start = time.perf_counter_ns()
        self.inner.wait(*timeout)
        if time.perf_counter_ns() - start >= NOT_YET_DONE_NS:
            self._note()


class DeviceStopwatch:
    """For an accelerator. A side stream waits for each collective, so that compute does not."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)
        self._marks: list[torch.Event] = []
        self._trips: dict[int, tuple[torch.Event, torch.Event]] = {}

    def mark(self, index: int) -> None:
        self._marks.append(self._event())

    def watch(self, work: Work) -> Work:
        issued = self._event()
        with self._stream:
            work.wait()
            self._trips[len(self._marks) - 1] = issued, self._event()
        return work

    def _event(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def taken(self) -> DirectionRun:
        ends = [self._marks[-1], *(done for _, done in self._trips.values())]
        for event in ends:
            event.synchronize()
        start = self._marks[0]

        def us(event: torch.Event) -> float:
            return start.elapsed_time(event) * 1e3

        timings = {
            index: CollectiveTiming(us(at), us(done)) for index, (at, done) in self._trips.items()
        }
        return DirectionRun(tuple(map(us, self._marks)), timings)


def stopwatch(device: torch.device) -> Stopwatch:
    return HostStopwatch() if device.type == "cpu" else DeviceStopwatch(device)
