"""`graphshard.plan`: the plan of a training step on machines that nobody has here."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from graphshard import fsdp2
from graphshard.compiler.planning_inputs import policy_of
from graphshard.cost.machine import Machine
from graphshard.cost.presets import preset, preset_for
from graphshard.cost.profile import calibrated, read_profile
from graphshard.errors import OfflineError, OptionsError
from graphshard.files.reading import names_file
from graphshard.offline.point import Point
from graphshard.offline.study import Study
from graphshard.offline.target import Sizes, made_of
from graphshard.offline.world import Made
from graphshard.options import parse_count, parse_options
from graphshard.schedule.plan import Plan

# How compute may be priced.
COMPUTE = ("aten", "inductor")


def plan(
    model: nn.Module | Callable[[], nn.Module],
    inputs: Any,
    *,
    world_size: int,
    hardware: str,
    memory_budget: int | str | None = None,
    ranks_per_node: int | None = None,
    schedule: str = "planned",
    reshard: str = "fsdp2",
    recompute: str | None = None,
    offload: str = "auto",
    micro_steps: int = 1,
    optimizer: str = "adamw",
    clip: bool = False,
    compute: str = "inductor",
    shard: Callable[[nn.Module], Any] | None = None,
    name: str = "plan",
) -> Plan:
    """The plan of one training step, without GPUs, weights or other ranks.

    model: on the meta device; or a function that makes one, which may call `fully_shard` itself.
    inputs: the arguments of one call on one rank, as a tuple, a dict or one tensor.
    world_size: ranks. hardware: a preset such as "h100-ib400", one with a rate between nodes such
    as "h100-200gbit", or a profile that `graphshard calibrate` wrote. ranks_per_node: None: as many
    as that hardware has. memory_budget, schedule, reshard, recompute, offload, micro_steps,
    optimizer, clip: as in `options=`.
    compute: "inductor" prices the captured ops as fused between two points of communication, about
    as the backend runs them by default; "aten" one by one, as it runs them with that option.
    shard: calls `fully_shard` on the model's parts and on the model.

    Raises OptionsError (GS103) for another `compute` or a number of ranks that is none,
    OfflineError if the model cannot be built or sharded, CaptureError if its step is not one graph,
    InfeasibleBudget if nothing fits, CostError for an unknown machine, FileError for a profile
    that cannot be read.
    """
    if parse_count("world_size", world_size, least=1) is None:
        raise OptionsError("GS103", "option world_size=None; give a number of ranks")
    own_per_node = parse_count("ranks_per_node", ranks_per_node, least=1)
    options = {
        "memory_budget": memory_budget,
        "reshard": reshard,
        "recompute": recompute,
        "offload": offload,
        "micro_steps": micro_steps,
        "optimizer": optimizer,
        "clip": clip,
        "schedule": schedule,
    }
    given = {key: value for key, value in options.items() if value is not None}
    machine = machine_of(hardware)
    policy = policy_of(parse_options(given, elsewhere={}), machine)
    per_node = own_per_node or machine.ranks_per_node
    point = Point(world_size, per_node, machine, policy, fused=is_fused(compute))

    def build(sizes: Sizes) -> Made:
        return made_of(name, (_fresh(model), inputs, *(() if shard is None else (shard,))))

    return next(Study(name, build, (point,)).answers()).fitting()


def is_fused(compute: str) -> bool:
    """Whether compute is priced as fused. Raises OptionsError for what is not in COMPUTE."""
    if compute not in COMPUTE:
        raise OptionsError("GS103", f"option compute={compute!r}; choose one of {COMPUTE}")
    return compute == "inductor"


def machine_of(hardware: str) -> Machine:
    """A preset by its name, or a calibrated profile by its path. Raises CostError."""
    if not names_file(hardware):
        return preset(hardware)
    profile = read_profile(Path(hardware))
    return calibrated(preset_for(profile.origin.device), profile)


def _fresh(model: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """The caller's own model stays as it is."""
    if not isinstance(model, nn.Module):
        return model()
    if fsdp2.states_under(model):
        raise OfflineError(
            "GS909",
            "the model is sharded already, over ranks of its own: give it unsharded with shard=, "
            "or give a function that builds and shards it",
        )
    held = next((n for n, p in model.named_parameters() if not p.is_meta), None)
    if held is not None:
        raise OfflineError(
            "GS902",
            f"parameter {held} holds data, and planning allocates nothing: build the model on "
            "the meta device (with torch.device('meta'))",
        )
    return copy.deepcopy(model)
