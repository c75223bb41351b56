"""Waiting for a collective, and what to do while it is late."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from graphshard.runtime.agree import answer
from graphshard.runtime.live import LiveGroup

LATE_S = 2.0


def finish(work: dist.Work, live: LiveGroup) -> None:
    """Wait for `work`, a collective of `live`'s group. Raises what the process group raises.

    On CPU the host itself waits. When that takes long, perhaps another rank asks what runs here
    instead of taking part: then raises DivergedRanks, as that rank does. On a GPU only the stream
    waits, and this returns at once.
    """
    root = live.root
    if root is None or not root.ballots or live.fsdp.device.type != "cpu":
        work.wait()
        return
    while True:
        try:
            work.wait(timedelta(seconds=LATE_S))
            return
        except RuntimeError:
            if work.is_completed():
                raise
        answer(root.ballots)
