"""The live side of a `fully_shard` group, and the one table that finds it from its anchor.

A compiled graph names a group only by its anchor, a scalar input whose value is the group's
number, so that identical blocks share one graph. `lookup` turns the anchor back into the group.
The table holds groups weakly: they live as long as the model that `fully_shard` was called on.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from graphshard.errors import RuntimeStateError
from graphshard.fsdp2 import FsdpGroup
from graphshard.fsdp2.node_group import node_process_group
from graphshard.fsdp2.separate_group import reduce_apart
from graphshard.fsdp2.wrapped import gather_for_training, when_resharded
from graphshard.runtime.ballot import Ballot
from graphshard.schedule.plan import Direction, Plan, StepKind

if TYPE_CHECKING:  # what other modules of the runtime keep with a group
    from torch.autograd.graph import Node

    from graphshard.runtime.ahead import Opening
    from graphshard.runtime.calls import PendingCall
    from graphshard.runtime.gather import Gather
    from graphshard.runtime.gather_buffers import GatherBuffer, GatherLayout
    from graphshard.runtime.graph_order import GraphOrder
    from graphshard.runtime.host_copies import HostCopy
    from graphshard.runtime.issued import Trail
    from graphshard.runtime.reduce import Packing

# Places of parameters, the dtypes of all of the group, over how many ranks.
LayoutKey: TypeAlias = tuple[tuple[int, ...], tuple[torch.dtype, ...], int]
Versions: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class KeptParams:
    """Gathered parameters that outlive their direction.

    buffers: where they stand, if they are whole.
    versions: of the shards that they were gathered from. parts, part_of: this rank's part of each,
    and the smaller group over which they are spread (an int `reshard_after_forward`, or the ranks
    of a node). to_check: no backward waits for them, or FSDP2 would have resharded them, so a
    forward that finds them asks whether they still hold (`graphshard.runtime.doubt`).
    """

    dtypes: tuple[torch.dtype, ...]
    versions: Versions
    buffers: tuple[GatherBuffer, ...] = ()
    parts: tuple[Tensor, ...] = ()
    part_of: dist.ProcessGroup | None = None
    to_check: bool = False

    def certain(self) -> KeptParams:
        return replace(self, to_check=False)


@dataclass(slots=True)
class Counters:
    """Collectives that this group really issued, since the model was prepared.

    An all-gather of several groups counts once, with the first of them.
    """

    all_gathers: int = 0
    reduce_scatters: int = 0
    all_reduces: int = 0
    forwards: int = 0


@dataclass(eq=False)
class Root:
    """The groups of one FSDP root. finishing: the engine run after which they are finished.

    ballots: what its ranks agree on, one per mesh. opening: what optimizers issue ahead,
    if the user asked for it. order: of its graphs. reduce_groups, node_groups: process groups that
    plans gave to reductions, and to the ranks of this node, by rank. to_host: reduced gradients on
    their way to the host, until backward ends.
    """

    groups: tuple[LiveGroup, ...]
    ballots: list[Ballot] = field(default_factory=list)
    finishing: int = -1
    opening: Opening | None = None
    order: GraphOrder | None = None
    reduce_groups: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    node_groups: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    to_host: list[HostCopy] = field(default_factory=list)

    def arrive_on_host(self) -> None:
        """The host may read all gradients that were to go there."""
        copies, self.to_host = self.to_host, []
        for copy in copies:
            copy.synchronize()

    def to_prefetch(self, live: LiveGroup, direction: Direction) -> list[LiveGroup]:
        """What the user's prefetch list of `live` names. Of one `fully_shard` call there is a group
        per mesh, in the order of their use."""
        step = 1 if direction is Direction.FORWARD else -1
        named = live.fsdp.prefetches(direction)
        return [one for s in named for one in self.groups[::step] if one.fsdp.state is s]


@dataclass(eq=False)
class LiveGroup:
    """One group at run time. Everything a user can change is read from `fsdp` when it is used.

    places: of all its parameters. kept: gathered parameters that outlive forward or backward.
    arrived: gradients of the engine run `arrived_in`, while another call of the group is still
    ahead of it; what a run left that failed is no other run's.
    layouts, buffers, packings: what gathers and reductions of this group make once
    (`runtime.gather_buffers`, `runtime.reduce`); sharding fixes it. A buffer is here while nobody
    uses it. own_buffers: of shards that compute reads where they are.
    dtypes: what was gathered last. prefetched: a gather (`graphshard.runtime.gather.Gather`) that
    `set_modules_to_*_prefetch` asked for and nobody has used yet. reduced_in: the last
    engine run (autograd graph task) in which this group's gradients came.
    trail: what its mesh issues (`graphshard.runtime.issued.Trail`), if ranks compare it.
    tuning: of the graphs that begin with it (`graphshard.compiler.tuning.Tuning`).
    calls: forward calls whose backward has not run (`graphshard.runtime.calls.PendingCall`).
    node_group: of the ranks of this node, once a plan has them hold the group after forward.
    """

    number: int
    fsdp: FsdpGroup
    fqn: str
    anchor: Tensor
    frozen_anchor: Tensor
    accumulate_node: Node
    orig_dtypes: tuple[torch.dtype, ...]
    places: tuple[int, ...]
    kept: KeptParams | None = None
    arrived: dict[int, Tensor] = field(default_factory=dict)
    arrived_in: int = -1
    calls: list[PendingCall] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)
    layouts: dict[LayoutKey, GatherLayout] = field(default_factory=dict)
    buffers: dict[GatherLayout, GatherBuffer] = field(default_factory=dict)
    own_buffers: dict[GatherLayout, GatherBuffer] = field(default_factory=dict)
    packings: dict[tuple[int, ...], Packing] = field(default_factory=dict)
    dtypes: tuple[torch.dtype, ...] = ()
    prefetched: Gather | None = None
    root: Root | None = None
    trail: Trail | None = None
    tuning: object = None
    node_group: dist.ProcessGroup | None = None
    reduced_in: int = -1

    @property
    def was_gathered(self) -> bool:
        """Some forward used the group, here or in FSDP2."""
        return self.counters.forwards > 0 or self.fsdp.was_gathered

    def shards(self) -> list[Tensor]:
        """This rank's padded data of every parameter, in registration order.

        Raises RuntimeStateError when a parameter changed its dtype after capture.
        """
        shards = self.fsdp.shards()
        dtypes = tuple([shard.dtype for shard in shards])
        if dtypes != self.orig_dtypes:
            rows = zip(self.fsdp.params, self.orig_dtypes, dtypes, strict=True)
            fqn, was, now = next((p.fqn, a, b) for p, a, b in rows if a != b)
            raise RuntimeStateError(
                "GS401",
                f"{fqn} was {was} when it was captured and is {now} now; "
                "convert the model before the first forward, or call torch._dynamo.reset()",
            )
        return shards

    def fresh(self, dtypes: tuple[torch.dtype, ...]) -> KeptParams | None:
        """What is still gathered, unless a shard was changed or replaced since."""
        kept = self.kept
        if kept is None or kept.dtypes != dtypes:
            return None
        return kept if kept.versions == self.fsdp.versions() else None

    def let_go(self) -> None:
        """Give back what is kept for a later forward or backward, or gathered for another graph."""
        self.kept = None
        if self.prefetched is not None and self.root is not None and self.root.order is not None:
            self.root.order.forget(self)

    def drop(self, *, limit_s: float | None = None) -> None:
        """Forget what an interrupted step left. Waits `limit_s` for a prefetch, 0: not at all.

        Raises what the prefetch raises, when everything is forgotten.
        """
        prefetched, self.prefetched = self.prefetched, None
        self.kept = None
        self.buffers.clear()
        self.arrived = {}
        if prefetched is not None and limit_s != 0:
            prefetched.drop(limit_s=limit_s)


_NUMBERS = itertools.count(1)
_LIVE: weakref.WeakValueDictionary[int, LiveGroup] = weakref.WeakValueDictionary()
# By the id of each anchor, which another tensor may have once the group is gone.
_ANCHORED: weakref.WeakValueDictionary[int, LiveGroup] = weakref.WeakValueDictionary()


def register(fsdp: FsdpGroup) -> LiveGroup:
    """A new live group with its own anchors. float32 holds its number exactly up to 2**24."""
    number = next(_NUMBERS)
    with torch.inference_mode(False), torch.enable_grad():
        anchor = torch.tensor(float(number), device="cpu", dtype=torch.float32, requires_grad=True)
        # The engine can say whether this node will run; that is how a backward knows whether
        # parameters' gradients were asked for (loss.backward()) or not (autograd.grad(loss, x)).
        gradient_edge = anchor.expand_as(anchor).grad_fn
        assert gradient_edge is not None
        node = gradient_edge.next_functions[0][0]
        assert node is not None
        frozen = anchor.detach().clone()
    live = LiveGroup(
        number=number,
        fsdp=fsdp,
        fqn=fsdp.fqn or "(root)",
        anchor=anchor,
        frozen_anchor=frozen,
        accumulate_node=node,
        orig_dtypes=tuple(shard.dtype for shard in fsdp.shards()),
        places=tuple(range(len(fsdp.params))),
        dtypes=tuple(p.wire_dtype for p in fsdp.params),
    )
    _LIVE[number] = _ANCHORED[id(anchor)] = _ANCHORED[id(frozen)] = live
    when_resharded(fsdp, live.let_go)
    gather_for_training(fsdp)
    return live


def lookup(anchor: Tensor) -> LiveGroup:
    """The group whose number `anchor` holds. Raises RuntimeStateError if it is gone."""
    live = _LIVE.get(int(anchor))
    if live is None:
        raise RuntimeStateError("GS402", f"no group has number {int(anchor)}: its model is gone")
    return live


def find(value: object) -> LiveGroup | None:
    """The group of which `value` is an anchor object, or None. No tensor's number is read: a user's
    may have none, being fake or infinite."""
    live = _ANCHORED.get(id(value))
    return (
        live if live is not None and (value is live.anchor or value is live.frozen_anchor) else None
    )


def roots_of(groups: Sequence[LiveGroup]) -> list[Root]:
    """The FSDP roots of `groups`, each once."""
    return list(dict.fromkeys(live.root for live in groups if live.root is not None))


def ballots_of(groups: Sequence[LiveGroup]) -> list[Ballot]:
    return [ballot for root in roots_of(groups) for ballot in root.ballots]


def give_process_groups(lives: Sequence[LiveGroup], plan: Plan) -> None:
    """Give `lives`, by their number in `plan`, the process groups that it needs beside FSDP2's. On
    all of their ranks alike."""
    on_node = {step.group for step in plan.forward.of_kind(StepKind.RELEASE) if step.on_node}
    for number, live in enumerate(lives):
        if live.root is None:
            continue
        if plan.reduces_apart:
            reduce_apart(live.fsdp, live.root.reduce_groups)
        if number in on_node and live.node_group is None:
            live.node_group = node_process_group(live.fsdp, live.root.node_groups)
