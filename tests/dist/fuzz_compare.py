"""What eager FSDP2 and graphshard have to agree on after each call of a fuzzer's case."""

from typing import Any

from fuzz_cases import Call, Forward, Step
from parity import difference
from torch import nn
from torch.distributed.fsdp import FSDPModule

from graphshard.capture.root_state import handle_of

Seen = dict[str, Any]


def fsdp_modules(model: nn.Module) -> dict[str, FSDPModule]:
    return {n: m for n, m in model.named_modules() if isinstance(m, FSDPModule)}


def groups_of(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return groups if groups is not None else [g for g in [state._fsdp_param_group] if g]


def gathered_modules(model: nn.Module) -> list[str]:
    found = []
    for name, module in fsdp_modules(model).items():
        groups = groups_of(module)
        if any(not g.is_sharded or g._all_gather_result is not None for g in groups):
            found.append(name)
    return found


def is_only_forward(call: Call, seen: Seen) -> bool:
    """Whether no backward followed, because of the call or because nothing requires grad."""
    trained = any(value is True for name, value in seen.items() if name.endswith("requires grad"))
    return isinstance(call, Forward | Step) and not trained


def problem_of(
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
    may_give_back = is_only_forward(call, expected) or _leaves_outputs(call)
    return _other_state(oracle, model, may_give_back)


def _leaves_outputs(call: Call) -> bool:
    """FSDP2 never comes to the backward of a group that only an unused output needs."""
    return isinstance(call, Step) and len(call.uses) < 2


def _other_state(oracle: nn.Module, model: nn.Module, may_give_back: bool) -> str | None:
    """Each group is where FSDP2 leaves it; what FSDP2 keeps gathered, the runtime keeps."""
    theirs = fsdp_modules(oracle)
    for name, module in fsdp_modules(model).items():
        for ours, other in zip(groups_of(module), groups_of(theirs[name]), strict=True):
            where = f"group {name or '(root)'}"
            if ours._training_state != other._training_state:
                return f"{where}: {ours._training_state}, not {other._training_state}"
            if ours.is_sharded == other.is_sharded:
                continue
            if not ours.is_sharded:
                return f"{where} stays gathered"
            if not _is_held(module) and not may_give_back:
                return f"{where} is not kept"
    return None


def _is_held(module: nn.Module) -> bool:
    handle = handle_of(module)
    return handle is not None and any(live.kept is not None for live in handle.lives)


def is_gathered(module: nn.Module) -> bool:
    return _is_held(module) or any(not group.is_sharded for group in groups_of(module))
