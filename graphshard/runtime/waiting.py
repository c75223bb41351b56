"""Waiting for a collective, what to do while it is late, and where a backend cannot run it.

In: the work of a collective and what it is about. Out: it is done, or an error says which one
failed. Every wait ends: at once when the collective fails, at the latest at the time limit of its
process group.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from graphshard.errors import CollectiveFailed, StoreLost
from graphshard.fsdp2.backends import backend_name
from graphshard.runtime.agree import answer
from graphshard.runtime.ballot import Ballot
from graphshard.runtime.calls import current_task
from graphshard.runtime.limited import begin
from graphshard.runtime.live import LiveGroup
from graphshard.runtime.stopwatch import TimedWork

logger = logging.getLogger(__name__)

LATE_S = 2.0  # then this rank looks whether another one asks what runs here
CLEAN_UP_S = 5.0  # for what was under way when something else failed
SOURCE_PLACE = re.compile(r"^\[\S+:\d+\] ")  # as gloo begins its messages
UNKNOWN = 100  # c10d's OpType of a work that is put together of others

Work: TypeAlias = "dist.Work | TimedWork"


@dataclass(frozen=True, slots=True)
class NamedCollective:
    """One collective, as messages name it. live: the first of its groups. names: of all of them."""

    kind: str
    live: LiveGroup
    names: Callable[[], Sequence[str]]
    group: dist.ProcessGroup | None

    def __str__(self) -> str:
        number = self.live.counters.forwards
        when = f"backward of forward {number}" if current_task() >= 0 else f"forward {number}"
        return f"{self.kind} of {' + '.join(self.names())} in {when}"

    @property
    def limit_s(self) -> float | None:
        return None if self.group is None else time_limit(self.group, self.live.fsdp.device)


def finish(work: Work, collective: NamedCollective, *, limit_s: float | None = None) -> None:
    """Wait for `work`. Raises CollectiveFailed (GS405) if it fails, or is not done in time.

    limit_s: an earlier end than the process group's, where the result is not needed. On CPU the
    host itself waits. When that takes long, perhaps another rank asks what runs here instead of
    taking part: then raises DivergedRanks, as that rank does. On a GPU only the stream waits, and
    this returns at once.
    """
    with naming(collective):
        _wait(work, collective, limit_s)


@contextmanager
def naming(collective: NamedCollective) -> Iterator[None]:
    """What the backend raises inside becomes CollectiveFailed (GS405) with the collective."""
    began = time.monotonic()
    try:
        yield
    except CollectiveFailed:
        raise
    except RuntimeError as error:
        raise _failure(collective, error, time.monotonic() - began) from error


def _wait(work: Work, collective: NamedCollective, limit_s: float | None) -> None:
    root = collective.live.root
    ballots = [] if root is None or collective.live.fsdp.device.type != "cpu" else root.ballots
    # What a user's own collective returns may know nothing of time limits.
    if root is None or not ballots or type(work) not in (dist.Work, TimedWork):
        work.wait()
        return
    began, own_s = time.monotonic(), collective.limit_s
    # The backend ends a wait at its limit by itself, counted from when it began to send.
    ends_s = min(s for s in (limit_s, own_s and own_s + LATE_S, float("inf")) if s is not None)
    wait = _limited_wait(work, collective)
    while not wait(min(LATE_S, max(ends_s - (time.monotonic() - began), 0.0))):
        if time.monotonic() - began >= ends_s:
            raise RuntimeError(f"it was not done after {ends_s:.0f} s")
        _answer(ballots)


def _answer(ballots: Sequence[Ballot]) -> None:
    for ballot in ballots:
        if ballot.is_lost:
            continue
        try:
            answer([ballot])
        except StoreLost as error:
            # Whoever kept the store is gone. The collective may be done without it, or fails.
            ballot.is_lost = True
            logger.warning("%s", error.message)


def _limited_wait(work: Work, collective: NamedCollective) -> Callable[[float], bool]:
    """Waits for `work` so many seconds; says whether it is done, raises if it failed."""
    inner: Any = work.inner if isinstance(work, TimedWork) else work
    is_gloo = backend_name(collective.group, collective.live.fsdp.device) == "gloo"
    if not is_gloo or inner._get_op_type() != UNKNOWN:
        return lambda seconds: _is_done_within(work, seconds)
    # gloo's reduce-scatter: its wait takes no limit, and it never says that it is completed.
    return begin(work.wait).is_over_within


def _is_done_within(work: Work, seconds: float) -> bool:
    began = time.monotonic()
    try:
        work.wait(timedelta(seconds=seconds))
        return True
    except RuntimeError:
        is_completed = work.is_completed()
        if not is_completed and time.monotonic() - began < 0.9 * seconds:
            raise  # not for want of time
    if is_completed:  # it failed; or it was done after the limit and before this line
        work.wait()
    return bool(is_completed)


def _failure(collective: NamedCollective, error: RuntimeError, waited_s: float) -> CollectiveFailed:
    ranks, limit = "", collective.limit_s
    if collective.group is not None:
        ranks = f" with ranks {dist.get_process_group_ranks(collective.group)}"
    within = "" if limit is None else f" (time limit of its process group: {limit:.0f} s)"
    text = (
        f"rank {dist.get_rank()}: {collective}{ranks} failed after waiting {waited_s:.1f} s"
        f"{within}: {_reason(error)}; the log of the rank that failed first says why"
    )
    return CollectiveFailed("GS405", text)


def _reason(error: BaseException) -> str:
    """Its first sentence, without the place in the backend's sources."""
    line = str(error).split("\n", 1)[0].split(". This is typically", 1)[0]
    return SOURCE_PLACE.sub("", line) or type(error).__name__


def time_limit(group: dist.ProcessGroup, device: torch.device) -> float | None:
    """Seconds after which the backend gives a collective up; None if it does not say."""
    try:
        limit = group._get_backend(device).options._timeout
    except (RuntimeError, AttributeError):  # made in Python, or without such an option
        return None
    return float(limit.total_seconds())


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
