"""When collectives end: lanes are queues, and lanes of one link share its bandwidth.

In come collectives in the order of issue; out, once asked for, when each starts and ends. A
collective first takes its lane's `launch_us`, in which it needs no link; for the rest of its time
it shares the link equally with what other lanes have on it (NCCL's communicators and gloo's groups
do not know of each other). So a second process group adds no bandwidth: it hides launches, and
lets one collective pass another.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from graphshard.planner.problem import CollectiveLane, exact_us

NEVER = float("inf")


@dataclass(slots=True)
class Head:
    """A collective that its lane begins when `after` is done, and what is left of it."""

    job: int
    launch_us: float
    link_us: float
    after: int = -1


@dataclass(slots=True)
class LaneQueues:
    """The lanes of one run. started_us, finished_us: by job; finished_us lacks what is under way
    where that depends on what is issued later."""

    lanes: Sequence[CollectiveLane]
    started_us: dict[int, float] = field(default_factory=dict)
    finished_us: dict[int, float] = field(default_factory=dict)
    _free_at: dict[int, float] = field(default_factory=dict)
    _links: dict[str, Link] = field(default_factory=dict)
    _link_of: dict[int, Link] = field(default_factory=dict)

    def issue(self, job: int, lane: int, us: float, now_us: float, after: int = -1) -> None:
        """after: the job that this one cannot start before; -1: none.

        Where that is on another link, what is issued there until it ends is taken not to slow it.
        """
        name = self.lanes[lane].link
        if not name:
            ready_us = max(now_us, self.end_us(after) or 0.0) if after >= 0 else now_us
            self.started_us[job] = start_us = max(ready_us, self._free_at.get(lane, 0.0))
            self.finished_us[job] = self._free_at[lane] = start_us + us
            return
        link = self._link_of[job] = self._links.setdefault(name, Link())
        link.advance(now_us, self)
        launch_us = min(us, self.lanes[lane].launch_us)
        if after >= 0 and self._link_of.get(after) is not link:
            self.end_us(after)
        link.queues[lane].append(Head(job, launch_us, us - launch_us, after))

    def end_us(self, job: int) -> float | None:
        """When `job` ends; None if it was never issued. Later issues do not change the past."""
        link = self._link_of.get(job)
        while link is not None and job not in self.finished_us:
            link.next_event(NEVER, self)
        return self.finished_us.get(job)


@dataclass(slots=True)
class Link:
    """Several lanes that share bandwidth, simulated up to `reached_us`."""

    reached_us: float = 0.0
    queues: dict[int, deque[Head]] = field(default_factory=lambda: defaultdict(deque))

    def advance(self, to_us: float, lanes: LaneQueues) -> None:
        while self.reached_us < to_us and self.next_event(to_us, lanes):
            pass
        self.reached_us = max(self.reached_us, to_us)

    def next_event(self, limit_us: float, lanes: LaneQueues) -> bool:
        """Until the first head ends its launch or itself, or until `limit_us`; False if nothing is
        under way."""
        reached_us, first_us = self.reached_us, NEVER
        under_way: list[deque[Head]] = []
        sharing = 0
        for queue in self.queues.values():
            if not queue:
                continue
            head = queue[0]
            # What it follows may be under way on this link: then nobody knows when it starts.
            start_us = 0.0 if head.after < 0 else lanes.finished_us.get(head.after, NEVER)
            if start_us > reached_us:
                first_us = min(first_us, start_us)
                continue
            under_way.append(queue)
            sharing += not head.launch_us
            if head.job not in lanes.started_us:
                lanes.started_us[head.job] = exact_us(reached_us)
        if not under_way and first_us == NEVER:
            return False
        step_us = min(limit_us, first_us) - reached_us
        for queue in under_way:
            step_us = min(step_us, queue[0].launch_us or queue[0].link_us * sharing)
        self.reached_us = reached_us = reached_us + step_us
        for queue in under_way:
            head = queue[0]
            if head.launch_us:
                ends = head.launch_us <= step_us
                head.launch_us = 0.0 if ends else head.launch_us - step_us
            else:
                ends = head.link_us * sharing <= step_us
                head.link_us = 0.0 if ends else head.link_us - step_us / sharing
            if not head.launch_us and not head.link_us:
                lanes.finished_us[queue.popleft().job] = exact_us(reached_us)
        return True
