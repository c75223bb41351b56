"""What a case of the fuzzer means: eager FSDP2 and graphshard do each of its calls in turn.

In: a `FuzzCase`, on every rank. Out: an `Outcome`, equal on all ranks in its verdict. After each
call everything that a user can see is compared: outputs, losses, gradients, parameters and buffers
with `torch.equal`, and the state of every group. Ranks say to each other through the store how a
call went, so that none waits for another that has stopped.
"""

import contextlib
import copy
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from fuzz_build import compiled, module_of, sharded
from fuzz_cases import (
    NOT_RECURSIVE,
    Call,
    Choose,
    Forward,
    Freeze,
    FuzzCase,
    Hook,
    Reload,
    Reshard,
    Set,
    Step,
    Unshard,
)
from fuzz_compare import (
    Seen,
    fsdp_modules,
    gathered_modules,
    groups_of,
    is_gathered,
    is_only_forward,
    problem_of,
)
from on_host import as_if_apart
from parity import local
from pool import Ctx
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graphshard.capture import fallback
from graphshard.capture.root_state import root_states_under

EQUAL, DIFFERS, REFUSED = "equal", "differs", "refused"


@dataclass(frozen=True)
class Outcome:
    """verdict: equal, differs, or refused (eager FSDP2 raised); why: in which call, and what.

    in_graph, calls: forward calls of groups that ran in a graph, and all of them. reasons: why
    others did not.
    """

    verdict: str
    why: str = ""
    in_graph: int = 0
    calls: int = 0
    reasons: tuple[str, ...] = ()


@dataclass
class Side:
    """One of the two models.

    shut: what the oracle had to reshard before each write, in turn. managed: FSDP2's parameters
    (`FSDPParam`) by the names that they have at first.
    """

    case: FuzzCase
    ctx: Ctx
    model: nn.Module
    call: Callable[..., Any]
    shut: list[list[str]]
    is_oracle: bool
    managed: dict[str, Any]
    names: list[str]
    optimizer: Any = None
    tally: dict[str, int] = field(default_factory=lambda: {"in_graph": 0, "calls": 0})


def run_case(ctx: Ctx, case: FuzzCase) -> Outcome:
    """Both models through all calls, up to the first difference or refusal."""
    with as_if_apart():
        return _run_case(ctx, case)


def _run_case(ctx: Ctx, case: FuzzCase) -> Outcome:
    fallback.warn_once.cache_clear()
    try:
        oracle, model = sharded(case, ctx), sharded(case, ctx)
    except Exception as error:
        return Outcome(REFUSED, f"sharding: {type(error).__name__}: {error}")
    shut: list[list[str]] = []
    sides = (
        Side(case, ctx, oracle, oracle, shut, True, _managed(oracle), _names(oracle)),
        Side(case, ctx, model, compiled(case, model), shut, False, _managed(model), _names(model)),
    )
    for side in sides:
        make_optimizer(side)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verdict, why = _in_step(sides, ctx)
    reasons = sorted({r for record in root_states_under(model) for r in record.outside.values()})
    fixed = sorted({r for record in root_states_under(model) for r in record.reasons.values()})
    tally = sides[1].tally
    return Outcome(verdict, why, tally["in_graph"], tally["calls"], (*reasons, *fixed))


def run_oracle(ctx: Ctx, case: FuzzCase) -> None:
    """Eager FSDP2 alone through all calls. Raises what it raises."""
    model = sharded(case, ctx)
    side = Side(case, ctx, model, model, [], True, _managed(model), _names(model))
    make_optimizer(side)
    for number, call in enumerate(case.calls):
        perform(side, call, number)


def _in_step(sides: tuple[Side, Side], ctx: Ctx) -> tuple[str, str]:
    oracle, model = sides
    for number, call in enumerate(oracle.case.calls):
        where = f"call {number}, {call!r}: "
        expected, error = _attempt(oracle, call, number)
        if _somewhere(ctx, error is not None):
            return REFUSED, where + (error or "on another rank").strip().splitlines()[-1]
        actual, error = _attempt(model, call, number)
        problem = error or problem_of(expected, actual, oracle.model, model.model, call)
        if _somewhere(ctx, problem is not None):
            return DIFFERS, where + (problem or "on another rank")
        if is_only_forward(call, expected):  # then what stays gathered is a declared difference
            for side in sides:
                _shut(side)
    return EQUAL, ""


def _attempt(side: Side, call: Call, number: int) -> tuple[Seen, str | None]:
    try:
        return perform(side, call, number) | _state(side), None
    except Exception:
        return {}, traceback.format_exc()


