"""The collective skeleton of a plan: what every rank of a mesh has to issue alike.

In: entries that `Plan.skeleton` lists. Out: their canonical form, a fingerprint, and the first
place where the skeletons of several ranks part. Activation shapes are in none of it, so ranks with
batches of different lengths have one skeleton.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from itertools import zip_longest


@dataclass(frozen=True, slots=True)
class Entry:
    """One collective, in the order of issue.

    direction: "forward" or "backward". kind: "all_gather" or "reduce_scatter". group: FQN of the
    group, several that travel together joined by " + ". dtype: on the wire; parameters of several
    dtypes travel as "bytes". size_bytes: of the whole bucket, all ranks' parts.
    """

    direction: str
    kind: str
    group: str
    dtype: str
    size_bytes: int

    def __str__(self) -> str:
        what = f"{self.direction} {self.kind} of {self.group}"
        return f"{what} ({self.dtype}, {self.size_bytes:,} bytes)"


Skeleton = tuple[Entry, ...]


def to_text(skeleton: Skeleton) -> str:
    """Canonical JSON: one list per entry, no spaces."""
    return json.dumps([astuple(entry) for entry in skeleton], separators=(",", ":"))


def from_text(text: str) -> Skeleton:
    """Read what `to_text` wrote. Raises ValueError or TypeError for anything else."""
    return tuple(Entry(*row) for row in json.loads(text))


def fingerprint(skeleton: Skeleton) -> str:
    """SHA-256 of the canonical form, in hexadecimal."""
    return hashlib.sha256(to_text(skeleton).encode()).hexdigest()


def difference(by_rank: Mapping[int, Skeleton]) -> str | None:
    """Where the ranks' skeletons first part, and which ranks have what there; None if nowhere."""
    ranks = sorted(by_rank)
    for place, row in enumerate(zip_longest(*(by_rank[rank] for rank in ranks))):
        if len(dict.fromkeys(row)) > 1:
            having: dict[Entry | None, list[int]] = {}
            for rank, entry in zip(ranks, row, strict=True):
                having.setdefault(entry, []).append(rank)
            parts = [f"{_ranks(rs)}: {e or 'nothing more'}" for e, rs in having.items()]
            return f"collective {place} is " + "; ".join(parts)
    return None


def same_way(by_rank: Mapping[int, Skeleton]) -> bool:
    """FSDP2's own hooks could run these together.

    They gather groups in the order of use. So the forward orders must not contradict each other; a
    rank whose graph ends early (a graph break) goes on where it ended.
    """
    orders = [_forward_groups(by_rank[rank]) for rank in sorted(by_rank)]
    longest = max(orders, key=len, default=[])
    return all(order == longest[: len(order)] for order in orders)


def _forward_groups(skeleton: Skeleton) -> list[str]:
    found = (e.group for e in skeleton if (e.direction, e.kind) == ("forward", "all_gather"))
    return list(dict.fromkeys(found))


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
