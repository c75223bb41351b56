"""What one rank has compiled, as a value that ranks compare.

In: the forward at which it compiles a graph, the groups that the graph uses, and what else tells it
from others. Out: a text, equal on ranks that have compiled alike (`company.keep_step`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pace:
    """uses: digest of the groups of each graph, with its forward. kinds: of what else tells graphs
    apart. last: the groups of the last one. varies: the graphs use different groups (layers are
    dropped, say), which all ranks have to do alike: then nothing else matters.
    """

    uses: str = ""
    kinds: str = ""
    last: str = ""
    varies: bool = False

    def after(self, forward: int, uses: str, kind: str) -> Pace:
        varies = self.varies or self.last not in ("", uses)
        return Pace(_digest(self.uses, forward, uses), _digest(self.kinds, kind), uses, varies)

    @property
    def text(self) -> str:
        return self.uses if self.varies else f"{self.uses}/{self.kinds}"


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
