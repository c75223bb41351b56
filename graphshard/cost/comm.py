"""How long a collective takes.

In: the kind of collective, its group and its size, and the machine's network. Out: microseconds
from the moment the last rank arrives. `size_bytes` is always that of the whole: what an all-gather
yields, what a reduce-scatter takes in on each rank, what an all-reduce or broadcast moves.

The model is NCCL's own (src/graph/tuning.cc): a constant, a latency for each of the ring's steps,
and the ring's bytes over the bus bandwidth. What was measured on a group replaces it there, and
elsewhere sets its level: the formula then only says how time changes with the group.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from graphshard.cost.algebra import (
    Quantity,
    ceil_div,
    if_at_most,
    if_one,
    is_number,
    least,
    most,
)
from graphshard.cost.curve import Curve, Trust, curve_us, line, scaled


class CollectiveKind(StrEnum):
    """The collectives that FSDP2 and models issue."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    BROADCAST = "broadcast"


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The ranks of a process group, `ranks_per_node` of them (or fewer) on each node.

    name: of the mesh dimension or process group, by which measurements are found. All ranks of a
    group on one node, `Group(8, 8)`, is the intra-node case; one on each, `Group(8, 1)`, the
    inter-node case. node_stride: from one node of the group to its next one, counted in nodes of
    the job (1: neighbours; replicas of 4 nodes all-reduce over every fourth node).
    """

    ranks: Quantity
    ranks_per_node: Quantity
    name: str = ""
    node_stride: Quantity = 1

    @property
    def nodes(self) -> Quantity:
        return ceil_div(self.ranks, self.ranks_per_node)


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective among global ranks, which are numbered node by node."""

    kind: CollectiveKind
    ranks: tuple[int, ...]
    size_bytes: Quantity

    def group(self, ranks_per_node: int) -> RankGroup:
        nodes = Counter(rank // ranks_per_node for rank in self.ranks)
        apart = max((after - before for before, after in pairwise(sorted(nodes))), default=1)
        return RankGroup(len(self.ranks), max(nodes.values()), node_stride=apart)


@dataclass(frozen=True, slots=True)
class Protocol:
    """One way in which a library runs a ring. `rate` is its share of the bus bandwidth."""

    base_us: Quantity
    intra_hop_us: Quantity
    inter_hop_us: Quantity
    rate: Quantity


@dataclass(frozen=True, slots=True)
class SwitchLevel:
    """A level of switches between nodes: `nodes` of them are a pod, inside which all adapters may
    send at their rate at once; out of it they get 1 / `oversubscribed` of that together."""

    nodes: int
    oversubscribed: float


@dataclass(frozen=True, slots=True)
class Network:
    """Links of one rank: `intra` inside the node, `inter` its share of the node's adapters.

    protocols: the fastest one runs. traffic: bytes that a kind really moves over the ring's bytes,
    where a library does not use a ring (1 where a kind is missing). in_place: one collective may
    go from and to many tensors where they are, so that nothing has to be packed. concurrent: a
    second process group hides launches of the first, which take nothing from compute.
    clones: the library has a copy of all that is gathered or reduced, until that is done.
    levels: of switches that are oversubscribed, from small pods to large ones.
    """

    intra_bytes_per_us: Quantity
    inter_bytes_per_us: Quantity
    protocols: tuple[Protocol, ...]
    traffic: tuple[tuple[CollectiveKind, float], ...] = ()
    in_place: bool = False
    concurrent: bool = False
    clones: bool = False
    levels: tuple[SwitchLevel, ...] = ()


@dataclass(frozen=True, slots=True)
class MeasuredCurve:
    """A curve over the ring's bytes that was fitted to one kind on one group."""

    kind: CollectiveKind
    group: RankGroup
    curve: Curve
    trust: Trust = Trust.CALIBRATED


def wire_bytes(kind: CollectiveKind, ranks: Quantity, size_bytes: Quantity) -> Quantity:
    """Bytes that each rank sends in a ring of `ranks`.

    (N-1)/N of the size for an all-gather or reduce-scatter, twice that for an all-reduce, all of
    it for a broadcast (nccl-tests, doc/PERFORMANCE.md, "Bus bandwidth").
    """
    if kind is CollectiveKind.BROADCAST:
        return if_one(ranks, 0, size_bytes)
    return _rounds(kind) * (ranks - 1) * size_bytes / ranks


def ring_steps(kind: CollectiveKind, group: RankGroup) -> tuple[Quantity, Quantity]:
    """Steps of the ring inside nodes and between nodes, one after the other.

    N-1 in all, of which (nodes-1) between nodes; twice for an all-reduce (NCCL, tuning.cc,
    `nsteps` and `nInterSteps`). A broadcast's last rank is N-1 steps away.
    """
    inter = group.nodes - 1
    return _rounds(kind) * (group.ranks - 1 - inter), _rounds(kind) * inter


def bus_bytes_per_us(network: Network, group: RankGroup) -> Quantity:
    """Bus bandwidth of the group's rings.

    Inside a node it is the rank's link. Between nodes the group uses the adapters of all its
    ranks on a node, and its rings still pass the links inside (NCCL, src/graph: one ring per
    adapter).
    """
    per_node = least(group.ranks, group.ranks_per_node)
    adapters = network.inter_bytes_per_us * per_node
    for level in network.levels:
        adapters = least(adapters, network.inter_bytes_per_us * per_node / slowdown(level, group))
    between = least(network.intra_bytes_per_us, adapters)
    return if_one(group.nodes, network.intra_bytes_per_us, between)


def slowdown(level: SwitchLevel, group: RankGroup) -> Quantity:
    """How many times slower the rings of `group` and of those like it are for the pods of `level`.

    A ring sends from each node to the next one of its group. Of the nodes of a pod the last
    `node_stride` send out of it, all if there are no more; they share what the pod has. So rings of
    neighbours cross once and are hardly slowed down, those of replicas that are as large as a pod
    by all of `oversubscribed`. Assumed: nodes are numbered pod by pod, a group that fits into a pod
    lies in one, all ranks do the same at a time (one program), and paths out of a pod are used
    evenly.
    """
    leaving = least(group.node_stride, level.nodes)
    slower = most(1, level.oversubscribed * leaving / level.nodes)
    return if_at_most(group.nodes * group.node_stride, level.nodes, 1, slower)


def ring_us(
    network: Network,
    protocol: Protocol,
    kind: CollectiveKind,
    group: RankGroup,
    size_bytes: Quantity,
) -> Quantity:
    """base + steps inside * hop + steps between * hop + moved bytes / (bus bandwidth * rate)."""
    curve = line(_alpha_us(protocol, kind, group), bus_bytes_per_us(network, group) * protocol.rate)
    return curve_us(curve, _moved(network, kind, group, size_bytes))


def network_us(
    network: Network, kind: CollectiveKind, group: RankGroup, size_bytes: Quantity
) -> Quantity:
    """The fastest protocol's time; nothing for a group of one rank.

    NCCL likewise runs the protocol that its model finds fastest for the size.
    """
    times = [ring_us(network, p, kind, group, size_bytes) for p in network.protocols]
    return if_one(group.ranks, 0, times[0] if len(times) == 1 else least(*times))


def measured_us(
    network: Network, measured: MeasuredCurve, group: RankGroup, size_bytes: Quantity
) -> Quantity:
    """A measured curve's time, carried over to `group`."""
    curve = bulk_curve(network, measured, measured.kind, group)
    wire = wire_bytes(measured.kind, group.ranks, size_bytes)
    return if_one(group.ranks, 0, curve_us(curve, wire))


def bulk_curve(
    network: Network, measured: MeasuredCurve | None, kind: CollectiveKind, group: RankGroup
) -> Curve:
    """Time of large messages over the ring's bytes: the measured curve carried over to `group`.

    Its constant changes as the network formula's, its rates as the bus bandwidth; on the measured
    group itself nothing changes. Without a measurement it is the formula's own line.
    """
    bulk = network.protocols[-1]  # the protocol of large messages, which gets the whole bandwidth
    alpha_us, rate = _alpha_us(bulk, kind, group), bus_bytes_per_us(network, group)
    if measured is None:
        return line(alpha_us, rate * bulk.rate / dict(network.traffic).get(kind, 1))
    origin = measured.group
    base = alpha_us / _alpha_us(bulk, kind, origin)
    return scaled(measured.curve, base, rate / bus_bytes_per_us(network, origin))


def nearest(
    measured: tuple[MeasuredCurve, ...], kind: CollectiveKind, group: RankGroup
) -> MeasuredCurve | None:
    """The measurement of `kind` to use for `group`, or None.

    One with the group's name if there is any, else one on a group of the same sort (inside a
    node, one rank a node, both) and nearest in size. Symbolic groups are found by name only.
    """
    named = [m for m in measured if m.kind is kind and group.name and m.group.name == group.name]
    if not is_number(group.ranks, group.ranks_per_node):
        return named[0] if named else None
    alike = named or [m for m in measured if m.kind is kind and _sort(m.group) == _sort(group)]
    return min(alike, key=lambda m: _distance(m.group, group), default=None)


def _sort(group: RankGroup) -> tuple[bool, bool]:
    return group.nodes > 1, min(group.ranks, group.ranks_per_node) > 1


def _distance(first: RankGroup, second: RankGroup) -> float:
    return abs(math.log(first.ranks / second.ranks))


def _rounds(kind: CollectiveKind) -> int:
    return 2 if kind is CollectiveKind.ALL_REDUCE else 1


def _alpha_us(protocol: Protocol, kind: CollectiveKind, group: RankGroup) -> Quantity:
    intra, inter = ring_steps(kind, group)
    return protocol.base_us + intra * protocol.intra_hop_us + inter * protocol.inter_hop_us


def _moved(
    network: Network, kind: CollectiveKind, group: RankGroup, size_bytes: Quantity
) -> Quantity:
    return dict(network.traffic).get(kind, 1) * wire_bytes(kind, group.ranks, size_bytes)
