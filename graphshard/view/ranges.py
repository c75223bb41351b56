"""Several groups in few words: "layers.3 to layers.13 (11)" instead of eleven names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from graphshard.schedule.plan import GroupInfo

NUMBER = re.compile(r"\d+")
LEAST = 3  # so many, and more, are a range


def groups_text(names: Sequence[str]) -> str:
    """Each range of names that count up or down, and what stands alone, in their order."""
    return " + ".join(_text(run) for run in runs(names))


def short_text(names: Sequence[str]) -> str:
    """For a narrow place: "layers.3-13"."""
    return " + ".join(_short(run) for run in runs(names))


def runs(names: Sequence[str]) -> Iterator[list[str]]:
    """Neighbours that differ by one in one of their numbers, in the same direction."""
    run: list[str] = []
    way = 0
    for name in names:
        found = _step(run[-1], name) if run else 0
        if run and found and (len(run) == 1 or found == way):
            run.append(name)
        else:
            if run:
                yield run
            run = [name]
        way = found
    if run:
        yield run


def _step(first: str, second: str) -> int:
    """1 or -1: the second name has the next or the former number; 0: neither."""
    if NUMBER.sub("*", first) != NUMBER.sub("*", second):
        return 0
    pairs = zip(NUMBER.findall(first), NUMBER.findall(second), strict=True)
    found = [int(b) - int(a) for a, b in pairs if a != b]
    return found[0] if len(found) == 1 and abs(found[0]) == 1 else 0


def _text(run: Sequence[str]) -> str:
    if len(run) < LEAST:
        return " + ".join(run)
    return f"{run[0]} to {run[-1]} ({len(run)})"


def _short(run: Sequence[str]) -> str:
    if len(run) < LEAST:
        return " + ".join(run)
    differ = (b for a, b in zip(*map(NUMBER.findall, (run[0], run[-1])), strict=True) if a != b)
    return f"{run[0]}-{next(differ)}"


def is_next(first: GroupInfo, second: GroupInfo) -> bool:
    """Whether `second` is the next of blocks like `first`: its name counts on, its size is the
    same."""
    sizes = ((len(g.params), g.gathered_bytes, g.world_size) for g in (first, second))
    return len(set(sizes)) == 1 and _step(first.fqn, second.fqn) == 1
