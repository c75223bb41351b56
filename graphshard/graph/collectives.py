"""Collectives that the model issues itself (tensor parallel, say): torch's functional ones.

In: a graph that was just captured. Out: each of them has its ranks noted, since its process group
goes by a name that means nothing later, or something else.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from graphshard.graph.random_ops import argument_of

FUNCTIONAL = torch.ops._c10d_functional
WAIT = FUNCTIONAL.wait_tensor.default
_RANKS = "graphshard_ranks"


def note_ranks(graph: fx.Graph) -> None:
    """Global ranks of each collective of `graph`; call it where its process groups live."""
    for node in graph.nodes:
        if getattr(node.target, "namespace", None) != FUNCTIONAL.name:
            continue
        name = argument_of(node, "group_name")
        if isinstance(name, str):
            group: Any = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]
            node.meta[_RANKS] = tuple(dist.get_process_group_ranks(group))


def ranks_of(node: fx.Node) -> tuple[int, ...]:
    """Of a collective; empty for anything else, and where nobody noted them."""
    found: tuple[int, ...] = node.meta.get(_RANKS, ())
    return found
