"""A graph that tunes itself: planned again from its own first steps, and when steps change.

Without a calibrated profile, costs are a preset's, which knows neither this machine nor its
network. So a few steps are measured, and the plan is made again from them. A plan that promises
little is not taken, and one that measures slower than the one before it is given back. After that
nothing is measured but the time from one forward to the next; where that moves away and stays
away (another batch shape, a slower network), all of it is done again, more and more seldom.

All ranks do the same at the same forward: what they decide on is told (`Replanner.measured`), or
the lowest rank's, which the others read a window later, when it has mostly been said.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from statistics import median

import torch.distributed as dist

from graphshard.compiler.instrument import unwatch, watch
from graphshard.compiler.planning import WORTHWHILE
from graphshard.compiler.replan import Replanner, Version, leads
from graphshard.files.information import printable
from graphshard.planner.problem import Problem
from graphshard.planner.simulate import simulated_as
from graphshard.runtime.agree import lead_says
from graphshard.runtime.ballot import Ballot
from graphshard.runtime.claims import agreed_again, structure, uses_alike
from graphshard.runtime.company import whom_to_ask
from graphshard.runtime.live import LiveGroup, ballots_of
from graphshard.schedule.measured import Measured
from graphshard.schedule.plan import Plan

logger = logging.getLogger(__name__)

STEPS = 4  # of one measurement, and of one window of step times
SHARE = 0.25  # a step time that moved by this much is another one
# Windows that have to differ before the next measurement: a machine that is busy now and then does
# not make a job change its plan again and again.
PATIENCE = 2, 8, 32
# Windows by which no rank is ahead of another: all wait for gradients of the others before.
MOST_AHEAD = 64
NO_MESH = "no mesh of its groups has all the ranks of the others"


class Phase(Enum):
    """FIRST: before the first forward. MEASURED: what runs is. TRIED: a new plan is measured.
    SETTLED: nothing is."""

    FIRST = auto()
    MEASURED = auto()
    TRIED = auto()
    SETTLED = auto()


@dataclass(slots=True, eq=False)
class Drift:
    """Whether steps take as long as they did when the plan settled.

    window: how many step times make one median. usual_us: the first median. num_measured: how often
    steps were measured again because of this.
    """

    window: int
    usual_us: float | None = None
    num_measured: int = 0
    _num_moved: int = 0
    _last_s: float | None = None
    _periods_us: list[float] = field(default_factory=list)

    def begin(self) -> None:
        """A plan has settled: what its steps take is usual."""
        self.usual_us, self._num_moved = None, 0
        self.skip()

    def skip(self) -> None:
        """What goes on now is no usual step."""
        self._last_s = None
        self._periods_us.clear()

    def median_us(self, now_s: float) -> float | None:
        """A forward begins; the median of a window that ends with it."""
        if self._last_s is not None:
            self._periods_us.append((now_s - self._last_s) * 1e6)
        self._last_s = now_s
        if len(self._periods_us) < self.window:
            return None
        found = median(self._periods_us)
        self._periods_us.clear()
        return found

    def is_over(self, median_us: float) -> bool:
        """The next median is this. True if steps have to be measured again."""
        if self.usual_us is None:
            self.usual_us = median_us
        away = abs(median_us - self.usual_us) > SHARE * self.usual_us
        self._num_moved = self._num_moved + 1 if away else 0
        if self._num_moved < PATIENCE[min(self.num_measured, len(PATIENCE) - 1)]:
            return False
        self.num_measured += 1
        return True


@dataclass(slots=True, eq=False)
class Tuning:
    """All graphs that begin with one group. window: forwards of one measurement. after: with
    `replan_after` the plan is made again once, after that forward, and nothing is tried.

    Ranks may run different graphs at the same forward (batches of different lengths, say), so what
    is counted is the forwards of any of these graphs: assumed is that these are equally many on all
    ranks, as FSDP2 needs it, too. A plan is made again if all ranks have run it when it is due, and
    all graphs of its structure change over together.
    """

    window: int
    after: int | None = None
    phase: Phase = Phase.FIRST
    drift: Drift = field(init=False)
    graphs: weakref.WeakSet[Replanner] = field(default_factory=weakref.WeakSet)
    _forwards: int = 0
    _since: int = 0
    _watched: list[Replanner] = field(default_factory=list)
    _trial: _Trial | None = None
    _before: str = ""
    _said: deque[str] = field(default_factory=lambda: deque(maxlen=MOST_AHEAD))

    def __post_init__(self) -> None:
        self.drift = Drift(self.window)

    def before_forward(self, own: Replanner, groups: Callable[[], Sequence[LiveGroup]]) -> None:
        """Called before every forward of `groups`, which runs the graph of `own`."""
        self._forwards += 1
        if self.phase is Phase.SETTLED:
            if self.after is None and self._has_drifted(groups):
                self._begin(Phase.MEASURED)
        elif self.phase is Phase.FIRST:
            self._begin(Phase.MEASURED)
        elif self._is_due:
            self._judge(own, groups())
        if self.phase is not Phase.SETTLED:
            self._watch(own)

    def pause(self) -> None:
        """Called before a forward that the user measures: what runs stays, and is measured anew
        afterwards."""
        self._unwatch()
        self._since = self._forwards
        self.drift.skip()

    @property
    def _is_due(self) -> bool:
        if self.after is not None:
            return self._forwards > self.after
        return self._forwards - self._since > self.window

    def _begin(self, phase: Phase) -> None:
        """The forward after this one is the first that counts."""
        self.phase, self._since = phase, self._forwards

    def _watch(self, own: Replanner) -> None:
        if own.running.is_complete and not own.running.segments:
            watch(own.running)
            self._watched.append(own)

    def _unwatch(self) -> None:
        for one in self._watched:
            unwatch(one.running)
        self._watched.clear()

    def _settle(self) -> None:
        self._unwatch()
        self.phase, self._trial, self._before = Phase.SETTLED, None, ""
        self.drift.begin()

    def _judge(self, own: Replanner, groups: Sequence[LiveGroup]) -> None:
        """A measurement is over: take another plan, keep the one that runs, or go back."""
        ballots, trial = whom_to_ask(ballots_of(groups)), self._trial
        if ballots is None:
            logger.warning("%s: not planned again: %s", own.running.plan.name, NO_MESH)
            self._settle()
            return
        measuring = own if trial is None else trial.graph
        most = self.window if self.after is None else None
        measured = measuring.measured(groups[0], ballots, most)
        if trial is not None:
            self._compare(trial, groups, ballots, measured)
        elif measured is not None:
            self._try_another(own, groups, ballots, measured)
        else:
            self._settle()

    def _try_another(
        self,
        own: Replanner,
        groups: Sequence[LiveGroup],
        ballots: Sequence[Ballot],
        measured: Measured,
    ) -> None:
        now = own.version
        takes = partial(_is_worth, now.plan) if self.after is None else _any
        version = own.planned(measured, groups[0], ballots, takes)
        self._unwatch()
        self._change(own, version or now, groups, measured)
        if version is None or self.after is not None:
            self._settle()
        else:
            self._trial = _Trial(own, now, measured)
            self._begin(Phase.TRIED)

    def _compare(
        self,
        trial: _Trial,
        groups: Sequence[LiveGroup],
        ballots: Sequence[Ballot],
        measured: Measured | None,
    ) -> None:
        """measured: None if the graph did not run on all ranks meanwhile."""
        was, name = trial.measured, trial.graph.running.plan.name
        stays = measured is not None and measured.step_time_us <= was.step_time_us
        if dist.get_rank() == 0:
            took = [f"{m.step_time_us / 1e3:.1f} ms a step" for m in (was, measured) if m]
            what = "stays" if stays else "is given back"
            logger.info("%s: another plan %s: %s", name, what, ", then ".join(took))
        self._unwatch()
        if not stays:
            self._change(trial.graph, trial.before, groups, was, trial.before.plan)
        else:
            trial.graph.adopt(trial.graph.running.plan, measured)
            if leads(ballots):
                trial.graph.remember()
        self._settle()

    def _change(
        self,
        own: Replanner,
        version: Version,
        groups: Sequence[LiveGroup],
        measured: Measured,
        of: Plan | None = None,
    ) -> None:
        """`own` runs `version` now, and all graphs of its structure its plan, also those that a
        rank compiles from now on, and graphs of other ops issue the same: at any forward others may
        run any of them."""
        shape, is_new = structure(own.running.plan), version.plan != own.running.plan
        own.change_to(version, groups, measured, of)
        if not is_new:
            return
        for graph in self.graphs:
            if graph is not own and structure(graph.running.plan) == shape:
                graph.follow(version.plan, groups)
            elif graph is not own and uses_alike(graph.running.plan, version.plan):
                graph.follow_order(version.plan, groups)
        agreed_again(ballots_of(groups), version.plan)

    def _has_drifted(self, groups: Callable[[], Sequence[LiveGroup]]) -> bool:
        own_us = self.drift.median_us(time.perf_counter())
        if own_us is None:
            return False
        found = groups()
        ballots = whom_to_ask(ballots_of(found))
        if ballots is None:
            return False
        forwards = found[0].counters.forwards
        key = f"step time until forward {forwards} of {printable(found[0].fqn)}"
        lead_us = own_us if not ballots else self._lead_us(ballots[0], key, own_us)
        return lead_us is not None and self.drift.is_over(lead_us)

    def _lead_us(self, ballot: Ballot, key: str, own_us: float) -> float | None:
        """The lowest rank's median of the window before; None for the first since it settled."""
        before, self._before = self._before, key
        old = self._said[0] if len(self._said) == MOST_AHEAD else ""
        self._said.append(key)
        found = lead_says(ballot, key, str(own_us), before=before, old=old)
        return None if found is None else float(found)


