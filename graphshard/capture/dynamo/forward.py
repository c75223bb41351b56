"""How far a forward has come in what Dynamo is tracing, as FSDP2's states would know it.

The modules of `fully_shard([a, b])` share one state. FSDP2 begins a forward of it with the first
of them, and ends it when each has run, or with the outermost module. Dynamo traces hooks in the
order in which they run, so that this can be followed beside the trace.

What is assumed: a graph holds a forward from its begin. After a graph break, or in a block that is
compiled by itself, each list begins anew. Only the order in which gradients add up depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn
from torch._dynamo.symbolic_convert import InstructionTranslator

from graphshard import fsdp2


@dataclass
class Forward:
    """outermost: the state that was entered first. waits_for: modules that have not run."""

    outermost: fsdp2.State | None = None
    waits_for: dict[fsdp2.State, set[nn.Module]] = field(default_factory=dict)

    def enter(self, state: fsdp2.State, modules: Sequence[nn.Module]) -> bool:
        """Whether FSDP2 begins a forward of `state`, whose modules these are."""
        self.outermost = self.outermost or state
        begins = state not in self.waits_for
        if begins:
            self.waits_for[state] = set(modules)
        return begins

    def leave(self, state: fsdp2.State, modules: Sequence[nn.Module]) -> bool:
        """Whether FSDP2 ends a forward of `state`, of which `modules` have run now."""
        left = self.waits_for.get(state, set())
        left.difference_update(modules)
        if left:
            return False
        self.waits_for.pop(state, None)
        if self.outermost is state:
            self.outermost = None
            self.waits_for.clear()
        return True


def forward_now() -> Forward:
    """Of the frame that is being traced. Kept with Dynamo's record of the graph, which is a new one
    whenever it traces a frame again."""
    record = vars(InstructionTranslator.current_tx().output)
    forward: Forward = record.setdefault("graphshard_forward", Forward())
    return forward
