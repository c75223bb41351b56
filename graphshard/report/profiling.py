"""`graphshard.profile`: a few steps of a running model are measured, region by region.

In goes a model in training; at the end its plans have `plan.measured`, the same on all ranks, and
what runs is the unmarked code of before. Nothing is planned again.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from torch import nn

from graphshard.capture.root_state import CompiledPlan, RootState, root_states_under
from graphshard.compiler.executable import Executable, Segments
from graphshard.compiler.instrument import (
    OBSERVER,
    Runs,
    combined,
    num_samples,
    samples_of,
    unwatch,
    watch,
)
from graphshard.errors import MeasureError
from graphshard.report.announce import announce
from graphshard.runtime.agree import told
from graphshard.schedule import measured as times
from graphshard.schedule.measured import Measured

logger = logging.getLogger(__name__)


@contextmanager
def profile(model: nn.Module, steps: int = 5) -> Iterator[None]:
    """Measure the first `steps` steps that `model` runs inside, each graph by itself.

        with graphshard.profile(model):
            for batch in batches:
                train_step(batch)
        print(graphshard.measurements(model)[0])

    A step is a forward with its backward; of blocks that share a graph, each call is one. All ranks
    enter, run the same steps and leave; then they exchange their times, and
    `graphshard.plans(model)` have `measured`. A graph that is compiled inside is measured from its
    second step on; one that `replan_after` is still measuring, afterwards. What tunes itself waits
    meanwhile. An exception that leaves the block leaves the plans as they were.

    Raises MeasureError: GS801 if no graph ran a whole step, GS802 for `steps` below 1 or inside
    another profile; DivergedRanks (GS704) if a rank does not come.
    """
    if steps < 1:
        raise MeasureError("GS802", f"profile: steps={steps}; give a number from 1 on")
    if OBSERVER.get() is not None:
        raise MeasureError("GS802", "profile: another profile is measuring already")
    session = _Session(model, steps)
    token = OBSERVER.set(session)
    try:
        yield
    except BaseException:
        session.stop()
        raise
    finally:
        OBSERVER.reset(token)
    session.stop()
    _attach(root_states_under(model), session.taken)


@dataclass(frozen=True, slots=True)
class _Taken:
    """What one graph left on this rank."""

    running: Executable
    segments: Segments
    runs: Runs

    @property
    def identity(self) -> str:
        """Equal on ranks that timed the same steps."""
        return hashlib.sha256(repr(self.segments).encode()).hexdigest()


@dataclass(slots=True, eq=False)
class _Session:
    """One `with` block: what it watches now, what it passes by, and what it has taken, by name."""

    model: nn.Module
    steps: int
    watched: list[Executable] = field(default_factory=list)
    others: list[Executable] = field(default_factory=list)
    taken: dict[str, _Taken] = field(default_factory=dict)

    def before_forward(self, running: Executable) -> None:
        if running in self.others:
            return
        if running in self.watched:
            if num_samples(running) >= self.steps:
                self._take(running)
        elif running.is_complete:
            mine = _plan_of(root_states_under(self.model), running) is not None
            if mine:
                watch(running)
            (self.watched if mine else self.others).append(running)

    def stop(self) -> None:
        """Unmarked code everywhere."""
        for running in list(self.watched):
            self._take(running)

    def _take(self, running: Executable) -> None:
        runs = {d: own[: self.steps] for d, own in samples_of(running).items()}
        # Roots that share a graph share its name; all ranks take them in the same order.
        name = running.plan.name
        same = sum(one.running.plan.name == name for one in self.taken.values())
        key = f"{name} ({same + 1})" if same else name
        self.taken[key] = _Taken(running, dict(running.segments), runs)
        unwatch(running)
        self.watched.remove(running)
        self.others.append(running)


def _plan_of(root_states: Sequence[RootState], running: Executable) -> CompiledPlan | None:
    found = (compiled for root_state in root_states for compiled in root_state.plans.values())
    return next((c for c in found if c.running is running), None)


def _attach(root_states: Sequence[RootState], taken: Mapping[str, _Taken]) -> None:
    """Agree on what was measured and write it into the plans of `records`."""
    found = _agreed(root_states, taken)
    if not found:
        raise _nothing_ran(root_states)
    for name, measured in found.items():
        running = taken[name].running
        compiled = _plan_of(root_states, running)
        if compiled is None:
            continue  # went to eager FSDP2 meanwhile
        now = replace(compiled, plan=replace(compiled.plan, measured=measured))
        for root_state in root_states:
            for graph, known in root_state.plans.items():
                if known is compiled:
                    root_state.plans[graph] = now
        compiled = now
        announce(compiled)


def _nothing_ran(root_states: Sequence[RootState]) -> MeasureError:
    if any(root_state.plans for root_state in root_states):
        why = "the step in which a graph is compiled does not count"
    else:
        why = "it has no graph (yet): graphshard.explain(model) says why"
    text = "profile: no graph of this model ran a whole step inside, forward and backward; "
    return MeasureError("GS801", text + why)


def _agreed(root_states: Sequence[RootState], taken: Mapping[str, _Taken]) -> dict[str, Measured]:
    """By name of graph, of those that all ranks ran: the same on all of them."""
    ballots = list(
        dict.fromkeys(ballot for root_state in root_states for ballot in root_state.ballots)
    )
    number = max((ballot.profiles for ballot in ballots), default=0)
    for ballot in ballots:
        ballot.profiles = number + 1
    own = {name: [one.identity, times.to_json(one.runs)] for name, one in taken.items()}
    said = told(ballots, f"profile {number}", json.dumps(own))
    ranks: list[dict[str, list[str]]] = [json.loads(text) for text in said]
    found = {}
    for name, one in taken.items():
        if any(rank.get(name, [""])[0] != one.identity for rank in ranks):
            logger.warning("%s: not every rank ran it while it was profiled", name)
            continue
        runs = [times.from_json(rank[name][1]) for rank in ranks]
        measured = combined(one.running.problem, one.segments, runs)
        if measured is not None:
            found[name] = measured
    return found
