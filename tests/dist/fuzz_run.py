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
from contract_models import mesh_of
from fuzz_cases import (
    NOT_RECURSIVE,
    Call,
    Choose,
    Forward,
    Freeze,
    FuzzCase,
    Group,
    Reload,
    Reshard,
    Set,
    Step,
    Unshard,
)
from fuzz_models import Net
from parity import difference, local
from pool import Ctx
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

import graphshard
from graphshard.capture import fallback
from graphshard.capture.root_state import handle_of, root_states_under
from graphshard.schedule.plan import StepKind

EQUAL, DIFFERS, REFUSED = "equal", "differs", "refused"

Seen = dict[str, Any]


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
        problem = error or _problem(expected, actual, oracle.model, model.model, call)
        if _somewhere(ctx, problem is not None):
            return DIFFERS, where + (problem or "on another rank")
        if _only_forward(call, expected):  # then what stays gathered is a declared difference
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


# -- the two models --------------------------------------------------------------------------------

HALF, FULL = torch.bfloat16, torch.float32
POLICIES = {
    "": {},
    "bf16": {"param_dtype": HALF},
    "bf16-reduce-fp32": {"param_dtype": HALF, "reduce_dtype": FULL},
    "reduce-bf16": {"reduce_dtype": HALF},
    "bf16-out-fp32": {"param_dtype": HALF, "output_dtype": FULL},
    "bf16-as-given": {"param_dtype": HALF, "cast_forward_inputs": False},
}


def sharded(case: FuzzCase, ctx: Ctx) -> nn.Module:
    torch.manual_seed(0)
    model = Net(case.tree).to(ctx.device)
    for path in case.frozen:
        model.get_submodule(path).requires_grad_(False)
    ignored = {p for path in case.ignored for p in model.get_submodule(path).parameters()}
    mesh = _mesh(case.mesh, ctx)
    for group in case.groups:
        modules = [model.get_submodule(path) for path in group.modules]
        kwargs = _arguments(group, ctx) | ({"ignored_params": ignored} if ignored else {})
        fully_shard(modules if len(modules) > 1 else modules[0], mesh=mesh, **kwargs)
    if case.divide is not None:
        for module in _fsdp_modules(model).values():
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(case.divide)
    for numbers, name in (
        (case.forward_prefetch, "set_modules_to_forward_prefetch"),
        (case.backward_prefetch, "set_modules_to_backward_prefetch"),
    ):
        for number, targets in numbers:
            getattr(_group(case, model, number), name)([_group(case, model, t) for t in targets])
    return model


def _arguments(group: Group, ctx: Ctx) -> dict[str, Any]:
    def placement(param: nn.Parameter) -> Shard | None:
        return Shard(1) if param.ndim >= 2 and param.shape[1] % ctx.world_size == 0 else None

    return {
        "reshard_after_forward": group.reshard,
        "mp_policy": MixedPrecisionPolicy(**POLICIES[group.precision]),
        "shard_placement_fn": placement if group.columns else None,
        "offload_policy": CPUOffloadPolicy(pin_memory=False) if group.offload else OffloadPolicy(),
    }


def _mesh(name: str, ctx: Ctx) -> DeviceMesh:
    if name == "flat":
        return ctx.mesh
    shape = tuple(int(size) for size in name.split("x"))
    return mesh_of(ctx, shape, "replicate", "shard")


def _group(case: FuzzCase, model: nn.Module, number: int) -> Any:
    return model.get_submodule(case.groups[number].modules[0])


def _fsdp_modules(model: nn.Module) -> dict[str, FSDPModule]:
    return {n: m for n, m in model.named_modules() if isinstance(m, FSDPModule)}


