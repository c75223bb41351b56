"""What frameworks do to a model around sharding and compiling: eager FSDP2's bits all the same."""

import types
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import CASES, Batch
from parity import assert_equal, build, train
from pool import Ctx, Pool
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import graphshard

pytestmark = pytest.mark.dist

CASE = CASES["llama"]
Loss = Callable[[nn.Module, Batch], Tensor]


def in_place(model: nn.Module, **options: Any) -> None:
    model.compile(backend="graphshard", options={"promote": True, **options})


# -- forward is replaced ---------------------------------------------------------------------------


def half(model: Any) -> None:
    """As transformers does for mixed precision: autocast within, float32 outside."""
    own = model.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return own(*args, **kwargs).float()

    model.forward = types.MethodType(forward, model)


def twice_as_warm(model: Any) -> None:
    """A plain function on the instance."""
    own = model.forward
    model.forward = lambda *args, **kwargs: own(*args, **kwargs) / 2


def replaced(ctx: Ctx, change: Callable[[Any], None], when: str) -> int:
    oracle, model = build(CASE, ctx), build(CASE, ctx)
    change(oracle)
    if when == "before":
        change(model)
    in_place(model)
    if when == "later":
        CASE.loss(model, CASE.batch(0, ctx.rank, ctx.device)).backward()
        model.zero_grad()
    if when != "before":
        change(model)
    assert_equal(train(oracle, CASE, ctx, 2), train(model, CASE, ctx, 2))
    return graphshard.explain(model).captured


@pytest.mark.parametrize(
    ("change", "when"), [(half, "before"), (half, "later"), (twice_as_warm, "after")]
)
def test_forward_is_replaced(pool: Pool, change: Callable[[Any], None], when: str) -> None:
    assert pool.run(2, replaced, change, when) == [5, 5]


def redirected_loss(model: Any, batch: Batch) -> Tensor:
    """One call runs another function, with the hooks of the module's own call (Fabric)."""
    own = model.forward

    def forward(*args: Any) -> Tensor:
        model.forward = own
        return F.cross_entropy(own(args[0]).flatten(0, 1), args[1].flatten())

    model.forward = forward
    loss: Tensor = model(*batch)
    return loss


def redirected(ctx: Ctx) -> int:
    oracle, model = build(CASE, ctx), build(CASE, ctx)
    in_place(model)
    expected = train(oracle, CASE, ctx, 3, partial(redirected_loss, oracle))
    assert_equal(expected, train(model, CASE, ctx, 3, partial(redirected_loss, model)))
    return graphshard.explain(model).captured


def test_forward_is_redirected_for_one_call(pool: Pool) -> None:
    assert pool.run(2, redirected) == [5, 5]


# -- modules are called outside of the root's forward ----------------------------------------------


def chunked(model: Any, batch: Batch) -> Tensor:
    tokens, target = batch
    hidden = model(tokens)
    pairs = zip(hidden.chunk(3, 1), target.chunk(3, 1), strict=True)
    parts = [
        F.cross_entropy(model.head(h).flatten(0, 1), t.flatten(), reduction="sum") for h, t in pairs
    ]
    return torch.stack(parts).sum() / target.numel()


class Headless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        whole = CASE.build()
        self.embed, self.blocks, self.norm = whole.embed, whole.blocks, whole.norm
        self.head = whole.head
        self.register_buffer("cos", whole.cos)
        self.register_buffer("sin", whole.sin)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.norm(x)


def headless(ctx: Ctx, keeps: bool, *, joined: bool = False) -> Any:
    """joined: the head and the norm are one group."""
    torch.manual_seed(0)
    model = Headless()
    last = [model.norm, model.head] if joined else model.head
    for module in (*model.blocks, last, model):
        fully_shard(module, mesh=ctx.mesh, reshard_after_forward=not keeps)
    return model


def loss_by_chunks(ctx: Ctx, keeps: bool, compiles_head: bool) -> tuple[int, int]:
    oracle, model = headless(ctx, keeps), headless(ctx, keeps)
    in_place(model)
    if compiles_head:
        in_place(model.head)
    expected = train(oracle, CASE, ctx, 3, partial(chunked, oracle))
    assert_equal(expected, train(model, CASE, ctx, 3, partial(chunked, model)))
    report = graphshard.explain(model)
    return report.captured, report.present


@pytest.mark.parametrize(("keeps", "compiles_head"), [(False, False), (True, True)])
def test_the_head_is_called_for_each_chunk(pool: Pool, keeps: bool, compiles_head: bool) -> None:
    for captured, present in pool.run(2, loss_by_chunks, keeps, compiles_head):
        assert captured == present - (not compiles_head)


