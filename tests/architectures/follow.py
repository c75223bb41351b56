"""One architecture under FSDP2, eager and compiled: whether they are equal, and in how many graphs.

In: an `Architecture`, on every rank. Out: a `Followed`. Where the compiled one differs or fails,
the model without any sharding is compiled with torch's own `aot_eager` on this rank: what that
gets wrong too is no matter of sharding.
"""

import gc
import traceback
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from architecture import Architecture
from parity import difference, local, reseed
from pool import Ctx
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from zoo import ZOO

import graphshard
from graphshard.capture import fallback

STEPS = 3
EQUAL, DIFFERS, FAILS = "equal", "differs", "fails"


@dataclass(frozen=True)
class Followed:
    """verdict: of the compiled model, against eager FSDP2. why: the first difference, or the error.

    groups: of the model; in_graphs of them run in graphs, of which there are `graphs`, forward and
    backward counted apart. breaks: why the others do not. alone: the verdict on `aot_eager` without
    sharding, where this one is not equal.
    """

    verdict: str
    why: str = ""
    groups: int = 0
    in_graphs: int = 0
    graphs: int = 0
    breaks: tuple[str, ...] = ()
    alone: str = ""

    @property
    def in_one_graph(self) -> bool:
        return self.in_graphs == self.groups and self.graphs == 2


def follow(ctx: Ctx, name: str) -> Followed:
    """Raises what eager FSDP2 raises."""
    fallback.warn_once.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = _compared(ctx, ZOO[name])
        if found.verdict != EQUAL:
            found = replace(found, alone=_alone(ctx, ZOO[name]))
    gc.collect()
    return found


def _compared(ctx: Ctx, architecture: Architecture) -> Followed:
    oracle, model = (_sharded(architecture, ctx) for _ in range(2))
    expected = _trained(oracle, architecture, ctx)
    model.compile(backend="graphshard")
    try:
        why = _first_difference(expected, _trained(model, architecture, ctx))
        verdict = DIFFERS if why else EQUAL
    except Exception:
        why, verdict = traceback.format_exc(), FAILS
    report = graphshard.explain(model)
    breaks = tuple(dict.fromkeys(report.reasons.values()))
    return Followed(verdict, why, report.present, report.captured, report.graphs, breaks)


def _alone(ctx: Ctx, architecture: Architecture) -> str:
    torch._dynamo.reset()
    expected = _trained(_built(architecture), architecture, ctx)
    model = _built(architecture)
    model.compile(backend="aot_eager")
    try:
        why = _first_difference(expected, _trained(model, architecture, ctx))
    except Exception as error:
        return f"{FAILS}: {type(error).__name__}"
    return f"{DIFFERS}: {why}" if why else EQUAL


def _built(architecture: Architecture) -> nn.Module:
    torch.manual_seed(0)
    return architecture.build().train()


def _sharded(architecture: Architecture, ctx: Ctx) -> nn.Module:
    model = _built(architecture)
    scalars = {p for p in model.parameters() if not p.dim()}  # FSDP2 refuses these
    for block in () if architecture.whole else blocks_of(model):
        fully_shard(block, mesh=ctx.mesh, ignored_params=scalars)
    return fully_shard(model, mesh=ctx.mesh, ignored_params=scalars)


def blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    """The members of the outermost lists of modules, as people shard."""
    for child in module.children():
        members = child if isinstance(child, nn.ModuleList) else ()
        for member in members:
            if isinstance(member, nn.ModuleList):
                yield from member
            elif any(True for _ in member.parameters()):
                yield member
        if not members:
            yield from blocks_of(child)


def _trained(model: nn.Module, architecture: Architecture, ctx: Ctx) -> dict[str, Tensor | None]:
    """Everything that training shows, by name, in the order in which it shows."""
    return dict(_seen(model, architecture, ctx))


def _seen(
    model: nn.Module, architecture: Architecture, ctx: Ctx
) -> Iterator[tuple[str, Tensor | None]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    for step in range(STEPS):
        reseed(ctx, step)
        loss = _loss(model(**architecture.batch(seed=10 * step + ctx.rank)))
        loss.backward()
        yield f"loss of step {step}", loss.detach().clone()
        for name, param in model.named_parameters():
            yield f"gradient of {name}, step {step}", local(param.grad)
        optimizer.step()
        optimizer.zero_grad()
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        yield f"{name} at the end", local(value)


def _loss(output: Any) -> Tensor:
    """The model's own; else of all that it returns."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss  # type: ignore[no-any-return]
    values = [value for value in _tensors(output) if value.requires_grad]
    return torch.stack([value.float().square().mean() for value in values]).sum()


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from (t for value in output.values() for t in _tensors(value))
    elif isinstance(output, (tuple, list)):
        yield from (t for value in output for t in _tensors(value))


def _first_difference(
    expected: Mapping[str, Tensor | None], actual: Mapping[str, Tensor | None]
) -> str:
    for name, value in actual.items():
        found = difference(expected[name], value)
        if found is not None:
            return f"{name}: {found}"
    return ""
