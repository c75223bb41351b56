"""Waiting for a collective, what to do while it is late, and where a backend cannot run it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from graphshard.runtime.agree import answer
from graphshard.runtime.live import LiveGroup
from graphshard.runtime.stopwatch import TimedWork

LATE = timedelta(seconds=2)
KNOWN = (dist.Work, TimedWork)


def finish(work: dist.Work | TimedWork, live: LiveGroup) -> None:
    """Wait for `work`, a collective of `live`'s group. Raises what the process group raises.

    On CPU the host itself waits. When that takes long, perhaps another rank asks what runs here
    instead of taking part: then raises DivergedRanks, as that rank does. On a GPU only the stream
    waits, and this returns at once.
    """
    ballots = () if live.root is None or live.fsdp.device.type != "cpu" else live.root.ballots
    # What a user's own collective returns may know nothing of time limits.
    if not ballots or not isinstance(work, KNOWN):
        work.wait()
        return
    while True:
        try:
            work.wait(LATE)
            return
        except RuntimeError:
            if work.is_completed():
                raise
        answer(ballots)


@contextmanager
def trying_in_place(lives: Sequence[LiveGroup]) -> Iterator[None]:
    """Inside, a collective of many tensors is issued, perhaps in vain.

    What a backend does not have it refuses before anything is sent, on every rank. `lives` do not
    try again.
    """
    try:
        yield
    except RuntimeError as error:
        if "does not support" not in str(error):
            raise
        for live in lives:
            live.fsdp.sends_in_place = False
