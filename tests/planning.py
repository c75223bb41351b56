"""Problems for the tests of the planner: by hand, at random, and as large as asked for."""

import random
from dataclasses import replace

from graphshard.planner.activations import HostLink, Offload, OffloadOption, Recompute
from graphshard.planner.problem import (
    Allocation,
    Category,
    CollectiveLane,
    Gradient,
    Group,
    Part,
    PostForwardMesh,
    Problem,
    Region,
    Transfer,
    Use,
)
from graphshard.schedule.plan import Activation


def layers(
    count,
    *,
    compute_us=100.0,
    gather_us=80.0,
    reduce_us=80.0,
    size=1000,
    activations=0,
    temporary=0,
    shared_lane=False,
    root=False,
    **settings,
):
    """`count` equal layers: one region each in forward, one each in backward."""
    groups = []
    for i in range(count):
        grad_at = count - 1 - i
        part = Part(
            size,
            Transfer(gather_us),
            Use(i, i),
            Use(grad_at, grad_at),
            Gradient(grad_at, grad_at, size, Transfer(reduce_us), size, size // 2),
        )
        groups.append(Group(i, f"layers.{i}", (part,), 0, 0 if shared_lane else 1))
    if root and groups:
        groups[-1] = replace(groups[-1], is_root=True)
    alive = [activations * (i + 1) for i in range(count)]
    return Problem(
        groups=tuple(groups),
        lanes=(CollectiveLane("all-gather", 5.0),)
        + (() if shared_lane else (CollectiveLane("reduce", 5.0),)),
        forward=tuple(Region(compute_us, a, temporary) for a in alive),
        backward=tuple(Region(2 * compute_us, a, temporary) for a in reversed(alive)),
        **settings,
    )


def random_problem(
    seed, most_groups=6, *, fewest=1, most_regions=3, options=True, regroup=True, micro=True
):
    """A random problem with every kind of decision. The same seed gives the same problem."""
    r = random.Random(seed)
    count = r.randint(fewest, most_groups)
    starts, num_forward = [], 0
    for _ in range(count):
        num_forward += r.randint(0, 1) if r.random() < 0.3 else 0
        length = r.randint(1, most_regions) if r.random() < 0.5 else 1
        starts.append((num_forward, num_forward + length - 1))
        num_forward += length
    num_backward = num_forward
    lanes = (
        CollectiveLane("gather", r.choice([0.0, 5.0, 30.0])),
        CollectiveLane("reduce", r.choice([0.0, 10.0])),
    )
    shared = r.random() < 0.4
    rate = r.choice([0.2, 0.5, 1.0, 2.0])
    groups = tuple(
        _group(r, i, span, num_backward, lanes, shared, rate) for i, span in enumerate(starts)
    )
    if r.random() < 0.5:
        groups = (replace(groups[0], is_root=True), *groups[1:])
    weight = r.choice([0, 200, 2000])
    alive, forward = 0, []
    for _ in range(num_forward):
        alive += r.randint(0, weight)
        temporary = r.randint(0, weight)
        forward.append(Region(r.randint(5, 150), alive, temporary))
    backward = [
        Region(r.randint(5, 250), f.activation_bytes, r.randint(0, weight))
        for f in reversed(forward)
    ]
    recompute = ()
    if options and num_forward > 1:
        recompute = tuple(_option(r, i, num_forward, weight) for i in range(r.randint(0, 2)))
    return Problem(
        groups,
        lanes,
        tuple(forward),
        tuple(backward),
        resident=(Allocation(Category.SHARDED_PARAM, r.randint(0, 1000)),),
        recompute=recompute,
        micro_steps=r.choice([1, 1, 1, 2, 3]) if micro else 1,
        sync_each=r.random() < 0.5,
        has_gradients=r.random() < 0.3,
        regroup_gathers=regroup,
        regroup_reductions=regroup and r.random() < 0.5,
    )


def with_nodes(problem, ranks=4, faster=10.0):
    """The same problem over several nodes of `ranks` ranks, with links `faster` inside."""
    mesh_lane = len(problem.lanes)
    lane = CollectiveLane("node", min(x.launch_us for x in problem.lanes) / faster)

    def part(one):
        return replace(one, node_gather=replace(one.gather, us=one.gather.us / faster))

    groups = (
        replace(
            g,
            parts=tuple(map(part, g.parts)),
            node=PostForwardMesh(g.gathered_bytes // ranks, mesh_lane),
        )
        for g in problem.groups
    )
    return replace(problem, groups=tuple(groups), lanes=(*problem.lanes, lane))


def with_replicas(problem, slower=1.0, launch_us=5.0, link="", share=1.0, seed=0):
    """The same problem where `share` of the groups add up over replicas what they have reduced.
    That takes a launch and `slower` times the reduction. link: of both."""
    r = random.Random(seed)
    lane = CollectiveLane("replicas", launch_us, link)
    lanes = tuple(replace(x, link=link) if x.name == "reduce" else x for x in problem.lanes)

    def part(one):
        gradient = one.gradient
        if gradient is None:
            return one
        reduce = gradient.reduce
        us = launch_us + slower * reduce.us
        all_reduce = replace(reduce, us=us, pack_us=0.0)
        reduce = replace(reduce, unpack_us=0.0)
        return replace(one, gradient=replace(gradient, reduce=reduce, all_reduce=all_reduce))

    def group(one):
        if r.random() >= share:
            return one
        number = len(problem.lanes)
        return replace(one, parts=tuple(map(part, one.parts)), all_reduce_lane=number)

    return replace(problem, lanes=(*lanes, lane), groups=tuple(map(group, problem.groups)))


def with_offloads(problem, seed, *, fixed=False):
    """The same problem with copies to the host and back: as options, some of them of what may be
    computed again too, or (`fixed`) in any case."""
    r = random.Random(seed)
    lanes = (*problem.lanes, CollectiveLane("offload", 2.0), CollectiveLane("reload", 2.0))
    limit = r.choice([None, None, 2000])
    host = HostLink(len(problem.lanes), len(problem.lanes) + 1, 2.0, None if fixed else limit)
    options = []
    for number in range(0 if len(problem.forward) < 2 else r.randint(1, 4)):
        after = r.randrange(len(problem.forward) - 1)
        size = r.randint(1, 1500)
        before = len(problem.forward) - 1 - r.randint(0, after)
        group = r.choice(problem.groups).id
        activation = Activation(f"block.{number}", 0)  # as those of `_option`
        alone = Offload(group, after, before, size, 2.0 + size * r.choice([0.02, 0.1]))
        options.append(OffloadOption(activation, alone))
    if fixed:
        offloads = tuple({o.alone.group: o.alone for o in options}.values())
        return replace(problem, lanes=lanes, host=host, offloads=offloads)
    return replace(problem, lanes=lanes, host=host, offload_options=tuple(options))


def with_absent(problem, seed):
    """The same problem where regions of backward need less than what is counted in them."""
    r = random.Random(seed)
    born = {}
    for group in problem.groups:
        for part in group.parts:
            if (grad := part.gradient) is not None and grad.first >= 0 and r.random() < 0.5:
                allocation = Allocation(Category.UNSHARDED_GRAD, r.randint(0, grad.bytes), group.id)
                born[grad.first] = (*born.get(grad.first, ()), allocation)
    regions = [
        replace(
            region,
            idle_bytes=r.randint(0, region.activation_bytes),
            absent=born.get(index, ()),
        )
        for index, region in enumerate(problem.backward)
    ]
    return replace(problem, backward=tuple(regions))


def in_place(problem):
    """The same problem where no collective needs copies."""

    def part(one):
        gradient = one.gradient
        if gradient is not None:
            gradient = replace(gradient, reduce=replace(gradient.reduce, in_place=True))
        return replace(one, gather=replace(one.gather, in_place=True), gradient=gradient)

    groups = (replace(g, parts=tuple(map(part, g.parts))) for g in problem.groups)
    return replace(problem, groups=tuple(groups))


def _option(r, index, num_forward, weight):
    after = r.randrange(num_forward - 1)
    saved = r.randint(1, weight + 1)
    return Recompute(
        Activation(f"block.{index}", 0), after, num_forward - 1 - after, saved, r.randint(1, 100)
    )


def _group(r, index, span, num_backward, lanes, shared, rate):
    first, last = span
    size = r.randint(50, 3000)
    blocks = r.choice([1, 1, 1, 2]) if last > first else 1
    needed = r.random() < 0.9
    copies = r.random() < 0.3
    parts = []
    for block in range(blocks):
        begin = first if block == 0 else r.randint(first, last)
        forward = Use(begin, last)
        backward = Use(num_backward - 1 - last, num_backward - 1 - begin) if needed else None
        if index == 0 and r.random() < 0.3:
            forward = Use(begin, num_backward - 1)
        gather = _transfer(r, size, lanes[0], rate, copies)
        gradient = None
        if r.random() < 0.9 and needed:
            ready = num_backward - 1 - begin
            created = r.randint(max(0, num_backward - 1 - last), ready)
            reduce = _transfer(r, size, lanes[0 if shared else 1], rate, copies)
            wide = r.choice([1, 2])
            gradient = Gradient(created, ready, size, reduce, wide * size, wide * size // 2)
        parts.append(Part(size, gather, forward, backward, gradient, params=(block,)))
        size = r.randint(50, 3000)
    bound = r.choice([None] * 6 + [True, False])
    return Group(
        index,
        f"layers.{index}",
        tuple(parts),
        0,
        0 if shared else 1,
        reshard=bound,
        world_size=1 if r.random() < 0.03 else 2,
    )


def _transfer(r, size, lane, rate, copies):
    us = lane.launch_us + round(size * rate * 0.1 * r.uniform(0.5, 1.5), 1)
    pack, unpack = (r.randint(0, 8), r.randint(0, 8)) if copies else (0, 0)
    return Transfer(us, pack, unpack)
