"""Bitwise comparison of two training runs, and a count of the collectives really issued.

In a case that runs on every rank:

    oracle, model = twin(case, ctx)
    expected = train(oracle, case, ctx, 10)
    compiled = torch.compile(model, backend="graphshard")
    assert_equal(expected, train(model, case, ctx, 10, run=partial(case.loss, compiled)))
"""

import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from models import CASES, Batch, Case
from pool import Ctx
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import graphshard
from graphshard.schedule.plan import Plan

# In one graph, and with no way back to eager FSDP2.
STRICT: dict[str, Any] = {"fullgraph": True, "options": {"fallback": "error"}}
# FSDP2's own order, of which is known what it holds, gathers and sends.
FSDP2_ORDER: dict[str, Any] = {
    "fullgraph": True,
    "options": {"fallback": "error", "schedule": "fsdp2"},
}
# Gathers in bfloat16, reductions in float32.
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

Optimizer = Callable[[Any], torch.optim.Optimizer]


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """One op for all parameters, where they are DTensors of one mesh."""
    found = list(parameters)
    meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in found}
    fused = len(meshes) == 1 and None not in meshes
    return torch.optim.AdamW(found, lr=1e-2, weight_decay=0.1, fused=fused)


sgd: Optimizer = partial(torch.optim.SGD, lr=1e-1, momentum=0.9)


@dataclass(frozen=True)
class Trace:
    """What a training run left on this rank: local tensors by FQN, copied when they were taken."""

    losses: list[Tensor] = field(default_factory=list)  # one per micro-step
    grads: list[dict[str, Tensor | None]] = field(
        default_factory=list
    )  # one per step, before the optimizer
    params: dict[str, Tensor] = field(default_factory=dict)  # after the last step
    buffers: dict[str, Tensor] = field(default_factory=dict)


def build(case: Case, ctx: Ctx, *, seed: int = 0, **kwargs: Any) -> nn.Module:
    """The case's model, sharded (`kwargs` to `fully_shard`); equal seeds give equal weights."""
    torch.manual_seed(seed)
    return case.shard(case.build().to(ctx.device), ctx.mesh, **kwargs)


def twin(case: Case, ctx: Ctx, *, seed: int = 0, **kwargs: Any) -> tuple[nn.Module, nn.Module]:
    """Two sharded models with equal weights that share nothing."""
    return build(case, ctx, seed=seed, **kwargs), build(case, ctx, seed=seed, **kwargs)


def reseed(ctx: Ctx, step: int, seed: int = 0) -> None:
    """Dropout masks depend on seed, step and rank only, not on what ran before."""
    torch.manual_seed(1_000_003 * (seed + 1) + 1_000 * step + ctx.rank)


def train(
    model: nn.Module,
    case: Case,
    ctx: Ctx,
    steps: int,
    run: Callable[[Batch], Tensor] | None = None,
    optimizer: Optimizer | None = None,
    *,
    micro_steps: int = 1,
    first_step: int = 0,
    seed: int = 0,
) -> Trace:
    """Train `model` and record what comparison needs.

    `run(batch)` is the forward up to the loss, `case.loss(model, batch)` by default. With several
    micro-steps, gradients are synchronised on the last of each step. Resume with `first_step` so
    that batches and dropout masks go on.
    """
    run = run or partial(case.loss, model)
    # AdamW makes whole steps of what is noise around zero.
    optimizer = optimizer or (sgd if _is_compiled() else adamw)
    optim = optimizer(model.parameters())
    trace = Trace()
    for step in range(first_step, first_step + steps):
        for micro in range(micro_steps):
            if micro_steps > 1:
                model.set_requires_gradient_sync(micro == micro_steps - 1)
            index = step * micro_steps + micro
            reseed(ctx, index, seed)
            loss = run(case.batch(index, ctx.rank, ctx.device))
            loss.backward()
            trace.losses.append(loss.detach().clone())
            case.check(model)
        trace.grads.append(grads(model))
        optim.step()
        optim.zero_grad()
    assert_same_plans(model, ctx, ragged=case.ragged)
    trace.params.update((name, local(p)) for name, p in model.named_parameters())
    trace.buffers.update((name, local(b)) for name, b in model.named_buffers())
    return trace


