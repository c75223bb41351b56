"""FSDP2's settings, one row each: set on eager FSDP2 and on graphshard, bitwise equal after steps.

A row is a function that shards and sets up a model, and one that may change it before a step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import CASES, Llama, shard_blocks
from parity import assert_equal, count_collectives, train
from pool import Ctx, Pool, capped
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import graphshard

pytestmark = pytest.mark.dist


def nothing(model: nn.Module, step: int) -> None:
    pass


@dataclass(frozen=True)
class Row:
    name: str
    shard: Callable[[nn.Module, Ctx], nn.Module]
    before_step: Callable[[nn.Module, int], None] = nothing
    ranks: int = 2
    micro_steps: int = 1
    same_gathers: bool = True
    newest_only: bool = False


def plain(model: nn.Module, ctx: Ctx, **kwargs: Any) -> nn.Module:
    return shard_blocks(("blocks",), model, kwargs.pop("mesh", ctx.mesh), **kwargs)


def mesh_2d(model: nn.Module, ctx: Ctx, shape: tuple[int, int], **kwargs: Any) -> nn.Module:
    mesh = init_device_mesh(ctx.device.type, shape, mesh_dim_names=("replicate", "shard"))
    return plain(model, ctx, mesh=mesh, **kwargs)


def calling(name: str, *args: Any, **kwargs: Any) -> Callable[[nn.Module, Ctx], nn.Module]:
    """Plain sharding, then `model.<name>(...)`."""

    def shard(model: nn.Module, ctx: Ctx) -> nn.Module:
        plain(model, ctx)
        getattr(model, name)(*args, **kwargs)
        return model

    return shard


def divide_by_three(model: nn.Module, ctx: Ctx) -> nn.Module:
    plain(model, ctx)
    for module in (model, *model.blocks):
        module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
        module.set_gradient_divide_factor(3.0)
    return model


class LoggedAllGather:
    """A user's all-gather: allocates and communicates itself."""

    calls = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        type(self).calls += 1
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return gather(output_tensor, input_tensor, group=group, async_op=async_op)


