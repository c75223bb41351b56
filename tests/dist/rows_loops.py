"""Rows of the contract about what happens around a step: optimizers, activation checkpointing,
evaluation, several forwards or backwards, several models, methods other than `forward`.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from contract_loop import Loop, assert_nothing_gathered, is_compiled, train_by
from contract_models import CHAIN, Chain, plain
from contract_row import Row
from contract_setups import compile_roots
from models import BATCH, DIM, Batch, Case
from parity import train
from pool import Ctx
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from graphshard.capture.root_state import root_states_under

# -- optimizers ----------------------------------------------------------------------------------


def clipped(loop: Loop, step: int) -> None:
    loss = loop.loss(step)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.25)
    loop.note("norm", norm)
    loop.finish(loss)


def in_backward(loop: Loop, step: int) -> None:
    """Each parameter is updated and its gradient freed as soon as that is reduced."""
    stepped: list[str] = []

    def hook(param: Tensor, name: str) -> None:
        stepped.append(name)
        torch.optim.SGD([param], lr=0.1).step()
        param.grad = None

    handles = [
        p.register_post_accumulate_grad_hook(partial(hook, name=n))
        for n, p in loop.model.named_parameters()
    ]
    loss = loop.loss(step)
    loss.backward()
    for handle in handles:
        handle.remove()
    assert sorted(stepped) == sorted(n for n, _ in loop.model.named_parameters())
    assert all(p.grad is None for p in loop.model.parameters())
    loop.finish(loss)


# -- activation checkpointing --------------------------------------------------------------------


def rerun(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def selective() -> Any:
    return create_selective_checkpoint_contexts(keep_products)


def rerun_selective(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False, context_fn=selective)


def gathered_once_each(model: nn.Module, compiled: bool) -> None:
    """A block: once in forward, once in backward. The root: kept from forward to backward."""
    for record in root_states_under(model) if compiled else []:
        for live in record.groups:
            per_step = 1 if live.fqn == "(root)" else 2
            assert live.counters.all_gathers == per_step * live.counters.forwards > 0, live.fqn


# -- evaluation, several forwards and backwards --------------------------------------------------


def evaluating(loop: Loop, step: int) -> None:
    """After a forward without grad nothing stays gathered. (Eager FSDP2 keeps the root, which
    `reshard` gives back, so that both go on from the same state.)"""
    loop.advance(step)
    for mode in (torch.no_grad, torch.inference_mode):
        loop.model.eval()
        with mode():
            loop.note(mode.__name__, loop.loss(100 + step).clone())
        if is_compiled(loop.model):
            assert_nothing_gathered(loop.model)
        loop.model.reshard()
        loop.model.train()


def one_backward_of_two(loop: Loop, step: int) -> None:
    first, second = loop.loss(step), loop.loss(100 + step)
    (first * second.detach() + second).backward()
    loop.note("second", second)
    loop.finish(first)


def two_backwards(loop: Loop, step: int) -> None:
    """In the order of the forwards, and in the other order."""
    losses = [loop.loss(step), loop.loss(100 + step)]
    for loss in losses if step % 2 else reversed(losses):
        loss.backward()
    loop.finish(losses[0])


def retained(loop: Loop, step: int) -> None:
    loss = loop.loss(step)
    loss.backward(retain_graph=True)
    loss.backward()
    loop.finish(loss)


def dropped_forward(loop: Loop, step: int) -> None:
    """Its outputs are never used; `reshard` takes back what it left gathered for backward."""
    loop.loss(100 + step)
    loop.model.reshard()
    assert_nothing_gathered(loop.model)
    loop.advance(step)


class Floats(nn.Module):
    """Embedded tokens in, so that there is an input with a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Chain()
        self.inner.embed = nn.Identity()
        self.blocks = self.inner.blocks
        self.taken: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def embedded(step: int, rank: int, device: torch.device) -> Batch:
    tokens, target = CHAIN.batch(step, rank, device)
    return F.one_hot(tokens % DIM, DIM).float(), target


def input_gradients(loop: Loop, step: int) -> None:
    """By `backward`, with those of the parameters; by `autograd.grad`, which leaves them alone."""
    x, target = loop.batch(100 + step)
    x.requires_grad_()
    (alone,) = torch.autograd.grad(loop.run((x, target)), x)
    assert all(p.grad is None for p in loop.model.parameters())
    loop.note("alone", alone)
    loss = loop.run((x, target))
    loss.backward()
    loop.note("with the parameters'", x.grad)
    loop.finish(loss)


# -- two models ----------------------------------------------------------------------------------


