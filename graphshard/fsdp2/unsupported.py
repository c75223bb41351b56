"""Why a group may have to run through eager FSDP2, in FSDP2's terms."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from graphshard.fsdp2.extensions import has_extensions
from graphshard.fsdp2.group import FsdpGroup
from graphshard.fsdp2.threads import ranks_are_threads

# Recurrent modules keep a list of their weights too, which no graph reads.
_WRITES_PARAMETERS = (nn.Module.__setattr__, nn.RNNBase.__setattr__)


def unsupported(group: FsdpGroup) -> str | None:
    """The first reason, or None: `group` can run in a graph."""
    return next(_reasons(group), None)


def _reasons(group: FsdpGroup) -> Iterator[str]:
    raw = group.raw
    mesh = raw.mesh_info
    if ranks_are_threads(group.gather_process_group, group.replicate_process_group):
        yield "its ranks are threads of one process, where one compiles while the others wait"
    spreads = raw.post_forward_mesh_info not in (None, mesh)
    for param in group.params:
        if spreads and has_extensions(param.raw):
            # It does, at the latest when it gathers them from the smaller group. The day it does
            # not, tests/dist/test_smaller_group.py fails.
            what = "reshard_after_forward is an int, where FSDP2 itself raises"
            yield f"{param.fqn} has all-gather extensions and {what}"
        for slot in param.slots:
            if type(slot.module).__setattr__ not in _WRITES_PARAMETERS:
                yield f"{type(slot.module).__name__} of {param.fqn} overrides __setattr__"