class HalvingReduceScatter:
    """A user's reduce-scatter that does something of its own, synchronously."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        scatter(output_tensor, input_tensor, op=op, group=group)
        output_tensor.mul_(0.5)
        return None


def custom_comms(model: nn.Module, ctx: Ctx) -> nn.Module:
    plain(model, ctx)
    for module in model.modules():
        if hasattr(module, "set_custom_all_gather"):
            module.set_custom_all_gather(LoggedAllGather())
            module.set_custom_reduce_scatter(HalvingReduceScatter())
    return model


def all_reduce_hook(model: nn.Module, ctx: Ctx) -> nn.Module:
    plain(model, ctx)
    for module in model.modules():
        if hasattr(module, "set_all_reduce_hook"):
            module.set_all_reduce_hook(lambda output: output.mul_(0.25))
    return model


def shard_dim_1(model: nn.Module, ctx: Ctx) -> nn.Module:
    def placement(param: nn.Parameter) -> Shard | None:
        return Shard(1) if param.ndim == 2 and param.shape[1] % ctx.world_size == 0 else None

    return plain(model, ctx, shard_placement_fn=placement)


def ignored(model: nn.Module, ctx: Ctx) -> nn.Module:
    skipped = {model.blocks[0].norm1.weight, model.norm.weight}
    return plain(model, ctx, ignored_params=skipped)


def mixed_policies(model: nn.Module, ctx: Ctx) -> nn.Module:
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    back = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, output_dtype=torch.float32, cast_forward_inputs=True
    )
    for index, block in enumerate(model.blocks):
        fully_shard(block, mesh=ctx.mesh, mp_policy=back if index % 2 else half)
    return fully_shard(model, mesh=ctx.mesh)


def no_input_cast(model: nn.Module, ctx: Ctx) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    model.embed.to(torch.float32)
    return plain(model, ctx, mp_policy=policy)


def toggle_reshard(model: nn.Module, step: int) -> None:
    model.set_reshard_after_forward(step % 2 == 0)
    model.blocks[0].set_reshard_after_forward(True, recurse=False)


def unshard_first(model: nn.Module, step: int) -> None:
    if step % 2:
        model.unshard()
        model.blocks[1].unshard()
    else:
        handle = model.blocks[0].unshard(async_op=True)
        if step % 4 and handle is not None:
            handle.wait()


def sync_last(model: nn.Module, step: int) -> None:
    model.set_requires_gradient_sync(step % 2 == 1)
    model.blocks[1].set_requires_gradient_sync(True, recurse=False)


def all_reduce_last(model: nn.Module, step: int) -> None:
    model.set_requires_all_reduce(step % 2 == 1)


def keep_after_backward(model: nn.Module, step: int) -> None:
    model.set_reshard_after_backward(step % 2 == 1)


def freeze_some(model: nn.Module, step: int) -> None:
    model.blocks[0].gate.weight.requires_grad_(step % 2 == 0)
    model.embed.requires_grad_(False)


def prefetch_two(model: nn.Module, ctx: Ctx) -> nn.Module:
    plain(model, ctx)
    blocks = list(model.blocks)
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 3])
        block.set_modules_to_backward_prefetch(blocks[max(0, index - 2) : index][::-1])
    return model


def toggle_prefetch(model: nn.Module, step: int) -> None:
    model.blocks[0].set_modules_to_forward_prefetch(list(model.blocks[1 : 1 + step % 3]))


ROWS = [
    Row("set_modules_to_forward_prefetch and _backward_prefetch", prefetch_two),
    Row("prefetch lists that change", plain, toggle_prefetch),
    Row("hsdp 2x2", partial(mesh_2d, shape=(2, 2)), ranks=4),
    Row(
        "hsdp 2x2, bf16",
        partial(
            mesh_2d,
            shape=(2, 2),
            mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        ),
        ranks=4,
    ),
    Row("hsdp (N,1)", partial(mesh_2d, shape=(2, 1))),
    Row("hsdp (1,N)", partial(mesh_2d, shape=(1, 2))),
    Row("set_requires_all_reduce", partial(mesh_2d, shape=(2, 2)), all_reduce_last, ranks=4),
    Row("reshard_after_forward=2", partial(plain, reshard_after_forward=2), ranks=4),
    Row("set_reshard_after_forward", plain, toggle_reshard),
    Row("set_reshard_after_backward", plain, keep_after_backward, micro_steps=2),
    Row("set_requires_gradient_sync of a submodule", plain, sync_last),
    Row("unshard", plain, unshard_first),
    Row("set_gradient_divide_factor", divide_by_three),
    Row("set_force_sum_reduction_for_comms", calling("set_force_sum_reduction_for_comms", True)),
    Row("set_all_reduce_hook", all_reduce_hook),
    Row("set_custom_all_gather and _reduce_scatter", custom_comms),
    Row(
        "set_reduce_scatter_unused_params",
        calling("set_reduce_scatter_unused_params", True),
        newest_only=True,
    ),
    Row(
        "set_separate_reduce_scatter_group",
        calling("set_separate_reduce_scatter_group", True),
        newest_only=True,
    ),
    Row(
        "set_reduce_scatter_max_input_buffers",
        calling("set_reduce_scatter_max_input_buffers", 2),
        newest_only=True,
    ),
    Row(
        "set_allocate_memory_from_process_group_for_comm",
        calling("set_allocate_memory_from_process_group_for_comm", True),
    ),
    Row("Shard(1)", shard_dim_1),
    Row("ignored_params", ignored),
    Row("different policies", mixed_policies),
    Row("frozen, flipped", plain, freeze_some),
]


def row_case(ctx: Ctx, name: str) -> dict[str, Any]:
    row = next(r for r in ROWS if r.name == name)
    case = CASES["llama"]

    def make() -> nn.Module:
        torch.manual_seed(0)
        return row.shard(Llama().to(ctx.device), ctx)

    def run(model: nn.Module, first: int, steps: int) -> Any:
        step = iter(range(first * row.micro_steps, 1000))

        def loss(batch: Any) -> Tensor:
            row.before_step(model, next(step))
            return case.loss(model, batch)

        return train(
            model, case, ctx, steps, run=loss, first_step=first, micro_steps=row.micro_steps
        )

    oracle, model = make(), make()
    model.compile(backend="graphshard", fullgraph=True, options={"fallback": "error"})
    assert_equal(run(oracle, 0, 4), run(model, 0, 4))
    counts = []
    for net in (oracle, model):
        with count_collectives() as counted:
            run(net, 4, 2)
        counts.append((counted.all_gather, counted.reduce_scatter, counted.all_reduce))
    report = graphshard.explain(model)
    assert not report.reasons, report.reasons
    assert report.captured == report.present
    model._compiled_call_impl = None  # a following eager step equals the oracle
    for net in (oracle, model):
        row.before_step(net, 1)
    assert_equal(
        train(oracle, case, ctx, 1, first_step=9), train(model, case, ctx, 1, first_step=9)
    )
    return {"eager": counts[0], "compiled": counts[1]}


@pytest.mark.parametrize("row", ROWS, ids=lambda r: r.name)
def test_row(pool: Pool, row: Row) -> None:
    if row.newest_only and not hasattr(dist, "all_gather_single"):
        pytest.skip("not in this torch")
    if capped(row.ranks) < row.ranks:
        pytest.skip(f"needs {row.ranks} ranks")
    for seen in pool.run(row.ranks, row_case, row.name, timeout_s=200):
        assert seen["compiled"] == seen["eager"]


def gather_order(ctx: Ctx, lists: dict[int, list[int]]) -> list[str]:
    """FQNs in the order in which forward issues all-gathers and first waits for them."""
    from graphshard.runtime import gather

    torch.manual_seed(0)
    model = plain(Llama().to(ctx.device), ctx)
    for index, targets in lists.items():
        blocks = [model.blocks[t] for t in targets]
        model.blocks[index].set_modules_to_forward_prefetch(blocks)
    model.compile(backend="graphshard", fullgraph=True, options={"fallback": "error"})
    seen: list[str] = []
    issue, wait = gather.Gather._issue, gather.Gather.wait

    def logged_issue(self: Any, held: Any) -> None:
        seen.append(f"+{self._live.fqn}")
        issue(self, held)

    def logged_wait(self: Any) -> Any:
        seen.append(f"={self._live.fqn}")
        return wait(self)

    gather.Gather._issue, gather.Gather.wait = logged_issue, logged_wait
    try:
        CASES["llama"].loss(model, CASES["llama"].batch(0, ctx.rank, ctx.device))
    finally:
        gather.Gather._issue, gather.Gather.wait = issue, wait
    return [entry.replace("blocks.", "").replace("(root)", "r") for entry in seen]


def test_gathers_are_issued_as_the_prefetch_lists_say(pool: Pool) -> None:
    default = ["+r", "=r", "+0", "=0", "+1", "=1", "+2", "=2", "+3", "=3"]
    two_ahead = ["+r", "=r", "+0", "=0", "+1", "+2", "=1", "=2", "+3", "=3"]
    for order in pool.run(2, gather_order, {}):
        assert order == default
    for order in pool.run(2, gather_order, {0: [1, 2]}):
        assert order == two_ahead
    for order in pool.run(2, gather_order, {0: [3]}):
        assert order == ["+r", "=r", "+0", "=0", "+3", "+1", "=1", "+2", "=2", "=3"]
