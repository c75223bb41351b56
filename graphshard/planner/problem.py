"""What the planner plans: regions, groups, lanes and settings, all as plain numbers.

In come costs (microseconds) and sizes (bytes) from whoever knows them; nothing here measures or
imports torch. A problem is a value: equal problems get equal plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from graphshard.planner.activations import HostLink, Offload, OffloadOption, Recompute
from graphshard.schedule.plan import Allocation as Allocation
from graphshard.schedule.plan import Category as Category
from graphshard.schedule.plan import Direction, OptimizerStep, Step, StepKind

# Times are rounded to multiples of this (about 1 ns). Sums of such numbers below 2**43 us are
# exact in float64, so equal schedules have equal times and gains add up without a remainder.
TICK_US = 2.0**-10


@dataclass(frozen=True, slots=True)
class Region:
    """Compute that nothing interrupts: `num_ops` ops that take `us`.

    activation_bytes: activations alive in it, its own outputs included, before any `Recompute`.
    temporary_bytes: what it needs on top of that while it runs. idle_bytes: activations that are
    not there when it needs most. absent: nor are these gradients, although they are counted.
    """

    us: float
    activation_bytes: int = 0
    temporary_bytes: int = 0
    num_ops: int = 1
    idle_bytes: int = 0
    absent: tuple[Allocation, ...] = ()


@dataclass(frozen=True, slots=True)
class CollectiveLane:
    """One in-order queue of collectives: a process group's communicator.

    launch_us: what one collective costs whatever its size (alpha of the alpha-beta model); two
    merged collectives cost this much less than both alone, a split one that much more. No
    collective of the lane takes less.
    link: lanes that name the same one share its bandwidth (`graphshard.planner.links`); "": none.
    issue_us, wait_us: of compute, for each collective beside its copies, where the thread that
    computes issues it and waits for it (a CPU).
    """

    name: str
    launch_us: float = 0.0
    link: str = ""
    issue_us: float = 0.0
    wait_us: float = 0.0


@dataclass(frozen=True, slots=True)
class Transfer:
    """One collective: `us` on its lane, launch included; copies before and after on compute.

    in_place: it goes from and to where its tensors are, and only FSDP2 makes the copies.
    """

    us: float
    pack_us: float = 0.0
    unpack_us: float = 0.0
    in_place: bool = False

    @property
    def before_us(self) -> float:
        """On compute, before it is sent."""
        return 0.0 if self.in_place else self.pack_us

    @property
    def after_us(self) -> float:
        """On compute, when it has arrived."""
        return 0.0 if self.in_place else self.unpack_us


@dataclass(frozen=True, slots=True)
class Use:
    """Regions `first` to `last` (inclusive) read the gathered parameters; None: never released."""

    first: int
    last: int | None


@dataclass(frozen=True, slots=True)
class Gradient:
    """Unsharded gradients: alive from backward region `first`, complete after region `ready`.

    Both are -1 for a gradient that backward is given. input_bytes and output_bytes are the two
    buffers of the reduction; the output becomes `.grad`. all_reduce: of the output, over the
    replicas of HSDP; staged_bytes: in the device's memory until it is done, where the output goes
    elsewhere (to the host).
    """

    first: int
    ready: int
    bytes: int
    reduce: Transfer
    input_bytes: int
    output_bytes: int
    all_reduce: Transfer | None = None
    staged_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """Parameters that may travel in a collective of their own; most groups have one part.

    params: their places in the group, in rising order; needed only where a group has several parts.
    made_bytes: held beside what is gathered, of what all-gather extensions make of that.
    regather: the gather in backward where it differs (an int `reshard_after_forward`).
    node_gather: that of what the ranks of a node hold, if the plan may have them do so.
    """

    gathered_bytes: int
    gather: Transfer
    forward: Use | None = None
    backward: Use | None = None
    gradient: Gradient | None = None
    regather: Transfer | None = None
    node_gather: Transfer | None = None
    params: tuple[int, ...] = ()
    made_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PostForwardMesh:
    """As of an int `reshard_after_forward`: between forward and backward `held_bytes` stay, spread
    over a smaller group of ranks that gathers on `lane`."""

    held_bytes: int
    lane: int


@dataclass(frozen=True, slots=True)
class Group:
    """One `fully_shard` group. `id` is its place in Problem.groups; lanes index Problem.lanes.

    reshard: what the user set (bound), or None: the planner decides. is_root: FSDP2 keeps it from
    forward to backward where nothing is set. keep_across: the user's `reshard_after_backward`
    (False means True here), None: the planner decides. post_forward: the mesh of an int
    `reshard_after_forward`. node: that of the ranks of a node, for the planner to use or not.
    forward_prefetch, backward_prefetch: groups that the user named to be gathered ahead of it.
    all_reduce_lane: over the replicas of HSDP; such a group is reduced whole and alone.
    """

    id: int
    fqn: str
    parts: tuple[Part, ...]
    gather_lane: int
    reduce_lane: int
    world_size: int = 2
    reshard: bool | None = None
    is_root: bool = False
    keep_across: bool | None = None
    post_forward: PostForwardMesh | None = None
    node: PostForwardMesh | None = None
    forward_prefetch: tuple[int, ...] = ()
    backward_prefetch: tuple[int, ...] = ()
    all_reduce_lane: int | None = None

    @property
    def gathered_bytes(self) -> int:
        return sum(p.gathered_bytes for p in self.parts)

    @property
    def room_bytes(self) -> int:
        """What it takes in memory while it is gathered."""
        return sum(self.room_of(part) for part in self.parts)

    def room_of(self, part: Part) -> int:
        """Nothing where one rank reads its shards in place."""
        in_place = self.world_size == 1 and part.gather.in_place
        return 0 if in_place else part.gathered_bytes + part.made_bytes

    def smaller_mesh(self, *, on_node: bool) -> PostForwardMesh | None:
        """Where it stays sharded between forward and backward; on_node: the plan says so."""
        return self.node if on_node else self.post_forward

    @property
    def kept_by_fsdp2(self) -> bool:
        """Gathered from forward to backward in FSDP2."""
        return self.is_root if self.reshard is None else not self.reshard

    def lane_in(self, direction: Direction, *, on_node: bool = False) -> int:
        """Where it is gathered. on_node: from what the ranks of the node hold."""
        smaller = self.smaller_mesh(on_node=on_node) if direction is Direction.BACKWARD else None
        return self.gather_lane if smaller is None else smaller.lane

    def lane_of(self, issue: Step, direction: Direction) -> int:
        """Where the collective of an issuing step runs."""
        if issue.kind is StepKind.REDUCE_ISSUE:
            return self.reduce_lane
        if issue.kind is StepKind.ALL_REDUCE_ISSUE:
            assert self.all_reduce_lane is not None
            return self.all_reduce_lane
        return self.lane_in(direction, on_node=issue.on_node)

    def use_in(self, direction: Direction) -> Use | None:
        """From the first use of any part to the last."""
        uses = [u for p in self.parts if (u := use_of(p, direction)) is not None]
        if not uses:
            return None
        lasts = [u.last for u in uses if u.last is not None]
        return Use(min(u.first for u in uses), max(lasts) if len(lasts) == len(uses) else None)

    def prefetch_in(self, direction: Direction) -> tuple[int, ...]:
        forward = direction is Direction.FORWARD
        return self.forward_prefetch if forward else self.backward_prefetch


@dataclass(frozen=True, slots=True)
class Problem:
    """One training step of one graph pair; no `backward` regions under no_grad.

    resident: bytes that are there throughout (shards, optimizer state, existing gradients).
    micro_steps: forward and backward runs per optimizer step. sync_each: every one of them
    reduces; otherwise the last one does, and unsharded gradients stay until then.
    has_gradients: `.grad` exists already, so that a reduction adds to it.
    regroup_reductions: reductions too may be merged and split; split_reductions: only split. Both
    can change the last bit of a sum over more than two ranks.
    most_ahead: at most so many gathers in flight; None: as many as memory allows.
    budget_bytes: hard limit on the peak; None: FSDP2's own peak.
    near: the search may stop at a step that is longer than the lower bound by this share of it.
    thrift: memory that together makes the step shorter by less than this share is not taken.
    early_waits: gradients are used as soon as they are there, so that reductions are waited for
    when they are done, where that costs next to nothing.
    keeps_reduce_order: reductions go in the order in which their gradients are complete, whatever
    the costs: something outside of the ranks that agree on the plan follows that order.
    may_reduce_apart: reductions may get lanes of their own (`graphshard.planner.separate_group`);
    reduces_apart: they have.
    clones: the backend has a copy of what travels, from issue to wait.
    offloads: what the graph copies to the host and back. offload_options: what it could, too.
    host: over which lanes; None: there is neither.
    optimizer: what follows the step, whatever the schedule.
    """

    groups: tuple[Group, ...]
    lanes: tuple[CollectiveLane, ...]
    forward: tuple[Region, ...]
    backward: tuple[Region, ...] = ()
    resident: tuple[Allocation, ...] = ()
    recompute: tuple[Recompute, ...] = ()
    offloads: tuple[Offload, ...] = ()
    offload_options: tuple[OffloadOption, ...] = ()
    host: HostLink | None = None
    optimizer: OptimizerStep | None = None
    micro_steps: int = 1
    sync_each: bool = True
    has_gradients: bool = False
    regroup_gathers: bool = True
    regroup_reductions: bool = False
    split_reductions: bool = False
    most_ahead: int | None = None
    budget_bytes: int | None = None
    near: float = 0.0
    thrift: float = 0.0
    early_waits: bool = False
    keeps_reduce_order: bool = False
    may_reduce_apart: bool = False
    reduces_apart: bool = False
    clones: bool = False

    @property
    def directions(self) -> tuple[Direction, ...]:
        both = (Direction.FORWARD, Direction.BACKWARD)
        return both if self.backward else both[:1]

    def regions(self, direction: Direction) -> tuple[Region, ...]:
        return self.forward if direction is Direction.FORWARD else self.backward


def use_of(part: Part, direction: Direction) -> Use | None:
    return part.forward if direction is Direction.FORWARD else part.backward


def gather_of(part: Part, direction: Direction, *, on_node: bool = False) -> Transfer:
    """on_node: from what the ranks of the node hold, in backward."""
    if direction is Direction.FORWARD:
        return part.gather
    other = part.node_gather if on_node else part.regather
    return part.gather if other is None else other


def transfers_of(group: Group, part: Part) -> Iterator[tuple[int, Transfer]]:
    """Every collective that may carry `part`, with its lane."""
    yield group.gather_lane, part.gather
    for on_node in (False, True) if group.node is not None else (False,):
        yield (
            group.lane_in(Direction.BACKWARD, on_node=on_node),
            gather_of(part, Direction.BACKWARD, on_node=on_node),
        )
    if part.gradient is not None:
        yield group.reduce_lane, part.gradient.reduce
        if part.gradient.all_reduce is not None and group.all_reduce_lane is not None:
            yield group.all_reduce_lane, part.gradient.all_reduce


def exact_us(us: float) -> float:
    """`us` rounded to a multiple of TICK_US."""
    return round(us / TICK_US) * TICK_US


def with_transfers(part: Part, changed: Callable[[Transfer], Transfer]) -> Part:
    """`part` with `changed` done to each of its collectives."""
    gradient, regather, node_gather = part.gradient, part.regather, part.node_gather
    return replace(
        part,
        gather=changed(part.gather),
        regather=regather and changed(regather),
        node_gather=node_gather and changed(node_gather),
        gradient=gradient
        and replace(
            gradient,
            reduce=changed(gradient.reduce),
            all_reduce=gradient.all_reduce and changed(gradient.all_reduce),
        ),
    )
