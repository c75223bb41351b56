"""Takes one captured graph through all stages: AOTAutograd, passes, plan, emitted code."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
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

from graphshard.capture.ports import CompiledPlan, Record, port_of
from graphshard.draft import Proposal, drafted, find_groups, propose, propose_inference
from graphshard.emit import check_inputs, code_of
from graphshard.errors import CaptureError
from graphshard.fallback import describe, warn_once
from graphshard.feedback import Feedback
from graphshard.fsdp2 import modules_of
from graphshard.ir import Program, copied, output_node
from graphshard.lowering import lowering_of
from graphshard.measured import Measured
from graphshard.options import Options
from graphshard.order import order_of
from graphshard.pieces.expand import expanded
from graphshard.pieces.trace import Piece, PieceError, tracing_pieces, with_pieces
from graphshard.pipeline import (
    Order,
    apply,
)
from graphshard.planner.apart import reductions_apart
from graphshard.planner.problem import Problem
from graphshard.runtime.agree import Ballot, check_call, settle
from graphshard.runtime.ahead import follow_optimizers
from graphshard.runtime.calls import Calls
from graphshard.runtime.live import LiveGroup, lookup, part_reductions
from graphshard.runtime.run import Body, guarded
from graphshard.step_plan import Direction, Plan
from graphshard.watch import OBSERVER, Running, executables

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
        self.plan: Plan | None = None
        self._gm = gm
        self._program: Program | None = None
        self._calls: Calls | None = None
        self._bodies: dict[Direction, Body] = {}
        self._feedback: Feedback | None = None
        self.running: Running | None = None
        self._pieces: tuple[Piece, ...] = ()
        self._lowering = lowering_of(options, trains=torch.is_grad_enabled())
        self.found = find_groups(gm)

    def compile(self, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """The callable that Dynamo runs in place of the graph.

        All passes run here; what they raise is raised here, before anything was executed.
        """
        backend = aot_autograd(
            fw_compiler=self._emit_forward,
            bw_compiler=self._emit_backward,
            inference_compiler=self._compile_inference,
            partition_fn=self._partition,
            decompositions=self._lowering.decompositions,
        )
        # A donated buffer forbids retain_graph, which eager FSDP2 allows.
        config = torch._functorch.config.patch(donated_buffer=False, enable_autograd_cache=False)
        gm, self._pieces = with_pieces(self._gm, self._lowering)
        with config, tracing_pieces(self._pieces):
            try:
                compiled = backend(gm, example_inputs)
            except PieceError as error:
                logger.debug("%s is traced whole: %s", self.name, error)
                self._pieces = ()
                compiled = backend(self._gm, example_inputs)
        return self._watching(compiled)

    # -- the three places where AOTAutograd asks -------------------------------------------

    def _partition(
        self, joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Joint graph in; the two graphs that AOTAutograd goes on with out.

        The scheduled program is made from copies of them and waits for `_emit_*`.
        """
        joint = expanded(self._lowering.joint(joint), self._pieces)
        draft = drafted(self.name, joint, inputs, num_fwd_outputs, self.found, kwargs)
        self._calls = Calls(_tangent_positions(joint, num_fwd_outputs), tuple(self.found.anchors))
        order = order_of(self.groups, self._options, self.ballots)
        proposal = propose(draft, order)
        self._schedule(proposal, order)
        assert proposal.parts.backward is not None
        return proposal.parts.forward, proposal.parts.backward

    def _compile_inference(self, gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        order = order_of(self.groups, self._options, self.ballots)
        gm = expanded(self._lowering.joint(gm), self._pieces)
        self._schedule(propose_inference(self.name, gm, self.found, order), order)
        return self._emit_forward(gm, inputs)

    def _emit_forward(self, gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        assert self._program is not None
        assert self._program.forward is not None
        return self._body(Direction.FORWARD, self._program.forward, gm, None)

    def _emit_backward(self, gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        assert self._program is not None
        assert self._program.backward is not None
        return self._body(Direction.BACKWARD, self._program.backward, gm, self._calls)

    def _body(
        self,
        direction: Direction,
        module: fx.GraphModule,
        given: fx.GraphModule,
        calls: Calls | None,
    ) -> Callable[..., Any]:
        check_inputs(module, given)
        assert self.running is not None
        self.running.asked.add(direction)
        return guarded(self._bodies[direction], direction, self.groups[0].fsdp.device, calls)

    # -- parts -----------------------------------------------------------------------------

    def _schedule(self, proposal: Proposal, order: Order) -> None:
        """Agree on the plan, and put the program in the plan's order."""
        placed, problem, plan = proposal.parts.placed, proposal.problem, proposal.plan
        if self.ballots:
            plan = settle(self.ballots, plan)
        if plan.reduces_apart:
            problem = reductions_apart(problem)
            part_reductions(self.groups)
        after = self._options.replan_after if placed.backward is not None else None
        spare = None if after is None else copied(placed)
        program = apply(placed, plan)
        self.running = Running(
            program,
            plan,
            problem,
            self._bodies,
            self.groups,
            self._options,
            self._lowering.artifacts,
        )
        exact_sums = self._options.compute != "inductor"  # the same on all ranks
        for direction, call in self._code(self.running).items():
            self._bodies[direction] = Body(call, exact_sums)
        self._adopt(program, plan, problem)
        if self._options.overlap_optimizer:
            for root in dict.fromkeys(live.root for live in self.groups if live.root is not None):
                follow_optimizers(root)
        if after is not None and spare is not None:
            assert self.running is not None
            self._feedback = Feedback(
                running=self.running,
                placed=spare,
                reshard=order.freedom.reshard,
                ballots=_ballots(self.groups),
                after=after,
                adopt=self._adopt_again,
            )

    def _code(self, running: Running) -> dict[Direction, Callable[[list[Any]], Any]]:
        """What runs; if Inductor fails, say without a C++ compiler, the ops one by one."""
        modules = running.program.by_direction
        try:
            return executables(running, modules)
        except Exception as error:
            if running.artifacts is None or self._options.fallback == "error":
                raise
            running.artifacts = None
            warn_once(f"ops of {self.name} run one by one: Inductor failed: {describe(error)}")
            return executables(running, modules)

    def _adopt(
        self,
        program: Program,
        plan: Plan,
        problem: Problem | None = None,
        measured: Measured | None = None,
    ) -> None:
        before = None if measured is None else self.plan
        self._program, self.plan = program, plan
        code = code_of(program.forward), code_of(program.backward)
        compiled = CompiledPlan(plan, *code, problem, before, measured, self.running)
        for record in self.records:
            record.plans[self.name] = compiled

    def announce(self) -> None:
        """Tell what runs now, unless the groups went to FSDP2."""
        found = (record.plans.get(self.name) for record in self.records)
        compiled = next((c for c in found if c is not None), None)
        if compiled is not None:
            self._announce(compiled)

    def _adopt_again(
        self, program: Program, plan: Plan, problem: Problem, measured: Measured
    ) -> None:
        self._adopt(program, plan, problem, measured)
        self.announce()

    @property
    def groups(self) -> list[LiveGroup]:
        return self.found.groups

    @property
    def records(self) -> list[Record]:
        """The FSDP roots that this graph belongs to."""
        ports = (port_of(modules_of(live.fsdp.state)[0]) for live in self.groups)
        return list(dict.fromkeys(p.record for p in ports if p is not None))

    @property
    def ballots(self) -> list[Ballot]:
        """What the ranks of these roots agree on; none with `verify="off"`."""
        if self._options.verify == "off":
            return []
        return _ballots(self.groups)

    def _watching(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        calls, anchors = self._calls, tuple(self.found.anchors)
        every, off = self._options.verify == "every", self._options.verify == "off"
        feedback, running = self._feedback, self.running

        def call(*args: Any) -> Any:
            if feedback is not None and not feedback.done:
                feedback.before_forward()
            elif (observer := OBSERVER.get()) is not None and running is not None:
                observer.before_forward(running)
            # Identical blocks share a graph, so the groups of this call are known by its inputs.
            if not off:
                groups = [lookup(args[i]) for i in (anchors if every else anchors[:1])]
                assert self.plan is not None
                _begin(groups, self.plan, checks=every)
            outputs = compiled(*args)
            if calls is not None:
                calls.begin(args, outputs)
            return outputs

        return call


def _ballots(groups: Sequence[LiveGroup]) -> list[Ballot]:
    roots = dict.fromkeys(live.root for live in groups if live.root is not None)
    return [ballot for root in roots for ballot in root.ballots]


def _begin(groups: Sequence[LiveGroup], plan: Plan, *, checks: bool) -> None:
    """Note what runs now, for ranks that ask; with `checks` ask them all."""
    ballots = _ballots(groups)
    for ballot in ballots:
        ballot.running = plan
    if checks:
        check_call(ballots, plan, tuple(dict.fromkeys(live.fqn for live in groups)))


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
