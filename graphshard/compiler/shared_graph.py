"""Who runs a compiled graph. Dynamo lets identical models share one; each has its own plan here.

In: a graph as it was compiled for the FSDP roots that called it first, and the inputs of each call.
True afterwards: every root that has called it is a tenant. It has the plan under its own names in
its record, emitted code that is exchanged for it alone (new plans, `profile`), and whatever
else the plan sets up. Nothing here keeps a model alive: Dynamo keeps the graph for as long as it
likes, and so does c10d's flight recorder, which holds the code objects of its last 2,000
collectives.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from graphshard.capture.root_state import CompiledPlan, RootState, handle_of
from graphshard.compiler.executable import Executable
from graphshard.compiler.instrument import OBSERVER
from graphshard.compiler.measured_costs import Posed
from graphshard.compiler.replan import Replanner
from graphshard.compiler.tuning import Tuned, tuned
from graphshard.fsdp2 import modules_of
from graphshard.fsdp2.describe import describe
from graphshard.graph.program import Program
from graphshard.options import Options
from graphshard.runtime.agree import check_call
from graphshard.runtime.ahead import follow_optimizers
from graphshard.runtime.ballot import Terms
from graphshard.runtime.body import Body
from graphshard.runtime.costs import join
from graphshard.runtime.live import (
    LiveGroup,
    Root,
    ballots_of,
    give_process_groups,
    lookup,
    roots_of,
)
from graphshard.schedule.measured import Measured
from graphshard.schedule.plan import Direction, GroupInfo, Plan, Reshard
from graphshard.schedule.same_graph import plan_for


@dataclass(slots=True, eq=False)
class Tenant:
    """Roots that call the graph together; mostly one.

    first: number of the group that their first call began with, so that of blocks that share a
    graph only one is counted. infos: their groups by number in the plan. compiled: what their
    records say of it.
    """

    running: Executable
    infos: tuple[GroupInfo, ...]
    first: int
    compiled: CompiledPlan
    replan: Tuned | None = None


@dataclass(slots=True, eq=False)
class Shared:
    """One compiled graph pair.

    generation: how often Dynamo had been reset when it was compiled. anchors: place of an anchor
    among the graph's inputs -> number of its group in the plan. infos: those groups of the first
    tenant, as described before planning. template: what each tenant begins with; never run.
    placed: the program before its plan was applied, if it may be planned again. posed: what its
    plan was made for, if costs that are measured stay for later launches.
    costs: what the plan was made with, for ranks that ask.
    """

    name: str
    generation: int
    options: Options
    announce: Callable[[CompiledPlan], None]
    anchors: Mapping[int, int]
    infos: tuple[GroupInfo, ...]
    template: Executable
    placed: Program | None
    posed: Posed | None
    reshard: Reshard
    costs: str
    _tenants: weakref.WeakKeyDictionary[Root, Tenant] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    _leads: tuple[int, ...] = ()

    def body(self, direction: Direction, live: LiveGroup | None) -> Body:
        """What runs now for a call to which `live` belongs."""
        tenant = None if live is None or live.root is None else self._tenants.get(live.root)
        return (self.template if tenant is None else tenant.running).bodies[direction]

    def begin(self, args: Sequence[Any]) -> None:
        """A call with these inputs is about to run."""
        lives = self._callers(args)
        tenant = self._tenants[_root(lives[0])]
        replan, observer = tenant.replan, OBSERVER.get()
        if replan is not None and (replan.comes_first or observer is None):
            if lives[0].number == tenant.first:
                replan.before_forward(partial(self.groups, args))
        elif observer is not None:
            if replan is not None:
                replan.pause()
            observer.before_forward(tenant.running)
        if self.options.verify != "off":
            every = self.options.verify == "every"
            groups = self.groups(args) if every else lives
            terms = self.options.terms_of_calls()
            _note(groups, tenant.compiled.plan, terms, checks=every)

    def groups(self, args: Sequence[Any]) -> list[LiveGroup]:
        """The groups of a call, by their number in the plan."""
        found = {number: lookup(args[place]) for place, number in self.anchors.items()}
        return [found[number] for number in sorted(found)]

    def let_in(self, groups: Sequence[LiveGroup]) -> CompiledPlan:
        """The roots of `groups` (by their number in the plan) run this graph from now on.

        On all ranks of theirs at the same call, whether a rank compiles the graph for them or has
        it: what is set up here with other ranks (process groups) is the same in both cases.
        """
        known = bool(self._leads)
        roots = [root for root in roots_of(groups) if root not in self._tenants]
        tenant = self._tenant(groups)
        for root in roots:
            self._tenants[root] = tenant
            root_state_of(root).add(self.name, tenant.compiled)
            if self.options.overlap_optimizer:
                follow_optimizers(root)
        give_process_groups(groups, tenant.compiled.plan)
        if known and self.options.verify != "off":
            terms = self.options.terms_of_calls()
            join(ballots_of(groups), tenant.compiled.plan, terms, self.costs)
        if self.placed is not None:
            adopt = partial(self._adopt, tenant, [weakref.ref(root) for root in roots])
            named = partial(plan_for, first=self.infos, own=tenant.infos)
            replanner = Replanner(
                tenant.running, self.placed, self.posed, self.reshard, named, adopt
            )
            tenant.replan = tuned(replanner, groups[0])
        self._leads = tuple(dict.fromkeys([*self._leads, *self._first_places(groups)]))
        return tenant.compiled

    def _callers(self, args: Sequence[Any]) -> list[LiveGroup]:
        """One group of each root of this call, the graph's first one first.

        Assumed, so that not every anchor is read in every call: a root that is new stands at one
        of `_leads`, the first places of all roots of all calls that brought a new one.
        """
        lives = [lookup(args[place]) for place in self._leads]
        if any(_root(live) not in self._tenants for live in lives):
            self.announce(self.let_in(self.groups(args)))
        return lives

    def _first_places(self, groups: Sequence[LiveGroup]) -> list[int]:
        """For each root the first of its anchors among the graph's inputs."""
        places: dict[Root, int] = {}
        for place, number in self.anchors.items():
            places.setdefault(_root(groups[number]), place)
        return list(places.values())

    def _tenant(self, groups: Sequence[LiveGroup]) -> Tenant:
        own, made = infos_of(groups), self.template
        running = Executable(
            made.program,
            plan_for(made.plan, self.infos, own),
            made.problem,
            {d: Body(b.call, b.exact_sums, b.overlaps) for d, b in made.bodies.items()},
            made.options,
            made.artifacts,
            asked=made.asked,
        )
        first = groups[next(iter(self.anchors.values()))]
        return Tenant(running, own, first.number, self._compiled(running))

    def _compiled(
        self, running: Executable, before: Plan | None = None, measured: Measured | None = None
    ) -> CompiledPlan:
        return CompiledPlan(
            running.plan, running.problem, before, measured, running, self.generation
        )

    def _adopt(
        self,
        tenant: Tenant,
        roots: Sequence[weakref.ref[Root]],
        before: Plan,
        measured: Measured | None,
    ) -> None:
        """`tenant` was measured, and runs another plan than `before`, or the same on."""
        tenant.compiled = self._compiled(tenant.running, before, measured)
        for root in roots:
            if (alive := root()) is not None:
                root_state_of(alive).add(self.name, tenant.compiled)
        self.announce(tenant.compiled)


def infos_of(groups: Sequence[LiveGroup]) -> tuple[GroupInfo, ...]:
    return tuple(describe(number, live.fsdp) for number, live in enumerate(groups))


def root_state_of(root: Root) -> RootState:
    handle = handle_of(modules_of(root.groups[0].fsdp.state)[0])
    assert handle is not None
    return handle.root_state


def _root(live: LiveGroup) -> Root:
    assert live.root is not None  # it is given when the model is prepared, before any graph
    return live.root


def _note(groups: Sequence[LiveGroup], plan: Plan, terms: Terms, *, checks: bool) -> None:
    """Note what runs now, for ranks that ask; with `checks` ask them all."""
    ballots = ballots_of(groups)
    for ballot in ballots:
        ballot.running, ballot.terms = plan, terms
    if checks:
        check_call(ballots, plan, tuple(dict.fromkeys(live.fqn for live in groups)))
