"""The run with torch's own `aot_eager`: what AOTAutograd does to the numbers, without graphshard.

In: modules as `fully_shard` leaves them. True after a root's first call: all of its forward is one
frame for Dynamo, as it is for graphshard. FSDP2's hooks break graphs, and a break inside a loop
(over a model's blocks) leaves the whole frame to eager torch; so FSDP2 gathers all groups of the
root in front of its forward, and no hook is left inside. Casts of mixed precision stay where they
were. FSDP2 itself reduces, at the end of backward, what it would have reduced on the way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from graphshard import fsdp2

if TYPE_CHECKING:
    from graphshard.doctor.watch import StepWatch

Compile = Callable[..., Callable[..., Any]]
# Where a frame is compiled once per block, each is: what Dynamo gives up on runs in eager torch.
MOST_COMPILES = 2**16


def compile_with_aot(watch: StepWatch, compiles: Compile, function: Any, dynamic: Any) -> Any:
    """compiles: torch.compile. function: what it takes, or None for what makes a decorator."""
    from torch._dynamo import config, lookup_backend

    config.recompile_limit = config.accumulated_recompile_limit = MOST_COMPILES
    aot_eager = lookup_backend("aot_eager")

    def counted(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        watch.graphs += 1
        return aot_eager(graph, inputs)

    return compiles(function, backend=counted, dynamic=dynamic)


def compile_whole(watch: StepWatch, compiles: Compile, module: nn.Module) -> None:
    """Compile the module's forward at its first call, if it turns out to be a root by then."""
    original = module.forward
    inner: list[fsdp2.ShardedModule] = []
    compiled: list[Callable[..., Any]] = []

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not fsdp2.is_root(fsdp2.state_of(module)):
            return original(*args, **kwargs)
        if not compiled:
            inner.extend(_take_hooks(module))
            compiled.append(compile_with_aot(watch, compiles, original, None))
        for one in inner:
            one.unshard()
        output = compiled[0](*args, **kwargs)
        if not torch.is_grad_enabled():  # no backward is to give back what was gathered
            for one in inner:
                one.reshard()
        return output

    # Not traced if the script compiles the module; what it calls is compiled nevertheless.
    ours: Any = torch.compiler.disable(forward)
    ours.__graphshard_doctor__ = original
    module.forward = ours


def _take_hooks(root: nn.Module) -> list[fsdp2.ShardedModule]:
    """Nothing but casts is left in front of and behind the sharded modules inside `root`."""
    inside = [m for m in root.modules() if isinstance(m, fsdp2.ShardedModule) and m is not root]
    for module in inside:
        if hasattr(module.forward, "__graphshard_doctor__"):
            module.forward = module.forward.__graphshard_doctor__
    for state in fsdp2.states_under(root)[1:]:
        fsdp2.remove_hooks(state)
        policy = fsdp2.cast_policy(state)
        for one in fsdp2.modules_of(state):
            _cast_around(one, policy)
    return list(inside)


def _cast_around(module: nn.Module, policy: fsdp2.CastPolicy) -> None:
    if (given := policy.input_dtype) is not None:

        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            return tree_map(functools.partial(_cast, given), (args, kwargs))

        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    if (wanted := policy.output_dtype) is not None:

        def after(_: nn.Module, args: Any, output: Any) -> Any:
            return tree_map(functools.partial(_cast, wanted), output)

        module.register_forward_hook(after)


def _cast(dtype: torch.dtype, value: Any) -> Any:
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if is_float else value
