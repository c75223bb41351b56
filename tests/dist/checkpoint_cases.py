"""Drawn models that recompute activations in backward, and their steps on one rank.

`run_checkpoint_case(ctx, case)` trains a twin with eager FSDP2 and the case's compiled model, and
says whether losses, gradients and parameters are equal to the last bit.
"""

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from contract_models import mesh_of
from parity import local, reseed
from pool import Ctx
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as hook_based
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import graphshard
from graphshard.capture import fallback

WIDTH = 8
FLAVOURS = ("plain", "late stop", "reentrant", "hooks", "wrapper", "selective", "none")
EQUAL, DIFFERS, REFUSED = "equal", "differs", "refused by eager"


@dataclass(frozen=True)
class CheckpointCase:
    """reshard: of blocks. calls: of the model in one loss. micro: the setting that is off in all
    micro-steps of a step but the last ("" for steps of one). breaks: where Dynamo has to stop.
    room: for the planner to replace the checkpoints, within FSDP2's peak or much more; "": they
    stay."""

    layers: int = field(default=2, metadata={"of": (2, 3, 4)})
    flavour: str = field(default="plain", metadata={"of": FLAVOURS})
    compiled: str = field(default="root", metadata={"of": ("root", "blocks", "apart", "both")})
    breaks: str = field(default="", metadata={"of": ("", "", "loop", "block")})
    attends: bool = field(default=False, metadata={"of": (False, True)})
    nested: bool = field(default=False, metadata={"of": (False, True)})
    reshard: bool | None = field(default=None, metadata={"of": (None, True, False)})
    calls: int = field(default=1, metadata={"of": (1, 2)})
    micro: str = field(default="", metadata={"of": ("", "sync", "all_reduce")})
    replicated: bool = field(default=False, metadata={"of": (False, False, True)})
    dropout: bool = field(default=False, metadata={"of": (False, True)})
    shared: bool = field(default=False, metadata={"of": (False, False, True)})
    frozen: bool = field(default=False, metadata={"of": (False, False, True)})
    room: str = field(default="", metadata={"of": ("", "theirs", "much")})


def drawn(seed: int) -> CheckpointCase:
    """Case number `seed`; the same on every rank.

    Without sync, eager FSDP2 adds up what several calls left in an order of its own (see
    `fuzz_cases`), and a reentrant checkpoint ends its backward several times, so that every
    micro-step synchronises then. And a graph adds up what its own
    calls of a block left before what another graph left, so that there are never both.
    """
    dice = random.Random(seed)
    case = CheckpointCase(**{f.name: dice.choice(f.metadata["of"]) for f in fields(CheckpointCase)})
    if case.shared:
        case = replace(case, calls=1)
    if case.micro == "sync" and (case.calls > 1 or case.shared or case.flavour == "reentrant"):
        return replace(case, micro="")
    return case


class Mix(nn.Module):
    """Attention of one head, or nothing but two products."""

    def __init__(self, attends: bool) -> None:
        super().__init__()
        self.attends = attends
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if self.attends:
            q = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            q = q * k + v
        return self.out(q)


class Block(nn.Module):
    def __init__(self, case: CheckpointCase) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = Mix(case.attends)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2 if case.dropout else 0.0)
        self.stops = case.breaks == "block"

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm(x))
        if self.stops:
            torch._dynamo.graph_break()
        return x + self.drop(self.down(torch.relu(self.up(x))))


class Stack(nn.Module):
    def __init__(self, case: CheckpointCase) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(case) for _ in range(case.layers))
        if case.shared:  # two calls of one block in each forward
            self.blocks.append(self.blocks[0])
        self.head = nn.Linear(WIDTH, 3)
        self.recompute = _recompute(case.flavour)
        self.stops = case.breaks == "loop"

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = self.recompute(block, x)
            if self.stops:
                torch._dynamo.graph_break()
        return self.head(x)


def _saves_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    must = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if must else CheckpointPolicy.PREFER_RECOMPUTE


def _late(block: nn.Module, x: Tensor) -> Tensor:
    with set_checkpoint_early_stop(False):
        return checkpoint(block, x, use_reentrant=False)


def _recompute(flavour: str) -> Callable[[nn.Module, Tensor], Tensor]:
    if flavour == "plain":
        return partial(checkpoint, use_reentrant=False)
    if flavour == "reentrant":
        return partial(checkpoint, use_reentrant=True)
    if flavour == "late stop":
        return _late
    if flavour == "selective":
        contexts = partial(create_selective_checkpoint_contexts, _saves_products)
        return partial(checkpoint, use_reentrant=False, context_fn=contexts)
    return lambda block, x: block(x)


