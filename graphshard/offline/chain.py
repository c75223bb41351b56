"""Says whether alike blocks are a chain: what a few of them show is then true of all.

In: the forward graph of a few captured blocks in a row, and which groups are whose. A block of a
chain reads what the block before it made, its own parameters and buffers, and what hangs on inputs
of the model alone, which all of them read; and all of them do the same with it. Where a block reads
what another one farther back made, or every fourth does something of its own, blocks that were not
captured could do what none of the captured ones does.

The first block may differ (it has no residual, say), and so what the second one reads of it. What
only blocks farther back than all captured ones would do is not seen.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import fx

from graphshard.graph.program import Program, compute_nodes, is_view, step_of

# Where an op's input comes from, said in the same way in each block.
_Place: TypeAlias = tuple[Any, ...]
_PATTERN = 2  # the block that those behind it are compared with
_SHARED = ("before", "common", "input")  # kinds of places that are the same for all blocks


@dataclass(frozen=True, slots=True)
class _Row:
    """ops: the compute ops, less those that all blocks have in common. firsts: the first op of each
    block, in order. owners: group -> its block and its name there. common: the same number for
    ops that compute the same."""

    ops: Sequence[fx.Node]
    numbers: Mapping[fx.Node, int]
    firsts: Sequence[int]
    owners: Mapping[int, tuple[int, str]]
    common: Mapping[fx.Node, int]

    def block_at(self, op: int) -> int:
        """-1: before all blocks."""
        return bisect_right(self.firsts, op) - 1

    def of(self, block: int, stop: int | None = None) -> range:
        return range(self.firsts[block], self.firsts[block + 1] if stop is None else stop)


def is_chain(program: Program, owners: Mapping[int, tuple[int, str]], count: int) -> bool:
    """Whether the `count` captured blocks of `program` are a chain.

    owners: the number of a group -> the block in which it is, and its name there.
    """
    assert program.forward is not None
    ops = compute_nodes(program.forward.graph)
    common = _common(_row(ops, owners, {}))
    row = _row([op for op in ops if op not in common], owners, common)
    if len(row.firsts) != count or list(row.firsts) != sorted(row.firsts):
        return False
    pattern = [_does(row, _PATTERN, op) for op in row.of(_PATTERN)]
    blocks = range(_PATTERN + 1, count - 1)
    last = _until_parameters_end(row, count - 1)
    return (
        all([_does(row, block, op) for op in row.of(block)] == pattern for block in blocks)
        and [_does(row, count - 1, op) for op in last] == pattern[: len(last)]
        and all(place[1] <= 1 for place in _places(row, _PATTERN) if place[0] == "block")
        and not _reads_what_the_first_is_given(row)
        and not _gives_the_first_more(row)
    )


def _row(
    ops: Sequence[fx.Node], owners: Mapping[int, tuple[int, str]], common: Mapping[fx.Node, int]
) -> _Row:
    firsts: dict[int, int] = {}
    for number, op in enumerate(ops):
        for node in op.all_input_nodes:
            step = step_of(node)
            if step is not None and step.group in owners:
                firsts.setdefault(owners[step.group][0], number)
    numbers = {op: number for number, op in enumerate(ops)}
    return _Row(ops, numbers, [firsts[block] for block in sorted(firsts)], owners, common)


def _common(row: _Row) -> dict[fx.Node, int]:
    """The ops that hang on inputs of the model alone, wherever they stand: what all blocks compute
    of these alike may be computed once, in the first of them."""
    common: dict[fx.Node, int] = {}
    known: dict[tuple[Any, ...], int] = {}
    for op in row.ops:
        if all(node in common or _is_common_input(row, node) for node in op.all_input_nodes):
            read = fx.node.map_arg((op.args, op.kwargs), lambda n: (common.get(n, n.name),))
            common[op] = known.setdefault((op.target, repr(read)), len(known))
    return common


def _is_common_input(row: _Row, node: fx.Node) -> bool:
    """Not a buffer of one block, nor a number that it has; of the first one it is not known."""
    if node.op not in ("placeholder", "get_attr") or step_of(node) is not None:
        return False
    blocks = {row.block_at(row.numbers[user]) for user in node.users if user in row.numbers}
    return len(blocks) != 1 or blocks <= {-1, 0}


def _does(row: _Row, block: int, op: int) -> tuple[Any, ...]:
    """What an op computes, from what."""
    node = row.ops[op]
    read = fx.node.map_arg((node.args, node.kwargs), lambda n: _place(row, block, n))
    return node.target, repr(read)


def _place(row: _Row, block: int, node: fx.Node) -> _Place:
    node = _viewed(node)
    number = row.numbers.get(node)
    if number is not None:
        made_in = row.block_at(number)
        if made_in < 0:
            return "before", number
        return "block", block - made_in, number - row.firsts[made_in]
    step = step_of(node)
    if step is not None:
        owner = row.owners.get(step.group)
        mine = owner is not None and owner[0] == block
        return ("own", owner[1], step.params) if owner and mine else ("group", step.group)
    if node in row.common:
        return "common", row.common[node]
    if _is_common_input(row, node):
        return "input", node.name
    return "own", str(node.meta.get("val"))


def _viewed(node: fx.Node) -> fx.Node:
    """Of a view as large as what it views, that: results of a block are such views."""
    while is_view(node) and _size(node) == _size(node.all_input_nodes[0]):
        node = node.all_input_nodes[0]
    return node


def _size(node: fx.Node) -> str:
    return str(getattr(node.meta.get("val"), "shape", None))


def _until_parameters_end(row: _Row, block: int) -> range:
    """Of the last block what is surely its own."""
    ends = [
        number
        for number in range(row.firsts[block], len(row.ops))
        for node in row.ops[number].all_input_nodes
        if (step := step_of(node)) is not None and row.owners.get(step.group, (None,))[0] == block
    ]
    return row.of(block, max(ends) + 1)


def _places(row: _Row, block: int) -> Iterator[_Place]:
    for op in row.of(block):
        for node in row.ops[op].all_input_nodes:
            yield _place(row, block, node)


def _reads_what_the_first_is_given(row: _Row) -> bool:
    """A block reads what the first one is given as the others are given the result of the one
    before, or what was made of it before the blocks. Blocks behind the captured ones may read what
    is as far away.
    """
    first, other = (Counter(p for p in _places(row, b) if p[0] in _SHARED) for b in (0, _PATTERN))
    given = first - other
    return any(_place(row, _PATTERN, node) in given for node in _shared_by_all(row))


def _shared_by_all(row: _Row) -> set[fx.Node]:
    """What a block reads that no block makes, and all that it is made of."""
    left = [
        node
        for op in row.of(_PATTERN)
        for node in row.ops[op].all_input_nodes
        if _place(row, _PATTERN, node)[0] in _SHARED
    ]
    found: set[fx.Node] = set()
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.all_input_nodes
    return found


def _gives_the_first_more(row: _Row) -> bool:
    """The first block does the same as another, but reads two values where that reads one result of
    the block before: it may be one of several that are given something of their own."""
    if [row.ops[op].target for op in row.of(0)] != [row.ops[op].target for op in row.of(_PATTERN)]:
        return False
    found: dict[_Place, _Place] = {}
    pairs = zip(_places(row, _PATTERN), _places(row, 0), strict=False)
    return any(
        found.setdefault(other, first) != first
        for other, first in pairs
        if other[:2] == ("block", 1)
    )