class Gan(nn.Module):
    """A generator and a discriminator, each an FSDP root of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.roots = nn.ModuleList(Floats() for _ in range(2))
        for root, width in zip(self.roots, (DIM, 1), strict=True):
            root.inner.head = nn.Linear(DIM, width)


def shard_roots(model: nn.Module, ctx: Ctx) -> nn.Module:
    for root in model.roots:
        plain(root, ctx)
    return model


def noise(step: int, rank: int, device: torch.device) -> Batch:
    g = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(BATCH, DIM, generator=g).to(device), torch.ones(BATCH, 1, device=device)


def gan_step(loop: Loop, step: int) -> None:
    """The discriminator learns from a true and a detached sample, then the generator through it."""
    makes, judges = loop.model.roots
    z, true = loop.batch(step)
    score = F.binary_cross_entropy_with_logits
    fake = makes(z)
    for sample, label in ((z + 1, true), (fake.detach(), 1 - true)):
        loss = score(judges(sample), label)
        loss.backward()
        loop.note(f"discriminator {len(loop.trace.buffers)}", loss)
    of_judge = torch.optim.SGD(judges.parameters(), lr=0.1)
    of_judge.step()
    of_judge.zero_grad()
    loss = score(judges(fake), true)
    loss.backward()
    judges.zero_grad()
    loop.finish(loss)


# -- methods other than forward ------------------------------------------------------------------


class Writer(Chain):
    """A chain with two methods of its own: one that calls the model too, one that does not."""

    def generate(self, tokens: Tensor, count: int) -> Tensor:
        for _ in range(count):
            following = self(tokens)[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat((tokens, following), 1)
        return tokens + self.head(self.embed(tokens)).argmax(-1)

    def encode(self, tokens: Tensor) -> Tensor:
        return self.blocks[0](self.embed(tokens)).mean(1)

    def skipping(self, tokens: Tensor) -> Tensor:
        """The model, and a way around its blocks."""
        return self(tokens) + self.head(self.embed(tokens))


def with_methods(model: nn.Module, ctx: Ctx) -> nn.Module:
    plain(model, ctx)
    for name in ("encode", "generate", "skipping"):
        register_fsdp_forward_method(model, name)
    return model


def generating(loop: Loop, step: int) -> None:
    """Text and codes between two training steps, and an `encode` that is trained through."""
    loop.advance(step)
    tokens = loop.batch(100 + step)[0][:, :4]
    loop.model.eval()
    with torch.no_grad():
        loop.note("text", loop.model.generate(tokens, 3))
        loop.note("codes", loop.model.encode(tokens))
    loop.model.reshard()
    loop.model.train()


def trained_through(loop: Loop, step: int, method: str) -> None:
    loop.advance(step)
    loss = getattr(loop.model, method)(loop.batch(step)[0]).square().mean()
    loss.backward()
    loop.finish(loss)


LOOPS, CHECKPOINTING = "Training loops", "Activation checkpointing"
WRITER = replace(CHAIN, build=Writer)
FLOATS = replace(CHAIN, build=Floats, batch=embedded)
GAN = Case("gan", Gan, plain, noise, lambda model, batch: model.roots[0](batch[0]).mean())


def _optimizer(name: str, kind: Any, **kwargs: Any) -> Row:
    make = partial(kind, foreach=True, **kwargs)
    return Row(LOOPS, name, case=CHAIN, train=partial(train, optimizer=make))


def _checkpointed(name: str, fewer_gathers: bool = False, **kwargs: Any) -> Row:
    case = replace(CHAIN, build=partial(Chain, **kwargs))
    check = gathered_once_each
    return Row(CHECKPOINTING, name, case=case, check=check, fewer_gathers=fewer_gathers)


ROWS = (
    Row(LOOPS, "`clip_grad_norm_`", case=CHAIN, train=train_by(clipped)),
    _optimizer("SGD with momentum (`foreach`)", torch.optim.SGD, lr=0.1, momentum=0.9),
    _optimizer("Adam (`foreach`)", torch.optim.Adam, lr=1e-2),
    _optimizer("AdamW (`foreach`)", torch.optim.AdamW, lr=1e-2),
    Row(
        LOOPS,
        "optimizer in backward (`register_post_accumulate_grad_hook`)",
        case=CHAIN,
        train=train_by(in_backward),
    ),
    Row(
        LOOPS,
        "`train`, `eval`, `no_grad`, `inference_mode`: nothing stays gathered after a forward "
        "without grad",
        case=CHAIN,
        train=train_by(evaluating),
    ),
    Row(LOOPS, "two forwards, one backward", case=CHAIN, train=train_by(one_backward_of_two)),
    Row(LOOPS, "two forwards, two backwards", case=CHAIN, train=train_by(two_backwards)),
    Row(
        LOOPS,
        "two sharded models in one loop (a GAN)",
        shard_roots,
        case=GAN,
        compile=compile_roots,
        train=train_by(gan_step),
    ),
    Row(LOOPS, "gradient of an input", case=FLOATS, train=train_by(input_gradients)),
    Row(LOOPS, "`retain_graph`", case=CHAIN, train=train_by(retained)),
    Row(LOOPS, "a forward without backward", case=CHAIN, train=train_by(dropped_forward)),
    Row(
        LOOPS,
        "`register_fsdp_forward_method`, and `generate()` in a loop",
        with_methods,
        case=WRITER,
        train=train_by(generating),
        fewer_gathers=True,  # FSDP2 gives the root back after `generate`, and gathers it again
    ),
    Row(
        LOOPS,
        "a registered method that is trained",
        with_methods,
        case=WRITER,
        train=train_by(partial(trained_through, method="encode")),
    ),
    Row(
        LOOPS,
        "a registered method that calls the model, trained",
        with_methods,
        case=WRITER,
        train=train_by(partial(trained_through, method="skipping")),
        fewer_gathers=True,  # as above
    ),
    _checkpointed("`checkpoint(block, use_reentrant=False)`", visit=rerun),
    _checkpointed("`checkpoint_wrapper`", wrap=checkpoint_wrapper),
    _checkpointed("selective policy, functional", fewer_gathers=True, visit=rerun_selective),
    _checkpointed(
        "selective policy, `checkpoint_wrapper`",
        wrap=partial(checkpoint_wrapper, context_fn=selective),
    ),
    Row(
        CHECKPOINTING,
        "checkpointed, two forwards, one backward",
        case=replace(CHAIN, build=partial(Chain, visit=rerun)),
        train=train_by(one_backward_of_two),
    ),
)
