"""Guards: few, none per parameter, and every change that another graph needs is noticed."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from between_steps import assert_sharded
from heads import Block, compiled, inputs, two_heads
from parity import STRICT, assert_same, grads
from pool import Ctx, Pool
from torch import Tensor, nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import graphshard
from graphshard.capture import dynamo
from graphshard.capture.root_state import handle_of
from graphshard.errors import RuntimeStateError

pytestmark = pytest.mark.dist


class Scales(nn.Module):
    """One module with as many parameters as wanted."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        for index in range(count):
            self.register_parameter(f"scale{index}", nn.Parameter(torch.rand(16)))

    def forward(self, x: Tensor) -> Tensor:
        for index in range(self.count):
            x = x * getattr(self, f"scale{index}")
        return x


def guards_of(model: nn.Module) -> int:
    """Leaf guards of all variants of a module that was compiled in place."""
    wrapped: Any = model._compiled_call_impl
    inner = wrapped.__wrapped__._torchdynamo_orig_callable
    entries = _debug_get_cache_entry_list(inner.__code__)
    return sum(1 for entry in entries for _ in _leaves(entry.guard_manager.root))


def _leaves(manager: Any) -> Iterator[Any]:
    yield from manager.get_leaf_guards()
    if hasattr(manager, "get_key_value_managers"):
        pairs = manager.get_key_value_managers().values()
        children = [one for pair in pairs for one in pair if one is not None]
    else:
        children = manager.get_child_managers()
    for child in children:
        yield from _leaves(child)


def count_guards(ctx: Ctx, modules: int, params: int) -> int:
    torch._dynamo.reset()
    model = nn.Sequential(*[nn.Sequential(Scales(params)) for _ in range(modules)]).to(ctx.device)
    for module in model:
        fully_shard(module, mesh=ctx.mesh)
    compiled(fully_shard(model, mesh=ctx.mesh))
    model(inputs(ctx)).sum().backward()
    return guards_of(model)


def counted(ctx: Ctx) -> dict[tuple[int, int], int]:
    return {size: count_guards(ctx, *size) for size in ((2, 1), (2, 9), (3, 9), (4, 9))}


def test_guards_do_not_grow_with_parameters(pool: Pool) -> None:
    for seen in pool.run(2, counted, timeout_s=240):
        assert seen[2, 1] == seen[2, 9], seen
        assert seen[4, 9] - seen[3, 9] == seen[3, 9] - seen[2, 9] <= 45, seen


Step = Callable[[nn.Module, Any, Ctx], None]


def train_once(model: nn.Module, run: Any, ctx: Ctx, seed: int) -> dict[str, Any]:
    model.zero_grad()
    first, second = run(inputs(ctx, seed))
    (first.float().square().mean() + second.float().square().mean()).backward()
    return {"first": first.detach(), "second": second.detach(), **grads(model)}


def freeze_one(model: Any, ctx: Ctx) -> None:
    model.trunk[0].up.weight.requires_grad_(False)


def thaw_it(model: Any, ctx: Ctx) -> None:
    model.trunk[0].up.weight.requires_grad_(True)


def reload(model: Any, ctx: Ctx) -> None:
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    model.to_empty(device=ctx.device)
    model.load_state_dict({name: 2 * value for name, value in state.items()}, assign=True)


def gather_ahead(model: Any, ctx: Ctx) -> None:
    model.trunk[1].unshard()
    model.first.unshard()


def other_output_dtype(model: Any, ctx: Ctx) -> None:
    policy = MixedPrecisionPolicy(output_dtype=torch.bfloat16)
    model.second._get_fsdp_state()._mp_policy = policy


def other_module(model: Any, ctx: Ctx) -> None:
    torch.manual_seed(7)
    model.trunk[1].up = nn.Linear(16, 37).to(ctx.device)


def hook_a_reduction(model: Any, ctx: Ctx) -> None:
    """A plan of before may reduce the group in parts, or out of turn."""
    model.trunk[0].set_all_reduce_hook(lambda output: output.mul_(2))


def to_eager(model: Any, ctx: Ctx) -> None:
    handle = handle_of(model.trunk[1])
    if handle is not None:
        handle.root_state.leave_eager(handle.fqns[0], "of this test")


# What changes between two steps, and how many graphs may be compiled for it.
CHANGES: dict[str, tuple[Callable[[Any, Ctx], None], int]] = {
    "nothing": (lambda model, ctx: None, 0),
    "one parameter is frozen": (freeze_one, 1),
    "parameters are replaced": (reload, 0),
    "a group is gathered ahead": (gather_ahead, 0),
    "outputs are cast": (other_output_dtype, 1),
    "a module is replaced": (other_module, 1),
    "a reduction gets a hook": (hook_a_reduction, 1),
    "training ends": (lambda model, ctx: model.eval(), 0),
}


