"""A model whose `fully_shard` calls were taken back, and the calls to make instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from graphshard.fsdp2.undo import Sharding
from graphshard.offline.repeats import Repeat, shorten
from graphshard.offline.world import Made
from graphshard.tune.modules import Calls, is_inside


@dataclass(frozen=True, slots=True)
class Undone:
    """sharding: what was taken back. calls: of modules to shard."""

    made: Made
    sharding: Sharding
    calls: Calls


def with_blocks(undone: Undone, repeats: Sequence[Repeat], count: int) -> Undone:
    """Its model is left with the first `count` blocks of each list of alike ones; 0: with as many
    as are captured."""
    calls = undone.calls
    for repeat in repeats:
        left = count or repeat.captured
        shorten(undone.made.model, repeat, left)
        gone = repeat.names[left:]
        calls = tuple(m for m in calls if not any(is_inside(m[0], block) for block in gone))
    return replace(undone, calls=calls)