def _somewhere(ctx: Ctx, here: bool) -> bool:
    """Whether it is so on any rank; asked through the store, which adds no collective."""
    store = dist.distributed_c10d._get_default_store()
    number = store.add(f"fuzz/{ctx.rank}", 1)
    store.set(f"fuzz/{number}/{ctx.rank}", str(here))
    answers = [store.get(f"fuzz/{number}/{rank}").decode() for rank in range(ctx.world_size)]
    return "True" in answers


def make_optimizer(side: Side) -> None:
    """Not foreach where ignored parameters are plain tensors beside DTensors."""
    params = list(_parameters(side).values())
    match side.case.optimizer:
        case "sgd":
            side.optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False)
        case "adamw-fused" if not side.case.ignored:
            side.optimizer = torch.optim.AdamW(params, fused=True)
        case "adamw-foreach" if not side.case.ignored:
            side.optimizer = torch.optim.AdamW(params, foreach=True)
        case "in-backward":
            side.optimizer = torch.optim.SGD(params, lr=0.0, foreach=False)
            for param in filter(lambda p: p.requires_grad, params):
                param.register_post_accumulate_grad_hook(_stepped)
        case _:
            side.optimizer = torch.optim.AdamW(params, foreach=False)


@torch.no_grad()
def _stepped(param: nn.Parameter) -> None:
    """An optimizer in backward, which leaves no gradient behind."""
    param.sub_(param.grad, alpha=0.05)
    param.grad = None


def _halved(output: Tensor) -> None:
    """A power of 2 rounds nothing, whatever it is applied to first."""
    output.mul_(0.5)


# -- calls -----------------------------------------------------------------------------------------


def perform(side: Side, call: Call, number: int) -> Seen:
    """Do it; what it showed."""
    match call:
        case Step():
            return _train(side, call, number)
        case Forward():
            return _forward_only(side, call, number)
        case Set():
            method = getattr(module_of(side.case, side.model, call.group), f"set_{call.what}")
            method(call.value, **({} if call.what in NOT_RECURSIVE else {"recurse": call.recurse}))
        case Unshard():
            group = module_of(side.case, side.model, call.group)
            handle = group.unshard(call.wait is not None)
            if call.wait:
                handle.wait()
            return {"gathered": is_gathered(group)}
        case Reshard():
            module_of(side.case, side.model, call.group).reshard()
        case Hook():
            module_of(side.case, side.model, call.group).set_all_reduce_hook(_halved)
        case Freeze():
            _shut(side)  # set on a gathered parameter, it counts until the next reshard only
            side.model.get_submodule(call.module).requires_grad_(call.value)
        case Choose():
            side.model.get_submodule(call.module).chosen = call.index
        case Reload():
            _shut(side)
            saved = {k: copy.deepcopy(v) for k, v in side.model.state_dict().items()}
            half = {k: v * 0.5 if v.is_floating_point() else v for k, v in saved.items()}
            side.model.load_state_dict(half, assign=call.assign)
            if call.assign:
                make_optimizer(side)
    return {}


def _train(side: Side, step: Step, number: int) -> Seen:
    seen: Seen = {}
    for micro in range(step.micro_steps):
        if step.sync != "as set":
            _sync(side.model, step.sync == "always" or micro == step.micro_steps - 1)
        # Backward too: a checkpoint calls its module again.
        with _uncompiled(side.model) if step.eager else contextlib.nullcontext():
            seen |= _micro_step(side, step, number, micro)
    if step.clip:
        shards = [p for p in _parameters(side).values() if isinstance(p, DTensor)]
        if any(p.grad is not None for p in shards):
            norm = torch.nn.utils.clip_grad_norm_(shards, 0.1, foreach=False)
            seen["norm"] = norm.full_tensor() if isinstance(norm, DTensor) else norm
    seen |= {f"gradient of {n}": local(p.grad) for n, p in _parameters(side).items()}
    if step.optimize:
        _shut(side)
        side.optimizer.step()
    if step.zero != "keep":
        side.optimizer.zero_grad(set_to_none=step.zero == "none")
    return seen


def _sync(model: nn.Module, value: bool) -> None:
    for module in fsdp_modules(model).values():
        module.set_requires_gradient_sync(value, recurse=False)