@dataclass(frozen=True, slots=True, eq=False)
class _Trial:
    """A graph that runs another plan; what ran before, and what that was measured at."""

    graph: Replanner
    before: Version
    measured: Measured


@dataclass(frozen=True, slots=True, eq=False)
class Tuned:
    """One graph of a tuning."""

    tuning: Tuning
    graph: Replanner

    @property
    def comes_first(self) -> bool:
        """Who measures besides has to wait: the user has said when to plan again."""
        return self.tuning.after is not None and self.tuning.phase is not Phase.SETTLED

    def pause(self) -> None:
        self.tuning.pause()

    def before_forward(self, groups: Callable[[], Sequence[LiveGroup]]) -> None:
        self.tuning.before_forward(self.graph, groups)


def tuned(graph: Replanner, lead: LiveGroup) -> Tuned:
    """lead: the group that the graph begins with."""
    options = graph.running.options
    if lead.tuning is None:
        lead.tuning = Tuning(STEPS * options.micro_steps, options.replan_after)
    assert isinstance(lead.tuning, Tuning)
    lead.tuning.graphs.add(graph)
    return Tuned(lead.tuning, graph)


def _any(plan: Plan, problem: Problem) -> bool:
    return True


def _is_worth(now: Plan, plan: Plan, problem: Problem) -> bool:
    """`plan` promises enough, at the costs of `problem`, to be tried in the place of `now`."""
    usual_us = simulated_as(problem, now).step_us
    return plan.estimate.ours.step_time_us <= (1 - WORTHWHILE) * usual_us