class Carried(torch.autograd.Function):
    """A loss whose gradient is known already."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, gradient: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0], None, None


def backward_by_chunks(model: Any, batch: Batch) -> Tensor:
    """torchtitan's loss: each chunk's backward runs at once, the head gathered all the while."""
    tokens, target = batch
    hidden, head = model(tokens), model.head
    parts = [part.detach().requires_grad_() for part in hidden.chunk(3, 1)]
    head.set_reshard_after_forward(False)
    head.set_reshard_after_backward(False)
    head.set_requires_gradient_sync(False, recurse=False)
    head.unshard()
    total = torch.zeros(())
    for place, (part, labels) in enumerate(zip(parts, target.chunk(3, 1), strict=True)):
        if place == len(parts) - 1:
            head.set_requires_gradient_sync(True, recurse=False)
        logits = head(part).flatten(0, 1)
        loss = F.cross_entropy(logits, labels.flatten(), reduction="sum") / target.numel()
        loss.backward()
        total += loss.detach()
    head.set_reshard_after_forward(True)
    head.set_reshard_after_backward(True)
    head.reshard()
    return Carried.apply(hidden, torch.cat([part.grad for part in parts], 1), total)


def losses_by_chunks(ctx: Ctx, joined: bool) -> None:
    oracle, model = headless(ctx, False, joined=joined), headless(ctx, False, joined=joined)
    in_place(model)
    expected = train(oracle, CASE, ctx, 3, partial(backward_by_chunks, oracle))
    assert_equal(expected, train(model, CASE, ctx, 3, partial(backward_by_chunks, model)))
    assert graphshard.explain(model).captured >= 5


@pytest.mark.parametrize("joined", [False, True])
def test_the_backward_of_each_chunk_runs_at_once(pool: Pool, joined: bool) -> None:
    pool.run(2, losses_by_chunks, joined)


# -- hooks -----------------------------------------------------------------------------------------


def hooked(ctx: Ctx, where: str) -> tuple[int, int]:
    """Full-backward hooks see the same gradients as often."""
    oracle, model = build(CASE, ctx), build(CASE, ctx)
    seen: dict[str, list[Tensor]] = {"eager": [], "compiled": []}
    for name, own in (("eager", oracle), ("compiled", model)):
        target = own if where == "root" else own.get_submodule(where)

        def hook(module: nn.Module, inputs: Any, outputs: Any, name: str = name) -> None:
            seen[name].append(outputs[0].clone())

        target.register_full_backward_hook(hook)
    in_place(model)
    assert_equal(train(oracle, CASE, ctx, 2), train(model, CASE, ctx, 2))
    assert len(seen["eager"]) == len(seen["compiled"]) == 2
    assert all(map(torch.equal, seen["eager"], seen["compiled"]))
    report = graphshard.explain(model)
    return report.captured, report.present


@pytest.mark.parametrize("where", ["root", "blocks.1.attention"])
def test_full_backward_hooks(pool: Pool, where: str) -> None:
    pool.run(2, hooked, where)


# -- settings of Dynamo ----------------------------------------------------------------------------


def suppressed(ctx: Ctx) -> int:
    """axolotl has errors of Dynamo and of backends suppressed."""
    oracle, model = build(CASE, ctx), build(CASE, ctx)
    in_place(model)
    expected = train(oracle, CASE, ctx, 2)
    with torch._dynamo.config.patch(suppress_errors=True):
        assert_equal(expected, train(model, CASE, ctx, 2))
    return graphshard.explain(model).captured


def test_errors_are_suppressed(pool: Pool) -> None:
    assert pool.run(2, suppressed) == [5, 5]


# -- weights come later ----------------------------------------------------------------------------


def assigned(ctx: Ctx) -> int:
    """Sharded on the meta device and compiled; the weights are assigned after that."""
    oracle = build(CASE, ctx)
    with torch.device("meta"):
        model = CASE.build()
    CASE.shard(model, ctx.mesh)
    in_place(model)
    state = {name: value.clone() for name, value in oracle.state_dict().items()}
    model.load_state_dict(state, assign=True)
    fresh = CASE.build()
    for name, buffer in fresh.named_buffers():
        owner, _, own = name.rpartition(".")
        model.get_submodule(owner).register_buffer(own, buffer, persistent=False)
    model.requires_grad_(True)
    assert_equal(train(oracle, CASE, ctx, 2), train(model, CASE, ctx, 2))
    return graphshard.explain(model).captured


def test_weights_are_assigned_after_compiling(pool: Pool) -> None:
    assert pool.run(2, assigned) == [5, 5]


# -- other things are compiled by the same name ----------------------------------------------------


def by_the_same_name(ctx: Ctx) -> int:
    """torchtune compiles the loss, the scaling of gradients and the optimizer's step, too."""
    oracle, model = build(CASE, ctx), build(CASE, ctx)
    in_place(model)
    loss_of = torch.compile(F.cross_entropy, backend="graphshard")

    def loss(batch: Batch) -> Tensor:
        tokens, target = batch
        found: Tensor = loss_of(model(tokens).flatten(0, -2), target.flatten())
        return found

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made = torch.optim.SGD(list(parameters), lr=0.1, foreach=False)
        if made.param_groups[0]["params"][0] is next(model.parameters()):
            made.step = torch.compile(made.step, backend="graphshard")  # type: ignore[method-assign]
        return made

    expected = train(oracle, CASE, ctx, 2, optimizer=optimizer)
    assert_equal(expected, train(model, CASE, ctx, 2, loss, optimizer))
    return graphshard.explain(model).captured


def test_loss_and_optimizer_are_compiled_too(pool: Pool) -> None:
    assert pool.run(2, by_the_same_name, timeout_s=240) == [5, 5]


def forwards_alone(ctx: Ctx) -> tuple[int, str]:
    """VeOmni compiles the functions of blocks, before these are sharded."""
    oracle = build(CASE, ctx)
    torch.manual_seed(0)
    model: Any = CASE.build().to(ctx.device)
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend="graphshard")
    CASE.shard(model, ctx.mesh)
    assert_equal(train(oracle, CASE, ctx, 3), train(model, CASE, ctx, 3))
    report = graphshard.explain(model)
    return report.captured, str(report)


def test_functions_of_modules_are_compiled(pool: Pool) -> None:
    for captured, report in pool.run(2, forwards_alone, timeout_s=240):
        assert captured == 5, report
