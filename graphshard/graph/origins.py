"""What made a value: its op, and the module that ran it."""

from __future__ import annotations

from torch import fx
from torch.distributed.fsdp import FSDPModule

from graphshard.graph.random_ops import packet_of
from graphshard.schedule.plan import Origin


def origin_of(node: fx.Node) -> Origin:
    """node: an op of a captured graph."""
    packet = packet_of(node)
    return Origin(getattr(packet, "__name__", str(packet)), _module(node))


def _module(node: fx.Node) -> str:
    """The innermost module, by its name in the module that is sharded and has it; as Dynamo noted
    it: path and class of each module, from the outside in."""
    outer, path = "", ""
    for path, kind in (node.meta.get("nn_module_stack") or {}).values():
        if isinstance(kind, type) and issubclass(kind, FSDPModule):
            outer = path
    return path.removeprefix(outer).removeprefix(".") if outer else ""