def assert_same_plans(model: nn.Module, ctx: Ctx, *, ragged: bool = False) -> None:
    """All ranks have the same plans to the byte; ragged: the same collectives.

    Asked through the store: adds no collective.
    """
    found = graphshard.plans(model) if "graphshard.backend" in sys.modules else []
    plans = sorted({p.fingerprint for p in found}) if ragged else _texts(model, found)
    store = dist.distributed_c10d._get_default_store()
    number = store.add(f"plans/{ctx.rank}", 1)
    store.set(f"plans/{number}/{ctx.rank}", json.dumps(plans))
    for rank in range(ctx.world_size):
        text = store.get(f"plans/{number}/{rank}").decode()
        theirs = json.loads(text)
        assert theirs == plans, (
            f"rank {rank} has other plans than rank {ctx.rank}: {_first_gap(theirs, plans)}"
        )


def _first_gap(theirs: list[str], ours: list[str]) -> str:
    """Where the first plans that differ do so."""
    if len(theirs) != len(ours):
        return f"{len(theirs)} plans and {len(ours)}"
    one, other = next(pair for pair in zip(theirs, ours, strict=True) if pair[0] != pair[1])
    same = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    parts = (text[max(0, same - 300) : same + 100] for text in (one, other))
    return " | ".join(parts)


_TEXTS: WeakKeyDictionary[nn.Module, tuple[list[Plan], list[str]]] = WeakKeyDictionary()


def _texts(model: nn.Module, plans: list[Plan]) -> list[str]:
    """The files of the plans, written once for as long as they are the same objects."""
    before, texts = _TEXTS.get(model, ([], []))
    if [id(plan) for plan in before] != [id(plan) for plan in plans]:
        texts = [plan.to_json(indent=None) for plan in plans]
        _TEXTS[model] = plans, texts
    return texts


def local(tensor: Tensor | None) -> Tensor | None:
    """A copy of this rank's part."""
    if tensor is None:
        return None
    tensor = tensor.detach()
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not is_traceable_wrapper_subclass(own):
        return own.clone()
    inner = [local(getattr(own, name)) for name in own.__tensor_flatten__()[0]]
    return torch.cat([t.reshape(-1).view(torch.uint8) for t in inner if t is not None])


def grads(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: local(p.grad) for name, p in model.named_parameters()}


def backward_twice(model: nn.Module, case: Case, ctx: Ctx) -> list[Tensor | None]:
    """Losses and gradients of two steps, each with two backward passes of one loss."""
    seen: list[Tensor | None] = []
    for step in range(2):
        reseed(ctx, step)
        loss = case.loss(model, case.batch(step, ctx.rank, ctx.device))
        loss.backward(retain_graph=True)
        loss.backward()
        seen += [loss.detach(), *(local(p.grad) for p in model.parameters())]
    return seen


def assert_equal(expected: Trace, actual: Trace) -> None:
    """Bitwise; AssertionError names the first difference, in the order of training."""
    first, second = dict(_items(expected)), dict(_items(actual))
    assert first, "the expected trace is empty"
    only = [key for key in first.keys() ^ second.keys()]
    assert not only, f"recorded in one of the two runs only: {sorted(only)[:8]}"
    for key, value in first.items():
        problem = difference(value, second[key])
        assert problem is None, f"{key}: {problem}"


def _items(trace: Trace) -> Iterator[tuple[str, Tensor | None]]:
    per_step = len(trace.losses) // max(1, len(trace.grads))
    for step, grads in enumerate(trace.grads):
        for micro in range(per_step):
            name = f"micro-step {micro}, loss" if per_step > 1 else "loss"
            yield f"step {step}, {name}", trace.losses[step * per_step + micro]
        yield from ((f"step {step}, gradient of {name}", grad) for name, grad in grads.items())
    yield from ((f"final parameter {name}", value) for name, value in trace.params.items())
    yield from ((f"final buffer {name}", value) for name, value in trace.buffers.items())


def assert_same(expected: dict[str, Any], actual: dict[str, Any]) -> None:
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        problem = difference(value, actual[name])
        assert problem is None, f"{name}: {problem}"


