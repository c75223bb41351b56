"""Waiting for a collective, and what to do while it is late."""

from __future__ import annotations

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