def _groups_of(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return groups if groups is not None else [g for g in [state._fsdp_param_group] if g]


def compiled(case: FuzzCase, model: nn.Module) -> Callable[..., Any]:
    how: dict[str, Any] = {"backend": "graphshard", "options": dict(case.options)}
    if case.compile == "wrap":
        return torch.compile(model, **how)
    if case.compile == "step":
        return torch.compile(lambda *args, **kwargs: model(*args, **kwargs), **how)
    names = [name for group in case.groups for name in group.modules]
    for name in names if case.compile == "each" else [""]:
        model.get_submodule(name).compile(**how)
    return model


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


# -- calls -----------------------------------------------------------------------------------------


def perform(side: Side, call: Call, number: int) -> Seen:
    """Do it; what it showed."""
    match call:
        case Step():
            return _train(side, call, number)
        case Forward():
            return _forward_only(side, call, number)
        case Set():
            method = getattr(_group(side.case, side.model, call.group), f"set_{call.what}")
            method(call.value, **({} if call.what in NOT_RECURSIVE else {"recurse": call.recurse}))
        case Unshard():
            group = _group(side.case, side.model, call.group)
            handle = group.unshard(call.wait is not None)
            if call.wait:
                handle.wait()
            return {"gathered": _is_gathered(group)}
        case Reshard():
            _group(side.case, side.model, call.group).reshard()
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
    for module in _fsdp_modules(model).values():
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
    used = [m for m in _fsdp_modules(model).values() if id(m) not in skipped]
    return len({id(group) for module in used for group in _groups_of(module)})


@contextlib.contextmanager
def _uncompiled(model: nn.Module) -> Iterator[None]:
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
        side.shut.append(_open(side.model))
    for name in side.shut[0] if side.is_oracle else side.shut.pop(0):
        module: Any = side.model.get_submodule(name)
        module.unshard()  # waits for what is in flight
        module.reshard()


def _open(model: nn.Module) -> list[str]:
    found = []
    for name, module in _fsdp_modules(model).items():
        groups = _groups_of(module)
        if any(not g.is_sharded or g._all_gather_result is not None for g in groups):
            found.append(name)
    return found


def _only_forward(call: Call, seen: Seen) -> bool:
    """Whether no backward followed, because of the call or because nothing requires grad."""
    trained = any(value is True for name, value in seen.items() if name.endswith("requires grad"))
    return isinstance(call, Forward | Step) and not trained


def _state(side: Side) -> Seen:
    seen: Seen = {n: local(p) for n, p in _parameters(side).items()}
    seen |= {n: p.detach().clone() for n, p in side.model.named_buffers()}
    return seen


def _managed(model: nn.Module) -> dict[str, Any]:
    groups = [group for module in _fsdp_modules(model).values() for group in _groups_of(module)]
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


def _problem(
    expected: Seen, actual: Seen, oracle: nn.Module, model: nn.Module, call: Call
) -> str | None:
    if expected.keys() != actual.keys():
        return f"seen in one of the two only: {sorted(expected.keys() ^ actual.keys())[:8]}"
    for name, value in expected.items():
        other = actual[name]
        if isinstance(value, bool):
            problem = None if value is other else f"expected {value}, got {other}"
        else:
            problem = difference(value, other)
        if problem is not None:
            return f"{name}: {problem}"
    may_give_back = _only_forward(call, expected) or _leaves_outputs(call)
    return _other_state(oracle, model, may_give_back)


def _leaves_outputs(call: Call) -> bool:
    """FSDP2 never comes to the backward of a group that only an unused output needs."""
    return isinstance(call, Step) and len(call.uses) < 2


def _other_state(oracle: nn.Module, model: nn.Module, may_give_back: bool) -> str | None:
    """Each group is where FSDP2 leaves it; what FSDP2 keeps gathered, the runtime keeps."""
    theirs, needed = _fsdp_modules(oracle), _gathered_in_backward(model)
    for name, module in _fsdp_modules(model).items():
        for ours, other in zip(_groups_of(module), _groups_of(theirs[name]), strict=True):
            where = f"group {name or '(root)'}"
            if ours._training_state != other._training_state:
                return f"{where}: {ours._training_state}, not {other._training_state}"
            if ours.is_sharded == other.is_sharded:
                continue
            handle = handle_of(module)
            live = None if handle is None else handle.live
            if not ours.is_sharded:
                return f"{where} stays gathered"
            if live is not None and live.fqn not in needed:
                continue
            if not _is_held(module) and not may_give_back:
                return f"{where} is not kept"
    return None


def _is_held(module: nn.Module) -> bool:
    handle = handle_of(module)
    return handle is not None and handle.live is not None and handle.live.kept is not None


def _is_gathered(module: nn.Module) -> bool:
    return _is_held(module) or any(not group.is_sharded for group in _groups_of(module))


def _gathered_in_backward(model: nn.Module) -> set[str]:
    """What backward does not need is not gathered in it, and so not kept (see README.md)."""
    found: set[str] = set()
    for plan in graphshard.plans(model):
        names = {info.id: info.fqn for info in plan.groups}
        waits = () if plan.backward is None else plan.backward.of_kind(StepKind.GATHER_WAIT)
        found.update(names[step.group] for step in waits)
    return found
