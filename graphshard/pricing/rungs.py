"""What of an activation's making is worth saving in its place: a smaller value on the way.

Keys that are repeated for several heads come from a quarter of them, a float32 value from one of
bfloat16. In: the ops that make an activation again. Out: its rungs, each a part of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from graphshard.graph.owners import owner


@dataclass(frozen=True, slots=True)
class Rung:
    """`nodes`, in order, make the activation; in all that frees `saved_bytes`, and takes
    `extra_us`. instead: what is saved in its place; None: nothing that was not saved before."""

    nodes: tuple[fx.Node, ...]
    saved_bytes: int
    extra_us: float
    instead: fx.Node | None = None


def rungs(
    own: Sequence[fx.Node],
    whole: Sequence[fx.Node],
    freed_bytes: Callable[[Sequence[fx.Node]], int],
    times: Mapping[fx.Node, float],
) -> list[Rung]:
    """Ways to make `own` again, each of which frees more than the one before at a higher price for
    what it adds. whole: all of the ops. freed_bytes: by a part of them, which reads its inputs.
    times: of what does not run twice in any case.
    """
    found = [
        Rung(nodes, freed_bytes(nodes), sum(times.get(n, 0.0) for n in nodes), instead)
        for nodes, instead in [(tuple(whole), None), *_parts(own, whole, times)]
    ]
    return _hull([rung for rung in found if rung.saved_bytes > 0])


def _parts(
    own: Sequence[fx.Node], whole: Sequence[fx.Node], times: Collection[fx.Node]
) -> Iterator[tuple[tuple[fx.Node, ...], fx.Node]]:
    """`whole` from one of its values on that can be saved, and that value."""
    for node in whole:
        if node in own or node not in times or owner(node) is not node:
            continue
        if isinstance(node.meta.get("val"), Tensor):
            rest = set(whole).difference([node])
            yield tuple(ancestors(own, rest.__contains__)), node


def ancestors(nodes: Sequence[fx.Node], is_inside: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """`nodes` and what they are made from as far as that is inside, in the graph's order."""
    found, queue = set(nodes), list(nodes)
    while queue:
        for source in queue.pop().all_input_nodes:
            if source not in found and is_inside(source):
                found.add(source)
                queue.append(source)
    return sorted(found)


def _hull(found: Sequence[Rung]) -> list[Rung]:
    """Those at which a byte gets dearer, from nothing on: the lower convex hull."""
    hull = [Rung((), 0, 0.0)]
    for rung in sorted(found, key=lambda r: (r.saved_bytes, r.extra_us)):
        if rung.saved_bytes == hull[-1].saved_bytes:
            continue
        while len(hull) > 1 and _price(hull[-2], hull[-1]) >= _price(hull[-1], rung):
            hull.pop()
        hull.append(rung)
    return hull[1:]


def _price(before: Rung, rung: Rung) -> float:
    """Microseconds for each byte that `rung` frees beyond `before`."""
    more_bytes = rung.saved_bytes - before.saved_bytes
    return (rung.extra_us - before.extra_us) / more_bytes
