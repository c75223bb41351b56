"""Takes one captured graph through all stages: AOTAutograd, passes, plan, emitted code."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch._functorch.config
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.descriptors import (
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
    TangentAOTInput,
)
from torch._functorch.partitioners import default_partition
from torch._ops import HigherOrderOperator

from graphshard.capture.dynamo import ends_early, resets
from graphshard.capture.fallback import describe, warn_once
from graphshard.capture.repeated.expand import expanded
from graphshard.capture.repeated.trace import RepeatedBlock, traced_by_blocks
from graphshard.capture.root_state import CompiledPlan, RootState
from graphshard.codegen.emit import check_inputs
from graphshard.codegen.lowering import lowering_of
from graphshard.compiler.decide import PlannedPartition, plan_inference, plan_partition
from graphshard.compiler.executable import Executable, callables_of, stands_between
from graphshard.compiler.measured_costs import at_measured_costs, posed_by
from graphshard.compiler.partition import Found, find_groups, joint_graph_of
from graphshard.compiler.planning import (
    PlanningInputs,
    apply,
    plan_following,
)
from graphshard.compiler.planning_inputs import costs_of, may_tune, planning_inputs
from graphshard.compiler.shared_graph import Shared, root_state_of
from graphshard.errors import CaptureError
from graphshard.graph.program import Program, anchor_places, copied, output_node
from graphshard.options import Options
from graphshard.planner.separate_group import reductions_apart
from graphshard.runtime.agree import agree_on_plan
from graphshard.runtime.ballot import Ballot, whole_of
from graphshard.runtime.body import Body
from graphshard.runtime.calls import Calls
from graphshard.runtime.costs import lead_recompute
from graphshard.runtime.live import LiveGroup, ballots_of, roots_of
from graphshard.runtime.run import guarded
from graphshard.schedule.plan import Direction, Plan

logger = logging.getLogger(__name__)


class GraphCompiler:
    """One Dynamo graph on its way to compiled code. `found`: the live groups it uses."""

    def __init__(
        self,
        gm: fx.GraphModule,
        name: str,
        options: Options,
        announce: Callable[[CompiledPlan], None] = lambda compiled: None,
    ) -> None:
        """announce: is given each plan that begins to run."""
        self.name = name
        self._options = options
        self._announce = announce
        self._gm: fx.GraphModule | None = gm
        self.ends_early = ends_early(gm)
        self._program: Program | None = None
        self._calls: Calls | None = None
        self._shared: Shared | None = None
        self._first: CompiledPlan | None = None
        self._asked: set[Direction] = set()
        self._blocks: tuple[RepeatedBlock, ...] = ()
        self._lowering = lowering_of(options, trains=torch.is_grad_enabled())
        self.found = find_groups(gm)
        self._device = self.groups[0].fsdp.device if self.groups else torch.device("cpu")
        self._generation = resets()

    def compile(self, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """The callable that Dynamo runs in place of the graph.

        All passes run here; what they raise is raised here, before anything was executed.
        """
        backend = aot_autograd(
            fw_compiler=self._forward_entry,
            bw_compiler=self._backward_entry,
            inference_compiler=self._compile_inference,
            partition_fn=self._partition,
            decompositions=self._lowering.decompositions,
        )
        # A donated buffer forbids retain_graph, which eager FSDP2 allows.
        config = torch._functorch.config.patch(donated_buffer=False, enable_autograd_cache=False)
        captured = self._gm
        assert captured is not None

        def trace(gm: fx.GraphModule, blocks: tuple[RepeatedBlock, ...]) -> Callable[..., Any]:
            self._blocks = blocks
            return backend(gm, example_inputs)

        with config, self._lowering.tracing():
            compiled = traced_by_blocks(captured, self._lowering, trace)
        return self._called_by_dynamo(compiled)

    # -- the three places where AOTAutograd asks -------------------------------------------

    def _partition(
        self, joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Joint graph in; the two graphs that AOTAutograd goes on with out.

        The scheduled program is made from copies of them and waits for `_entry`.
        """
        joint = expanded(self._lowering.joint(joint), self._blocks)
        joint_graph = joint_graph_of(self.name, joint, inputs, num_fwd_outputs, self.found, kwargs)
        self._calls = Calls(_tangent_positions(joint, num_fwd_outputs), tuple(self.found.anchors))
        planning = planning_inputs(self.groups, self._options, self.ballots)
        settle = partial(lead_recompute, self.ballots)
        planned = plan_partition(joint_graph, planning, settle)
        self._schedule(planned, planning)
        assert planned.parts.backward is not None
        return planned.parts.forward, planned.parts.backward

    def _compile_inference(self, gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        planning = planning_inputs(self.groups, self._options, self.ballots)
        gm = expanded(self._lowering.joint(gm), self._blocks)
        self._schedule(plan_inference(self.name, gm, self.found, planning), planning)
        return self._forward_entry(gm, inputs)

    def _forward_entry(self, gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        assert self._program is not None
        assert self._program.forward is not None
        return self._entry(Direction.FORWARD, self._program.forward, gm, None)

    def _backward_entry(self, gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        assert self._program is not None
        assert self._program.backward is not None
        return self._entry(Direction.BACKWARD, self._program.backward, gm, self._calls)

    def _entry(
        self,
        direction: Direction,
        module: fx.GraphModule,
        given: fx.GraphModule,
        calls: Calls | None,
    ) -> Callable[..., Any]:
        check_inputs(module, given)
        self._asked.add(direction)
        assert self._shared is not None
        pick = partial(self._shared.body, direction)
        return guarded(pick, direction, self._device, anchor_places(module), calls)

    # -- parts -----------------------------------------------------------------------------

    def _schedule(self, planned: PlannedPartition, planning: PlanningInputs) -> None:
        """Agree on the plan, order the program by it, make code, and let the groups in."""
        tunes = may_tune(self._options, planning.machine)
        # Costs of this rank's disk: all take the lowest rank's plan, if they agree on one mesh.
        posed = posed_by(planned) if tunes and whole_of(self.ballots) else None
        if posed is not None:
            planned = at_measured_costs(planned, posed, planning.policy.reshard)
        placed, problem = planned.parts.placed, planned.problem
        plan = self._agreed(planned, planning)
        if plan.reduces_apart:
            problem = reductions_apart(problem)
        is_measured = self._options.replan_after or tunes
        spare = copied(placed) if is_measured and placed.backward is not None else None
        infos = self.found.infos
        self._program = program = apply(placed, plan)
        template = Executable(
            program,
            plan,
            problem,
            {},
            self._options,
            self._lowering.artifacts,
            asked=self._asked,
        )
        exact_sums = self._options.compute != "inductor"  # the same on all ranks
        # A budget is a hard limit, and a plan knows what its own graph holds.
        overlaps = self._options.memory_budget is None
        for direction, call in self._code(template).items():
            template.bodies[direction] = Body(call, exact_sums, overlaps)
        self._shared = Shared(
            name=self.name,
            generation=self._generation,
            options=self._options,
            announce=self._announce,
            anchors=dict(self.found.anchors),
            infos=infos,
            template=template,
            placed=spare,
            posed=posed,
            reshard=planning.policy.reshard,
            costs=costs_of(planning),
        )
        self._first = self._shared.let_in(self.groups)

    def _agreed(self, planned: PlannedPartition, planning: PlanningInputs) -> Plan:
        """What this rank runs in place of what it planned: see `agree_on_plan`."""
        if not self.ballots:
            return planned.plan
        placed, policy = planned.parts.placed, planning.policy
        follow = partial(
            plan_following,
            placed,
            planned.problem,
            policy.reshard,
            policy.budget_bytes,
            planned.plan,
        )
        agreed = agree_on_plan(
            self.ballots,
            planned.plan,
            self._options.terms_of_calls(),
            uses=self.uses,
            ends_early=self.ends_early,
            follow=follow,
        )
        if stands_between(agreed, planned.problem):
            return agreed
        return follow(agreed) or agreed

    def _code(self, running: Executable) -> dict[Direction, Callable[[list[Any]], Any]]:
        """What runs; if Inductor fails, say without a C++ compiler, the ops one by one."""
        modules = running.program.by_direction
        try:
            return callables_of(running, modules)
        except Exception as error:
            if running.artifacts is None or self._options.fallback == "error":
                raise
            running.artifacts = None
            warn_once(f"ops of {self.name} run one by one: Inductor failed: {describe(error)}")
            return callables_of(running, modules)

    def announce(self) -> None:
        """Tell what runs now."""
        assert self._first is not None
        self._announce(self._first)

    @property
    def groups(self) -> list[LiveGroup]:
        return self.found.groups

    @property
    def root_states(self) -> list[RootState]:
        """The FSDP roots that this graph belongs to."""
        return [root_state_of(root) for root in roots_of(self.groups)]

    @property
    def uses(self) -> list[str]:
        """FQNs of the groups, in the order in which the graph uses them."""
        return [live.fqn for live in self.groups]

    @property
    def is_eager(self) -> bool:
        """A group of the graph has gone to FSDP2 since it was traced."""
        handles = (
            handle
            for root_state in self.root_states
            for handle in root_state.handles
            if handle.eager
        )
        return any(live in self.groups for handle in handles for live in handle.lives)

    @property
    def ballots(self) -> list[Ballot]:
        """What the ranks of these roots agree on; none with `verify="off"`."""
        if self._options.verify == "off":
            return []
        return ballots_of(self.groups)

    def _called_by_dynamo(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """What Dynamo runs. From here on nothing of this compilation holds on to the model."""
        calls, shared = self._calls, self._shared
        assert shared is not None
        # AOTAutograd keeps this object until it has compiled the backward, and after.
        self._gm, self.found = None, Found([], {})

        known = _Callable(self._generation, shared, compiled)
        _forget_before(self._generation)
        _CALLABLES.add(known)

        def call(*args: Any) -> Any:
            graph, run = known.shared, known.run
            assert graph is not None, "Dynamo calls what it has forgotten"
            assert run is not None
            graph.begin(args)
            outputs = run(*args)
            if calls is not None:
                calls.begin(args, outputs)
            return outputs

        return call


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Callable:
    """What Dynamo calls; nothing after it was reset, although something may still hold the call.

    c10d's flight recorder does: it holds the code objects that issued its last 2,000 collectives,
    and with them what Dynamo put beside each of them. A backward that is still to come has its own
    way to its code.
    """

    generation: int
    shared: Shared | None
    run: Callable[..., Any] | None


_CALLABLES: weakref.WeakSet[_Callable] = weakref.WeakSet()


def _forget_before(generation: int) -> None:
    """Dynamo was reset before `generation`: it calls nothing that is older."""
    for known in tuple(_CALLABLES):
        if known.generation < generation:
            known.shared = known.run = None


def without_groups(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options
) -> Callable[..., Any]:
    """A graph with nothing of ours in it: as Inductor compiles it, or as it was captured.

    A higher-order op (activation checkpointing, say) is defined by AOTAutograd's treatment of
    it, random numbers included, so a graph with one goes through AOTAutograd.
    """
    whole = lowering_of(options, trains=torch.is_grad_enabled()).whole
    if whole is not None:
        return whole(gm, example_inputs)
    nodes = [n for m in gm.modules() if isinstance(m, fx.GraphModule) for n in m.graph.nodes]
    if not any(isinstance(n.target, HigherOrderOperator) for n in nodes):
        return gm.forward
    backend = aot_autograd(fw_compiler=_boxed, bw_compiler=_boxed, partition_fn=default_partition)
    return backend(gm, example_inputs)


def _boxed(gm: fx.GraphModule, inputs: Any) -> Callable[[list[Any]], Any]:
    def call(args: list[Any]) -> Any:
        return gm.forward(*args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _tangent_positions(joint: fx.GraphModule, num_fwd_outputs: int) -> tuple[int, ...]:
    """For each tangent of the joint graph, the place of its output among the forward outputs.

    Raises CaptureError if AOTAutograd describes a tangent of which no output is known.
    """
    output = output_node(joint.graph)
    flat = output.meta.get("desc", ())[:num_fwd_outputs]
    described = list(dict.fromkeys(map(_whole, flat)))
    positions = []
    for node in joint.graph.find_nodes(op="placeholder"):
        tangent = _whole(node.meta.get("desc"))
        if isinstance(tangent, TangentAOTInput):
            if tangent.output not in described:
                raise CaptureError("GS203", f"no output belongs to {node.name}: {tangent}")
            positions.append(described.index(tangent.output))
    return tuple(positions)


def _whole(described: Any) -> Any:
    """The input or output of which `described` may be a part (a DTensor's local tensor, say)."""
    while isinstance(described, (SubclassGetAttrAOTInput, SubclassGetAttrAOTOutput)):
        described = described.base
    return described
