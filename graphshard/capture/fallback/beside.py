"""Parameters of a list of modules that a graph reads beside their group.

Of `fully_shard([a, b])` eager FSDP2 keeps all parameters gathered from the forward of the first
module to that of the last, so that code in between (a fused loss that takes the head's weight) gets
whole tensors, whose gradients are reduced. While Dynamo traces, they are back in shards as soon as
the first module has run: the same code would gather a shard by itself, and its gradient would be
this rank's own.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx
from torch.distributed.tensor import DTensor

from graphshard import fsdp2
from graphshard.capture import dynamo
from graphshard.capture.fallback.causes import named_groups, warn_once
from graphshard.capture.root_state import CaptureHandle, all_root_states
from graphshard.errors import UnsupportedModel
from graphshard.options import Options


def leave_what_is_read(gm: fx.GraphModule, options: Options) -> None:
    """A group of which `gm` reads a shard goes to eager FSDP2, and so does this call: raises what
    has Dynamo run it so. Raises UnsupportedModel (GS210) instead with `fallback="error"`.

    Assumed: only lists stay gathered where user code reads them. A group that is kept after its
    forward does too; docs/reference/differences.md says that its parameters are shards there.
    """
    read = next(_read(gm), None)
    if read is None:
        return
    handle, fqn = read
    why = f"{fqn} is read beside the modules that were sharded together with it"
    if options.fallback == "error":
        raise UnsupportedModel("GS210", why)
    warn_once(f"{named_groups(handle.fqns)} runs through eager FSDP2 because {why}")
    handle.root_state.leave_eager(handle.fqns[0], why)
    raise dynamo.skip_frame(f"graphshard: {why}")


def _read(gm: fx.GraphModule) -> Iterator[tuple[CaptureHandle, str]]:
    """Groups of lists, each with the FQN of a parameter of which a shard is an input of `gm`."""
    found = map(dynamo.input_example, gm.graph.find_nodes(op="placeholder"))
    shards = {id(example) for example in found if isinstance(example, DTensor)}
    if not shards:
        return
    for handle in (h for root_state in all_root_states() for h in root_state.handles):
        is_list = len(fsdp2.modules_of(handle.state)) > 1
        if not handle.eager and is_list:
            for param in (p for live in handle.lives for p in live.fsdp.params):
                if id(param.sharded) in shards:
                    yield handle, param.fqn