def compiled_loss(how: str, model: nn.Module, case: Any) -> Any:
    """`loss(batch)` of `model`, compiled in one of the three ways that users have."""
    if how == "in place":
        model.compile(backend="graphshard", **STRICT)
        return partial(case.loss, model)
    if how == "wrapped":
        return partial(case.loss, torch.compile(model, backend="graphshard", **STRICT))
    return torch.compile(partial(case.loss, model), backend="graphshard", **STRICT)


def parity_case(ctx: Ctx, name: str, how: str, steps: int, kwargs: dict[str, Any]) -> None:
    case = CASES[name]
    oracle, model = twin(case, ctx, **kwargs)
    expected = train(oracle, case, ctx, steps)
    loss = compiled_loss(how, model, case)
    actual = train(model, case, ctx, steps, run=loss)
    assert_equal(expected, actual)
    assert_one_plan(model)


def assert_one_plan(model: nn.Module) -> None:
    plans, report = graphshard.plans(model), graphshard.explain(model)
    assert [p.summary().graphs for p in plans] == [2], str(report)
    assert report.captured == report.present == plans[0].summary().groups
    assert not report.reasons


# Of the norm: what reordered sums cost in a few steps.
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float64: 1e-9}


NOISE = 1e-6


def _is_compiled() -> bool:
    return os.environ.get("GRAPHSHARD_COMPUTE") == "inductor"


def _is_near(expected: Tensor, actual: Tensor) -> bool:
    tolerance = TOLERANCES.get(expected.dtype)
    if not _is_compiled() or tolerance is None:
        return False
    gap = (expected.double() - actual.double()).norm()
    # What should be zero (the gradient of a bias in front of a norm) is noise in both.
    noise = NOISE * math.sqrt(expected.numel())
    return bool(gap <= tolerance * expected.double().norm() + noise)


def difference(expected: Tensor | None, actual: Tensor | None) -> str | None:
    """What differs, or None if they are `torch.equal` (shape, dtype and device included).

    Where Inductor computes, the norm of the difference may be TOLERANCES of that of the tensor.
    """
    if expected is None or actual is None:
        names = ["None" if t is None else "a tensor" for t in (expected, actual)]
        return None if expected is actual else f"expected {names[0]}, got {names[1]}"
    for what in ("dtype", "shape", "device"):
        want, got = getattr(expected, what), getattr(actual, what)
        if want != got:
            return f"{what} expected {want}, got {got}"
    if torch.equal(expected, actual) or _is_near(expected, actual):
        return None
    gap = (expected.double() - actual.double()).abs()
    where = tuple(int(i) for i in (expected != actual).nonzero()[0])
    count = int((expected != actual).sum())
    return (
        f"max abs diff {gap.max().item():.3e}, {count} of {gap.numel()} elements differ, "
        f"first at {where}: "
        f"expected {expected[where].item()!r}, got {actual[where].item()!r}"
    )


@dataclass
class Collectives:
    """Filled when `count_collectives` ends. A coalesced collective counts once."""

    all_gather: int = 0
    reduce_scatter: int = 0
    all_reduce: int = 0
    order: list[str] = field(default_factory=list)  # kinds, as they were issued


_KINDS = {
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "c10d::allgather_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "c10d::reduce_scatter_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
    "c10d::allreduce_coalesced_": "all_reduce",
}


@contextmanager
def count_collectives() -> Iterator[Collectives]:
    """Count the collectives issued inside, by any API, synchronous or not.

    Every Python and C++ way to a collective passes the dispatcher's c10d ops, and the profiler sees
    those without a dispatch mode (under which Dynamo would not compile) and without a patch (which
    would change what Dynamo traces). It follows this thread and the autograd engine's.
    """
    counts = Collectives()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        yield counts
    # Not `profiled.events()`: it makes a tree of all ops, which takes longer than the steps.
    results = profiled.profiler.kineto_results  # type: ignore[union-attr]
    ops = sorted((e.start_ns(), e.name()) for e in results.events() if e.name() in _KINDS)
    counts.order = [_KINDS[name] for _, name in ops]
    for kind, number in Counter(counts.order).items():
        setattr(counts, kind, number)