def _micro_step(side: Side, step: Step, number: int, micro: int) -> Seen:
    seen: Seen = {}
    total: Any = 0
    for forward in range(step.forwards):
        key = f"micro-step {micro}, forward {forward}: "
        rows = step.rows + (side.ctx.rank if step.ragged else 0)
        args, kwargs = _inputs(side, rows, step.length, 100 * number + 10 * micro + forward)
        if step.input_grad and args[0].is_floating_point():
            args[0].requires_grad_()
        outputs = _outputs(_called(side, step.eager, args, kwargs))
        seen |= {f"{key}output {i}": out.detach().clone() for i, out in enumerate(outputs)}
        used = sorted({use % len(outputs) for use in step.uses})
        total = total + sum(outputs[i].float().square().mean() * (i + 1) for i in used)
        seen[f"{key}input"] = args[0]
    seen[f"micro-step {micro}: requires grad"] = total.requires_grad
    if total.requires_grad:
        for left in reversed(range(step.backwards)):
            total.backward(retain_graph=left > 0)
    if side.case.optimizer == "in-backward":  # it has written
        _shut(side)
    for name, value in list(seen.items()):
        if name.endswith("input"):
            seen[name] = local(value.grad)
    return seen


def _forward_only(side: Side, call: Forward, number: int) -> Seen:
    args, kwargs = _inputs(side, call.rows, call.length, 100 * number)
    side.model.train(call.mode == "train")
    quiet = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
    how = _uncompiled(side.model) if call.eager else contextlib.nullcontext()
    with quiet.get(call.mode, contextlib.nullcontext)(), how:
        outputs = _outputs(_called(side, call.eager, args, kwargs))
        seen = {f"output {i}": out.detach().clone() for i, out in enumerate(outputs)}
    side.model.train()
    return seen


def _inputs(side: Side, rows: int, length: int, seed: int) -> tuple[list[Tensor], Seen]:
    """The same for both models; also dropout starts from here."""
    tree, rank = side.case.tree, side.ctx.rank
    torch.manual_seed(2 * seed + rank)
    shape = (rows, length, tree.width)
    x = torch.randint(tree.vocab, shape[:2]) if tree.vocab else torch.randn(shape)
    kwargs = {"extra": torch.randn(shape).to(side.ctx.device)} if tree.extra else {}
    return [x.to(side.ctx.device)], kwargs


def _called(side: Side, eager: bool, args: list[Tensor], kwargs: Seen) -> Any:
    if side.is_oracle or eager:
        return side.model(*args, **kwargs)
    before = [(live, live.counters.forwards) for live in _lives(side.model)]
    counts = {live.number: was for live, was in before}
    result = side.call(*args, **kwargs)
    lives = _lives(side.model)
    side.tally["in_graph"] += sum(g.counters.forwards > counts.get(g.number, 0) for g in lives)
    side.tally["calls"] += _used_groups(side.model)
    return result


def _lives(model: nn.Module) -> list[Any]:
    return [live for record in root_states_under(model) for live in record.groups]


def _used_groups(model: nn.Module) -> int:
    """Groups of which some module runs: those that are not in a part that was not chosen."""
    idle = [m for n in model.modules() for m in getattr(n, "idle", list)()]
    skipped = {id(inner) for module in idle for inner in module.modules()}
    used = [m for m in fsdp_modules(model).values() if id(m) not in skipped]
    return len({id(group) for module in used for group in groups_of(module)})


@contextlib.contextmanager
def _uncompiled(model: nn.Module) -> Iterator[None]:
    """Read and put back as users do, where a root waits for its first call too."""
    kept = [(module, module._compiled_call_impl) for module in model.modules()]
    for module, _ in kept:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in kept:
            module._compiled_call_impl = call


def _outputs(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return list(result.values() if isinstance(result, dict) else result)


# -- states ----------------------------------------------------------------------------------------


def _shut(side: Side) -> None:
    """Reshard what the oracle has gathered: a change of parameters would not reach it."""
    if side.is_oracle:
        side.shut.append(gathered_modules(side.model))
    for name in side.shut[-1] if side.is_oracle else side.shut.pop(0):
        module: Any = side.model.get_submodule(name)
        module.unshard()  # waits for what is in flight
        module.reshard()


def _state(side: Side) -> Seen:
    seen: Seen = {n: local(p) for n, p in _parameters(side).items()}
    seen |= {n: p.detach().clone() for n, p in side.model.named_buffers()}
    return seen


def _managed(model: nn.Module) -> dict[str, Any]:
    groups = [group for module in fsdp_modules(model).values() for group in groups_of(module)]
    by_shard = {id(param.sharded_param): param for group in groups for param in group.fsdp_params}
    named = model.named_parameters()
    return {name: by_shard[id(p)] for name, p in named if id(p) in by_shard}


def _names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def _parameters(side: Side) -> dict[str, nn.Parameter]:
    """Shards, whether or not they are registered now, and parameters that FSDP2 does not manage."""
    shards = {name: param.sharded_param for name, param in side.managed.items()}
    others = (n for n in side.names if n not in shards)
    return shards | {name: side.model.get_parameter(name) for name in others}
