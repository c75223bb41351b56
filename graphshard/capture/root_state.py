"""What Dynamo may look at: one `CaptureHandle` per `fully_shard` call, plain Python on the module.

`prepare` attaches handles to every module of a root at once, so that a graph captured for one
block fits its identical siblings without a recompile.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn
from torch.utils._python_dispatch import _disable_current_modes as no_modes

from graphshard import fsdp2
from graphshard.capture.group_spec import GroupSpec, PathStep, lay_out, spec_of
from graphshard.capture.plain import modules_to_leave, run_plainly
from graphshard.fsdp2 import FsdpGroup, State
from graphshard.runtime.agree import mark
from graphshard.runtime.ballot import Ballot
from graphshard.runtime.calls import when_done
from graphshard.runtime.graph_order import GraphOrder
from graphshard.runtime.issued import follow
from graphshard.runtime.live import LiveGroup, Root, register, roots_of
from graphshard.runtime.roll import members_of, open_ballots
from graphshard.schedule.estimate import Rung
from graphshard.schedule.measured import Measured
from graphshard.schedule.plan import Plan

logger = logging.getLogger(__name__)

HANDLE = "_graphshard_handle"

# Weak: lets an exception in a compiled function find the models that it was calling.
_ROOT_STATES: weakref.WeakSet[RootState] = weakref.WeakSet()


@dataclass(eq=False)
class RootState:
    """What is known about one FSDP root: its groups, its compiled plans, its eager parts.

    reasons: group FQN -> why it always runs through eager FSDP2.
    outside: group FQN -> why it ran outside the graphs when last compiled.
    plain: what calls of modules run that Dynamo must not look into.
    traces: grows whenever Dynamo reaches one of the groups. interruptions: backward runs in which
    a recomputation ended early, and that have not ended well so far.
    """

    states: list[State]
    handles: list[CaptureHandle] = field(default_factory=list)
    plans: dict[str, CompiledPlan] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    outside: dict[str, str] = field(default_factory=dict)
    plain: dict[nn.Module, Callable[..., Any]] = field(default_factory=dict)
    traces: int = 0
    interruptions: set[int] = field(default_factory=set)

    @property
    def groups(self) -> list[LiveGroup]:
        return [live for handle in self.handles for live in handle.lives]

    @property
    def roots(self) -> list[Root]:
        return roots_of(self.groups)

    @property
    def ballots(self) -> list[Ballot]:
        return [ballot for root in self.roots for ballot in root.ballots]

    def is_unfinished(self) -> bool:
        return any(p.entered["top"] or fsdp2.is_mid_iteration(p.state) for p in self.handles)

    @property
    def is_interrupted(self) -> bool:
        """An exception in a recomputation ended the whole backward. Ask when no backward runs."""
        return bool(self.interruptions)

    def interrupt(self, task: int) -> None:
        """A recomputation of the engine run `task`, running now, ended by an exception."""
        if task not in self.interruptions:
            self.interruptions.add(task)
            when_done(partial(self.interruptions.discard, task))

    def add(self, name: str, compiled: CompiledPlan) -> None:
        """The graph `name` runs as `compiled` now. What was compiled before Dynamo was reset is
        gone, and its names are given anew."""
        stale = [n for n, old in self.plans.items() if old.generation != compiled.generation]
        for old_name in stale:
            del self.plans[old_name]
        self.plans[name] = compiled

    def leave_eager(self, fqn: str, reason: str) -> None:
        """Run the group `fqn` through FSDP2 from now on, and those that it was sharded with."""
        for handle in self.handles:
            if fqn in handle.fqns:
                handle.eager = True
                self.reasons |= dict.fromkeys(handle.fqns, reason)


@dataclass(frozen=True, slots=True)
class CompiledPlan:
    """A plan, what runs it, and what it was made from.

    problem: the `graphshard.planner.problem.Problem`, if costs were known. before, measured: the
    plan that ran before this one, and what it was measured at. running: the
    `graphshard.compiler.executable.Executable` that runs it. generation: how often Dynamo had been
    reset before. room: what larger budgets would give, if somebody asked
    (`Estimate.room`): one entry for all who hold this plan.
    """

    plan: Plan
    problem: object = None
    before: Plan | None = None
    measured: Measured | None = None
    running: object = None
    generation: int = 0
    room: list[Rung] = field(default_factory=list, compare=False)


class CaptureHandle:
    """Everything the traced hooks read, and the little they write, for one `fully_shard` call.

    lives: its groups, one per mesh. anchors: theirs, of trainable and of frozen parameters.
    entered: under "top" the call of the group that is being traced, as (spec, registered
    parameters that it replaced, the call around it); () outside a forward. Dynamo replays what
    traced code leaves there, so that an exception in between is noticed.
    eager: this group runs through FSDP2's own hooks. apart: its modules are compiled on their
    own, because the graph around them breaks.
    """

    def __init__(self, state: State, groups: Sequence[FsdpGroup], root_state: RootState) -> None:
        self.lives = tuple(map(register, groups))
        self.anchors = tuple((live.anchor, live.frozen_anchor) for live in self.lives)
        self.eager = False
        self.apart = False
        self.entered: dict[str, Any] = {"top": ()}
        self.homes: tuple[nn.Module, ...] = ()
        self.root_state = root_state
        self.state = state
        self._groups = groups
        self._links: tuple[PathStep, ...] = ()
        self._facts: object = None
        self._group_spec: GroupSpec | None = None

    def spec(self) -> GroupSpec | None:
        """What entering the groups means now; None leaves it to FSDP2's own hooks.

        Asked before every compiled call. What costs more than to compare is done after a change.
        """
        own = tuple([(group.trainable, group.has_all_reduce_hook) for group in self._groups])
        facts = (self.eager, fsdp2.mixed_precision(self.state), own)
        moved = [link for link in self._links if link.modules.get(link.key) is not link.module]
        if moved or facts != self._facts:
            layout = lay_out(fsdp2.modules_of(self.state), self._groups)
            self.homes, self._links, self._facts = layout.homes, layout.links, facts
            now = spec_of(self.state, self._groups, layout.places)
            self._group_spec = None if self.eager else now
        return self._group_spec

    @property
    def fqns(self) -> list[str]:
        return [live.fqn for live in self.lives]

    def leave(self, top: Any) -> None:
        """Undo what entered the group since `top` was its innermost call; () if there was none."""
        while self.entered["top"] and self.entered["top"] is not top:
            _, replaced, self.entered["top"] = self.entered["top"]
            for registered, name, param in replaced:
                registered[name] = param

    def restore(self, *, limit_s: float) -> None:
        """Undo an interrupted forward: sharded DTensors registered, nothing gathered.

        Raises what a prefetch raises that was waited for (`limit_s`), when all that is done.
        """
        self.entered["top"] = ()
        with ExitStack() as resharding:
            for live in self.lives:
                resharding.callback(live.fsdp.reshard)
                resharding.callback(live.drop, limit_s=limit_s)


def prepare(state: State) -> bool:
    """Attach handles to all modules of `state`'s root. False if FSDP2 itself refuses the model.

    Runs FSDP2's lazy initialisation first: it decides the root, names the parameters and
    validates. What it raises is left for FSDP2's own hook to raise, in eager mode.
    """
    try:
        fsdp2.lazy_init(state)
    except Exception as error:
        logger.debug("FSDP2 refuses the model: %s", error)
        return False
    first = fsdp2.modules_of(state)[0]
    if HANDLE not in first.__dict__:
        _attach(fsdp2.siblings(state))
    root_state: RootState = first.__dict__[HANDLE].root_state
    root_state.traces += 1
    mark(root_state.ballots, str(root_state.traces))
    return True


def _attach(states: list[State]) -> None:
    root_state = RootState(states)
    _ROOT_STATES.add(root_state)
    for state in states:
        groups = fsdp2.fsdp_groups(state)
        reasons = [fsdp2.unsupported(group) or _unread(group) for group in groups]
        handle = CaptureHandle(state, groups, root_state)
        root_state.handles.append(handle)
        for live, reason in zip(handle.lives, reasons, strict=True):
            if reason is not None and not handle.eager:
                root_state.leave_eager(live.fqn, reason)
        for module in fsdp2.modules_of(state):
            module.__dict__[HANDLE] = handle
    _leave_modules(root_state)
    ballots = open_ballots(members_of([live.fsdp for live in root_state.groups]))
    root = Root(tuple(root_state.groups), ballots)
    root.order = GraphOrder()
    for live in root_state.groups:
        live.root = root
    follow(root)


def _unread(group: FsdpGroup) -> str | None:
    """Why its all-gather extensions cannot be in a graph. None: they can, or there are none."""
    try:
        with no_modes():
            group.read_extensions()
    except Exception as error:  # whatever a user's extensions raise, eager FSDP2 raises, too
        return f"its all-gather extensions cannot be traced: {error}"
    return None


def _leave_modules(root_state: RootState) -> None:
    """Leave modules that Dynamo cannot capture, and their groups, to eager FSDP2."""
    root = next(s for s in root_state.states if fsdp2.is_root(s))
    home = fsdp2.modules_of(root)[0]
    for module, reason in modules_to_leave(home).items():
        root_state.plain[module] = run_plainly(module)
        handles = (handle_of(m) for m in ([home] if module is home else module.modules()))
        for handle in dict.fromkeys(p for p in handles if p is not None):
            handle.eager = True
            root_state.reasons = dict.fromkeys(handle.fqns, reason) | root_state.reasons


def handle_of(module: nn.Module) -> CaptureHandle | None:
    return module.__dict__.get(HANDLE)


def is_entered_as(spec: GroupSpec | None, module: nn.Module) -> bool:
    """Entering the module's group means what it meant when `spec` was traced."""
    handle = handle_of(module)
    return handle is not None and handle.spec() is spec


def root_states_under(model: nn.Module) -> list[RootState]:
    """Records of the FSDP roots in `model` (a module, or what torch.compile made of it)."""
    handles = (handle_of(m) for m in model.modules())
    return list(dict.fromkeys(p.root_state for p in handles if p is not None))


def unfinished_records() -> list[RootState]:
    """Records of roots that an exception left in the middle of a forward, captured or eager."""
    return [r for r in all_root_states() if r.is_unfinished()]


def all_root_states() -> list[RootState]:
    """Records of all FSDP roots that are alive in this process."""
    return list(_ROOT_STATES)
