"""Sharding calls in, the Python lines that do the same out.

The lines run as they are, where `model` is the module, and `process_group`, `device_mesh` and the
like are what was passed. Blocks of a container that are all sharded alike become one loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from graphshard.migrate.arguments import Call


@dataclass(frozen=True, slots=True)
class Sharded:
    """One call: the module's name in the model ("" is the model), and what was passed.

    mesh: name of a variable, empty for the default. ignores: `ignored` is passed.
    """

    fqn: str
    call: Call
    mesh: str = ""
    ignores: bool = False


def lines_of(
    model: nn.Module, done: Sequence[Sharded], setup: Sequence[str], ignored: Sequence[str]
) -> list[str]:
    """setup: lines that make the meshes. ignored: names of the parameters that stay whole."""
    lines = [*_imports(done, setup), *setup]
    if ignored:
        names = "".join(f"{name!r}, " for name in ignored)
        lines.append(f"ignored = {{model.get_parameter(n) for n in ({names})}}")
    # A child has more names in its path than its parent: children first, whatever the order was.
    for place, members in sorted(_alike(done).items(), key=lambda item: -_depth(item[1][0].fqn)):
        lines += _loop(model, place, members) or [
            line for one in members for line in _calls(one, expression(model, one.fqn))
        ]
    return lines


def _imports(done: Sequence[Sharded], setup: Sequence[str]) -> list[str]:
    made = " ".join(setup)
    names = [n for n in ("DeviceMesh", "init_device_mesh") if f"{n}(" in made or f"{n}." in made]
    lines = ["import torch"] if any(s.call.mp_policy or s.call.buffer_dtype for s in done) else []
    if names:
        lines.append(f"from torch.distributed.device_mesh import {', '.join(names)}")
    used = ["CPUOffloadPolicy"] if any(s.call.offload_policy for s in done) else []
    used += ["MixedPrecisionPolicy"] if any(s.call.mp_policy for s in done) else []
    return [*lines, f"from torch.distributed.fsdp import {', '.join([*used, 'fully_shard'])}"]


def _depth(fqn: str) -> int:
    return len(fqn.split(".")) if fqn else 0


def _alike(done: Sequence[Sharded]) -> dict[tuple[str, ...], list[Sharded]]:
    """Calls that differ only in the first number of their path stand together."""
    found: dict[tuple[str, ...], list[Sharded]] = {}
    for one in done:
        found.setdefault((*_split(one.fqn), "; ".join(_calls(one, "it"))), []).append(one)
    return found


def _split(fqn: str) -> tuple[str, str, str]:
    """ "layers.3.mlp" is ("layers", "*", "mlp"); without a number, (fqn, "", "")."""
    parts = fqn.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    if at is None:
        return fqn, "", ""
    return ".".join(parts[:at]), "*", ".".join(parts[at + 1 :])


def _loop(model: nn.Module, place: tuple[str, ...], members: Sequence[Sharded]) -> list[str]:
    """One loop, if the calls are on every module of a list in its order; else nothing."""
    container, number, inside, _ = place
    if not number or len(members) < 2:
        return []
    owner = model.get_submodule(container)
    names = [".".join(filter(None, (container, str(i), inside))) for i in range(len(members))]
    if not isinstance(owner, (nn.ModuleList, nn.Sequential)) or len(owner) != len(members):
        return []
    if [one.fqn for one in members] != names:
        return []
    inner = expression(owner[0], inside).replace("model", "block", 1)
    calls = [f"    {line}" for line in _calls(members[0], inner)]
    return [f"for block in {expression(model, container)}:", *calls]


def expression(model: nn.Module, fqn: str) -> str:
    """`model.layers[0].mlp` for "layers.0.mlp"."""
    text, module = "model", model
    for part in filter(None, fqn.split(".")):
        if part.isidentifier() and getattr(module, part, None) is module.get_submodule(part):
            text += f".{part}"
        elif part.isdecimal() and isinstance(module, (nn.ModuleList, nn.Sequential)):
            text += f"[{part}]"
        else:
            return f"model.get_submodule({fqn!r})"
        module = module.get_submodule(part)
    return text


def _calls(one: Sharded, name: str) -> list[str]:
    call = one.call
    keywords = {
        "mesh": one.mesh,
        "reshard_after_forward": "" if call.reshard_after_forward is None else "False",
        "mp_policy": "" if call.mp_policy is None else policy_text(call.mp_policy),
        "offload_policy": "",
        "ignored_params": "ignored" if one.ignores else "",
    }
    if call.offload_policy is not None:
        pins = "" if call.offload_policy.pin_memory else "pin_memory=False"
        keywords["offload_policy"] = f"CPUOffloadPolicy({pins})"
    given = "".join(f", {key}={value}" for key, value in keywords.items() if value)
    lines = [f"fully_shard({name}{given})"]
    if not call.prefetches:
        lines.append(f"{name}.set_modules_to_backward_prefetch([{name}])  # of itself: none")
    return lines


def policy_text(policy: MixedPrecisionPolicy) -> str:
    """Only what differs from the default."""
    default = MixedPrecisionPolicy()
    names = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    given = {name: getattr(policy, name) for name in names}
    text = ", ".join(
        f"{k}={v}" for k, v in given.items() if v is not getattr(default, k)
    )  # str of a dtype is how it is written
    return f"MixedPrecisionPolicy({text})"


def buffer_line(fqns: Sequence[str], dtype: torch.dtype) -> str:
    """The line that casts the named buffers."""
    names = "".join(f"{name!r}, " for name in fqns)
    return f"for n in ({names}): b = model.get_buffer(n); b.data = b.to({dtype})"