def build(ctx: Ctx, case: CheckpointCase) -> nn.Module:
    torch.manual_seed(0)
    model = Stack(case).to(ctx.device)
    own = list(dict.fromkeys(model.blocks))
    if case.frozen:
        own[-1].up.requires_grad_(False)
        own[0].norm.requires_grad_(False)
    if case.flavour == "hooks":
        for block in own:
            hook_based(block)
    if case.flavour == "wrapper":
        wrapped = {block: checkpoint_wrapper(block) for block in own}
        model.blocks = nn.ModuleList(wrapped[block] for block in model.blocks)
        own = list(wrapped.values())
    mesh = ctx.mesh
    if case.replicated:
        mesh = mesh_of(ctx, (ctx.world_size, 1), "replicate", "shard")
    for block in own:
        if case.nested:
            for part in (block.mix, block.down):
                fully_shard(part, mesh=mesh, reshard_after_forward=case.reshard)
        fully_shard(block, mesh=mesh, reshard_after_forward=case.reshard)
    return fully_shard(model, mesh=mesh)


def compile_in_place(model: nn.Module, case: CheckpointCase) -> None:
    rooms = {"": {}, "theirs": {"recompute": "auto"}, "much": {"memory_budget": "1000GiB"}}
    room = rooms[case.room]
    if case.compiled != "root":
        options = {"promote": case.compiled != "apart", **room}
        for block in dict.fromkeys(model.blocks):
            block.compile(backend="graphshard", options=options)
    if case.compiled in ("root", "both"):
        model.compile(backend="graphshard", options=room)


def steps(model: nn.Module, ctx: Ctx, case: CheckpointCase, count: int = 3) -> list[Any]:
    """Losses, gradients and parameters of each step."""
    seen: list[Any] = []
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    micro_steps = 2 if case.micro else 1
    for step in range(count):
        for micro in range(micro_steps):
            _set(model, case, last=micro == micro_steps - 1)
            number = step * micro_steps + micro
            reseed(ctx, number)
            total = torch.zeros((), device=ctx.device)
            for call in range(case.calls):
                x = torch.randn(2, 4, WIDTH, device=ctx.device, requires_grad=True)
                total = total + model(x).square().mean() * (call + 1)
            total.backward()
            # With a reentrant checkpoint, eager FSDP2 ends its backward too early.
            assert all(isinstance(p, DTensor) for p in model.parameters()), "left gathered"
            seen.append(("loss", total.detach().clone()))
        seen += [(f"{name} of step {step}", local(p.grad)) for name, p in model.named_parameters()]
        optim.step()
        optim.zero_grad()
    return seen + [(name, local(p)) for name, p in model.named_parameters()]


def _set(model: nn.Module, case: CheckpointCase, *, last: bool) -> None:
    assert isinstance(model, FSDPModule)
    if case.micro == "sync":
        model.set_requires_gradient_sync(last)
    if case.micro == "all_reduce":
        model.set_requires_all_reduce(last)


@dataclass(frozen=True)
class CheckpointOutcome:
    """in_graph: how many forward calls of groups ran in a graph, of how many. replaced: graphs in
    which the planner took the place of the checkpoints; repeats: those that compute more again."""

    verdict: str
    why: str = ""
    in_graph: int = 0
    groups: int = 0
    replaced: int = 0
    repeats: int = 0
    said: tuple[str, ...] = ()


def run_checkpoint_case(ctx: Ctx, case: CheckpointCase) -> CheckpointOutcome:
    try:
        expected = steps(build(ctx, case), ctx, case)
    except Exception as error:
        return CheckpointOutcome(REFUSED, f"{type(error).__name__}: {error}")
    model = build(ctx, case)
    with _noted() as said:
        compile_in_place(model, case)
        actual = steps(model, ctx, case)
    why = _first_difference(expected, actual)
    report = graphshard.explain(model)
    plans = [plan.recompute for plan in graphshard.plans(model)]
    return CheckpointOutcome(
        DIFFERS if why else EQUAL,
        why,
        report.captured,
        report.present,
        sum(own.replaced for own in plans),
        sum(bool(own.activations) for own in plans),
        tuple(said),
    )


@contextlib.contextmanager
def _noted() -> Iterator[list[str]]:
    """What graphshard warns of."""
    said: list[str] = []
    fallback.warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += [str(w.message) for w in caught if issubclass(w.category, graphshard.GraphshardWarning)]


def _first_difference(expected: list[Any], actual: list[Any]) -> str:
    for (name, first), (_, second) in zip(expected, actual, strict=True):
        if (first is None) != (second is None):
            return f"{name} is None on one side only"
        if first is None:
            continue
        if first.shape != second.shape:
            return f"{name} has shape {tuple(second.shape)}, not {tuple(first.shape)}"
        if not torch.equal(first, second):
            return f"{name} differs by {(first - second).abs().max():.3g}"
    return ""
