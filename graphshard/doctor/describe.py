"""Sharded modules as facts: groups, blocks left in a root, gradients, the machine's latency.

In: live modules and FSDP2's state of them. Out: values of `graphshard.doctor.facts`. Nothing is
changed and nothing is sent. Works before FSDP2's lazy initialisation too: a script may fail first.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graphshard import fsdp2
from graphshard.capture.root_state import handle_of, root_states_under
from graphshard.compiler.executable import Executable
from graphshard.compiler.planning_inputs import machine_for
from graphshard.cost.comm import CollectiveKind
from graphshard.cost.comm import RankGroup as Ranks
from graphshard.cost.machine import collective_us, launch_us
from graphshard.doctor.facts import ROOT_NAME, GradientFacts, GroupFacts, Stack

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
CHUNK = 2**20
# 2**64 divided by the golden ratio, as a signed number: multiples of it are far apart.
STRIDE = 0x9E3779B97F4A7C15 - 2**64
# Far above any latency: there a collective's time grows by its bandwidth alone.
BULK_BYTES = 2**30


def roots_of(sharded: Sequence[nn.Module]) -> list[nn.Module]:
    """Those of `sharded` that are in no other of them, in order."""
    inner = [m for one in sharded for m in one.modules() if m is not one]
    inside = dict.fromkeys(map(id, inner))
    return [module for module in dict.fromkeys(sharded) if id(module) not in inside]


def names_of(roots: Sequence[nn.Module]) -> dict[nn.Module, str]:
    """Every module's path from its root. With several roots all but the first have a prefix."""
    names: dict[nn.Module, str] = {}
    for number, root in enumerate(roots, start=1):
        prefix = "" if number == 1 else f"model {number}: "
        for path, module in root.named_modules():
            names.setdefault(module, prefix + (plain(path) or ROOT_NAME))
    return names


def plain(path: str) -> str:
    """Without what torch.compile and checkpoint_wrapper put into names."""
    for wrapper in WRAPPERS:
        path = path.replace(wrapper, "")
        path = path.removesuffix("." + wrapper[:-1]).removesuffix(wrapper[:-1])
    return path


def states_of(roots: Sequence[nn.Module]) -> Iterator[tuple[str, fsdp2.State]]:
    """Each state with the name of its modules; the root's own comes first."""
    names = names_of(roots)
    for root in roots:
        for state in fsdp2.states_under(root):
            yield ", ".join(names[m] for m in fsdp2.modules_of(state) if m in names), state


def describe_groups(roots: Sequence[nn.Module]) -> tuple[GroupFacts, ...]:
    return tuple(_describe(*one) for one in _groups_of(roots))


def _groups_of(
    roots: Sequence[nn.Module],
) -> Iterator[tuple[str, fsdp2.State, fsdp2.FsdpGroup]]:
    """Each group with its state, and the name of its modules, and of its mesh if they have
    several."""
    for name, state in states_of(roots):
        for group in fsdp2.fsdp_groups(state):
            yield group.name_among(name), state, group


def _describe(name: str, state: fsdp2.State, group: fsdp2.FsdpGroup) -> GroupFacts:
    handle = handle_of(fsdp2.modules_of(state)[0])
    lives = () if handle is None else handle.lives
    live = next((one for one in lives if one.fsdp.raw is group.raw), None)
    captured = live is not None and live.counters.forwards > 0
    reason = ""
    if handle is not None and live is not None:
        reasons = {**handle.root_state.outside, **handle.root_state.reasons}
        reason = reasons.get(live.fqn, "")
    kinds = [type(module).__name__.removeprefix("FSDP") for module in fsdp2.modules_of(state)]
    # FsdpParam.dtype is known after lazy initialisation only.
    cast = fsdp2.mixed_precision(state).param_dtype
    dtypes = [cast or param.sharded.dtype for param in group.params]
    return GroupFacts(
        name=name,
        kind=", ".join(kinds),
        numel=sum(math.prod(param.size) for param in group.params),
        gathered_bytes=sum(
            math.prod(p.size) * d.itemsize for p, d in zip(group.params, dtypes, strict=True)
        ),
        ranks=group.world_size,
        dtype=str(max(dtypes, key=_coarseness)).removeprefix("torch."),
        ran=captured or group.was_gathered or any(p.sharded.grad is not None for p in group.params),
        in_graph=captured,
        reason=reason,
    )


