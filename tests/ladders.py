"""Small problems whose memory is activations, several of each group, at various prices."""

import random
from dataclasses import replace

from graphshard.planner.activations import Recompute
from graphshard.planner.problem import (
    Allocation,
    Category,
    CollectiveLane,
    Gradient,
    Group,
    Part,
    Problem,
    Region,
    Transfer,
    Use,
)
from graphshard.schedule.plan import Activation

# Shares of a region's forward that computing an activation again takes: nearly free, medium, dear.
RUNGS = ((0.0, 0.02), (0.05, 0.15), (0.25, 0.6))


def ladder_problem(seed, most_groups=4, rungs=(2, 5)):
    """2 to `most_groups` groups of one or two regions, each with several activations to choose
    from (`rungs`: how many). The same seed gives the same problem."""
    r = random.Random(seed)
    spans = _spans(r, r.randint(2, most_groups))
    regions_us = [float(r.randint(30, 150)) for _ in range(spans[-1].last + 1)]
    lanes = (
        CollectiveLane("gather", r.choice([0.0, 5.0])),
        CollectiveLane("reduce", r.choice([0.0, 5.0])),
    )
    shared, copies, in_place = r.random() < 0.4, r.random() < 0.3, r.random() < 0.5
    ratio = r.choice([0.2, 0.5, 1.0, 2.0])  # of communication to compute
    groups = tuple(
        _group(r, i, span, regions_us, lanes[0 if shared else 1], (ratio, copies, in_place))
        for i, span in enumerate(spans)
    )
    if shared:
        groups = tuple(replace(g, reduce_lane=0) for g in groups)
    if r.random() < 0.5:
        groups = (replace(groups[0], is_root=True), *groups[1:])
    options = [
        _option(r, regions_us, span, i, rung)
        for i, span in enumerate(spans)
        for rung in range(r.randint(*rungs))
    ]
    forward = _forward(r, regions_us, options)
    options = list(_linked(options)) if seed % 2 else options
    return Problem(
        groups,
        lanes,
        forward,
        tuple(Region(2 * f.us, f.activation_bytes, r.randint(0, 300)) for f in reversed(forward)),
        resident=(Allocation(Category.SHARDED_PARAM, r.randint(0, 1000)),),
        recompute=tuple(options),
        has_gradients=r.random() < 0.3,
        regroup_gathers=False,
        regroup_reductions=False,
    )


def _spans(r, count):
    spans, first = [], 0
    for _ in range(count):
        last = first + (r.random() < 0.3)
        spans.append(Use(first, last))
        first = last + 1
    return spans


def _group(r, index, span, regions_us, reduce_lane, kind):
    ratio, copies, in_place = kind
    size = r.randint(100, 1500)
    compute_us = sum(regions_us[span.first : span.last + 1])
    back = Use(len(regions_us) - 1 - span.last, len(regions_us) - 1 - span.first)

    def transfer():
        us = reduce_lane.launch_us + 5.0 + round(compute_us * ratio * r.uniform(0.6, 1.4), 1)
        pack, unpack = (r.randint(0, 8), r.randint(0, 8)) if copies else (0, 0)
        return Transfer(us, pack, unpack, in_place)

    wide, trained = r.choice([1, 2]), size if r.random() < 0.7 else size // 4
    born, sent = r.randint(back.first, back.last), wide * trained
    gradient = Gradient(born, back.last, trained, transfer(), sent, sent // 2)
    part = Part(size, transfer(), span, back, gradient)
    reshard = r.choice([None] * 6 + [True, False])
    return Group(index, f"layers.{index}", (part,), 0, 1, reshard=reshard)


def _option(r, regions_us, span, group, rung):
    after = r.randint(span.first, span.last)
    low, high = RUNGS[min(rung, 2) if rung < 3 else r.randrange(3)]
    extra_us = round(regions_us[after] * r.uniform(low, high), 2)
    name = Activation(f"layers.{group}", rung)
    return Recompute(name, after, len(regions_us) - 1 - after, r.randint(100, 2500), extra_us)


def _linked(options):
    """Options that mean nothing without the one before, where that is of the same memory, and
    cheaper: more of one activation's making."""
    for index, option in enumerate(options):
        before = options[index - 1] if index else None
        same = before and before.activation.group == option.activation.group
        if same and before.after == option.after and _price(before) < _price(option):
            option = replace(option, needs=index - 1)
        yield option


def _price(option):
    return option.extra_us / option.saved_bytes


def _forward(r, regions_us, options):
    """Alive in a region: what it and those before it save, and a little that cannot be spared."""
    alive, regions = 0, []
    for index, us in enumerate(regions_us):
        alive += sum(o.saved_bytes for o in options if o.after == index) + r.randint(0, 100)
        regions.append(Region(us, alive, r.randint(0, 300)))
    return tuple(regions)