def change_case(ctx: Ctx, name: str) -> None:
    change, graphs = CHANGES[name]
    oracle, model = two_heads(ctx), compiled(two_heads(ctx))
    for step in range(4):
        if step == 1:
            for net in (oracle, model):
                change(net, ctx)
        expected, actual = (train_once(net, net, ctx, step) for net in (oracle, model))
        assert_same(_local(expected), _local(actual))
        assert len(graphshard.plans(model)) <= 1 + (graphs if step else 0)
    assert len(graphshard.plans(model)) == 1 + graphs


def _local(seen: dict[str, Any]) -> dict[str, Any]:
    return {k: v.to_local() if hasattr(v, "to_local") else v for k, v in seen.items()}


@pytest.mark.parametrize("name", list(CHANGES))
def test_a_change_between_steps_is_noticed(pool: Pool, name: str) -> None:
    pool.run(2, change_case, name)


def flipped_back(ctx: Ctx) -> None:
    oracle, model = two_heads(ctx), compiled(two_heads(ctx))
    for step, change in enumerate((None, freeze_one, thaw_it, freeze_one, thaw_it)):
        for net in (oracle, model):
            if change is not None:
                change(net, ctx)
        frames = dynamo.frames_seen()
        expected, actual = (train_once(net, net, ctx, step) for net in (oracle, model))
        assert_same(expected, actual)
        assert dynamo.frames_seen() == frames or step < 2
    assert_sharded(model)


def test_what_is_flipped_back_needs_no_new_graph(pool: Pool) -> None:
    pool.run(2, flipped_back)


def left_to_fsdp2(ctx: Ctx) -> None:
    oracle = two_heads(ctx)
    model = two_heads(ctx)
    model.compile(backend="graphshard")
    for step in range(3):
        if step == 1:
            to_eager(model, ctx)
        assert_same(train_once(oracle, oracle, ctx, step), train_once(model, model, ctx, step))
    assert graphshard.explain(model).reasons["trunk.1"] == "of this test"


@pytest.mark.filterwarnings("ignore::graphshard.GraphshardWarning")
def test_a_group_that_is_left_to_fsdp2(pool: Pool) -> None:
    pool.run(2, left_to_fsdp2)


def widened(ctx: Ctx) -> None:
    model = compiled(two_heads(ctx))
    train_once(model, model, ctx, 0)
    model.to(torch.float64)
    with pytest.raises(RuntimeStateError, match="GS401"):
        model(inputs(ctx).double())


def test_another_dtype_is_an_error(pool: Pool) -> None:
    pool.run(2, widened)


def flips_inside(ctx: Ctx) -> None:
    """The user's own step flips flags before its forward: nothing of ours runs in between."""

    def steps(model: Any) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        @torch._dynamo.disable
        def flip() -> None:
            model.trunk.requires_grad_(not model.trunk[0].up.weight.requires_grad)

        def step(x: Tensor) -> tuple[Tensor, Tensor]:
            flip()
            return model(x)

        return step

    oracle, model = two_heads(ctx), two_heads(ctx)
    run = torch.compile(steps(model), backend="graphshard")
    for step in range(5):
        expected = train_once(oracle, steps(oracle), ctx, step)
        assert_same(expected, train_once(model, run, ctx, step))
    assert graphshard.explain(model).captured == 4
    assert len(graphshard.plans(model)) == 2


@pytest.mark.filterwarnings("ignore::graphshard.GraphshardWarning")
def test_flags_that_flip_inside_a_compiled_step(pool: Pool) -> None:
    pool.run(2, flips_inside)


def blocks_apart(ctx: Ctx) -> tuple[int, int]:
    """Blocks compiled one by one: those that are alike share a graph, a frozen one has its own."""

    def make() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(*[Block(16) for _ in range(6)]).to(ctx.device)
        for block in model:
            fully_shard(block, mesh=ctx.mesh)
        return fully_shard(model, mesh=ctx.mesh)

    def step(model: Any, seed: int) -> dict[str, Any]:
        model.zero_grad()
        model(inputs(ctx, seed).requires_grad_()).square().mean().backward()
        return grads(model)

    oracle, model = make(), make()
    options = {**STRICT["options"], "promote": False}
    for block in model:
        block.compile(backend="graphshard", fullgraph=True, options=options)
    assert_same(step(oracle, 0), step(model, 0))
    graphs = graphshard.explain(model).graphs
    for net in (oracle, model):
        net[3].norm.requires_grad_(False)
    assert_same(step(oracle, 1), step(model, 1))
    for net in (oracle, model):
        net[3].norm.requires_grad_(True)
        net[4].norm.requires_grad_(False)
    frames = dynamo.frames_seen()
    assert_same(step(oracle, 2), step(model, 2))
    assert dynamo.frames_seen() == frames
    return graphs, graphshard.explain(model).graphs


def test_one_of_many_blocks_is_frozen(pool: Pool) -> None:
    for before, after in pool.run(2, blocks_apart):
        assert (before, after) == (2, 4)