def _coarseness(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def describe_stacks(roots: Sequence[nn.Module]) -> Iterator[Stack]:
    """Containers of at least two alike modules that belong to the group of a module around them."""
    names = names_of(roots)
    for group, state in states_of(roots):
        for module in fsdp2.modules_of(state):
            for container, blocks in _unsharded_blocks(module):
                numel = sum(param.numel() for b in blocks for param in b.parameters())
                kind = type(blocks[0]).__name__
                yield Stack(names[container], kind, len(blocks), numel, group)


def _unsharded_blocks(module: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """The outermost ones in `module` that are in no sharded module inside it."""
    inner = [m for m in module.modules() if isinstance(m, fsdp2.ShardedModule) and m is not module]
    taken = {id(param) for m in inner for param in m.parameters()}
    for container in module.modules():
        if not isinstance(container, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            continue
        blocks = list(container.children())
        alike = [b for b in blocks if type(b) is type(blocks[0]) and _is_left(b, taken)]
        if len(alike) > 1:
            yield container, alike
            taken |= {id(param) for block in alike for param in block.parameters()}


def _is_left(block: nn.Module, taken: set[int]) -> bool:
    params = list(block.parameters())
    return bool(params) and not any(id(param) in taken for param in params)


def is_exact(roots: Sequence[nn.Module]) -> bool:
    """Graphs ran, and each as captured ATen ops."""
    states = [state for root in roots for state in root_states_under(root)]
    running = [plan.running for state in states for plan in state.plans.values()]
    options = [one.options for one in running if isinstance(one, Executable)]
    return bool(options) and all(each.compute == "aten" for each in options)


def numel_of(roots: Sequence[nn.Module]) -> int:
    return sum(param.numel() for root in roots for param in root.parameters())


def latency_bytes(ranks: int, device: torch.device) -> int:
    """Size of an all-gather whose transfer takes as long as its latency, on the device's preset.

    In the alpha-beta model of graphshard.cost: latency (`launch_us`) times bandwidth, n_1/2 in
    R. W. Hockney, "The Science of Computer Benchmarking" (1996).
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # GS502 is the script's to see, when it compiles
        machine = machine_for(None, device)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    group, kind = Ranks(ranks, min(ranks, local)), CollectiveKind.ALL_GATHER
    whole = collective_us(machine, kind, group, BULK_BYTES)
    us_per_byte = (whole - collective_us(machine, kind, group, BULK_BYTES / 2)) / (BULK_BYTES / 2)
    start = launch_us(machine, kind, group, 4096)
    return int(start / us_per_byte) if us_per_byte else 0


def gradients_of(roots: Sequence[nn.Module]) -> tuple[GradientFacts, ...]:
    """What `.grad` of every sharded parameter holds on this rank now."""
    found = []
    for name, _, group in _groups_of(roots):
        grads = [_local(param.sharded.grad) for param in group.params]
        norms, projections, digests = zip(*map(_numbers, grads), strict=True)
        found.append(GradientFacts(name, norms, projections, digests))
    return tuple(found)


def _local(grad: Tensor | None) -> Tensor | None:
    return grad.to_local() if isinstance(grad, DTensor) else grad


@torch.no_grad()
def _numbers(grad: Tensor | None) -> tuple[float | None, float | None, int | None]:
    """Norm, projection and digest, in pieces: a copy of the whole in double would show in the
    peak."""
    if grad is None:
        return None, None, None
    squares = torch.zeros((), dtype=torch.float64, device=grad.device)
    along, digest = squares.clone(), squares.long()
    places = torch.arange(min(CHUNK, grad.numel()), device=grad.device)
    weights, odd = places.double().cos(), places * STRIDE | 1
    for piece in grad.reshape(-1).split(CHUNK):
        wide = piece.double()
        squares += wide.dot(wide)
        along += wide.dot(weights[: wide.numel()])
        digest = digest * STRIDE + (_bits(wide) * odd[: wide.numel()]).sum()
    return float(squares.sqrt()), float(along), int(digest)


def _bits(wide: Tensor) -> Tensor:
    """As integers, whose sums wrap and so depend on no order. Zeros have one sign, and what is not
    a number is all the same."""
    return (wide + 0.0).masked_fill(wide.isnan(), math.nan).view(torch.int64)


def sharded_tensors(value: Any) -> list[DTensor]:
    """The DTensors inside what is saved: in dicts, lists, tuples, modules and optimizers."""
    if isinstance(value, nn.Module | torch.optim.Optimizer):
        value = value.state_dict()
    leaves = torch.utils._pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, DTensor)]


def local_bytes(tensors: Sequence[DTensor]) -> int:
    return sum(tensor.to_local().nbytes for tensor in tensors)


def world_of() -> tuple[int, int]:
    """Rank and world size, also before and after there is a process group."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
