"""What the planner is told: FSDP2's settings, the machine's costs, what the user leaves open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import log
from pathlib import Path

import torch
import torch.distributed as dist

from graphshard.compiler.device_memory import capacity_of, device_budget, host_budget
from graphshard.compiler.planning import PlanningInputs
from graphshard.cost.comm import CollectiveKind, RankGroup
from graphshard.cost.curve import Trust
from graphshard.cost.machine import Machine, observed_collective, observed_product
from graphshard.cost.machine_text import from_text, to_text
from graphshard.cost.optimizer import Optimizer
from graphshard.cost.presets import preset, preset_for
from graphshard.cost.profile import calibrated, read_profile
from graphshard.files.reading import names_file
from graphshard.fsdp2.node_group import local_world_size
from graphshard.fsdp2.settings import GroupSettings, settings_of
from graphshard.options import Device, Options
from graphshard.pricing.lanes import replica_ranks, shard_ranks
from graphshard.pricing.problem import PlanningPolicy
from graphshard.pricing.sizes import dtype_name
from graphshard.runtime.ballot import Ballot, whole_of
from graphshard.runtime.costs import agreed_recompute, lead_costs, say_costs
from graphshard.runtime.live import LiveGroup, roots_of
from graphshard.runtime.probe import probe
from graphshard.schedule.plan import OptimizerKind, Reshard

GRID = 1.03


def planning_inputs(
    groups: Sequence[LiveGroup], options: Options, ballots: Sequence[Ballot]
) -> PlanningInputs:
    """The order for a graph of `groups`. Costs are the lowest rank's, so that all plan alike."""
    fsdp = [live.fsdp for live in groups]
    machine = machine_for(options.machine, fsdp[0].device)
    # Without torchrun all ranks are taken to be on one node.
    machine = replace(machine, ranks_per_node=local_world_size() or dist.get_world_size())
    if options.memory_budget is Device.MEMORY:
        found = capacity_of(fsdp[0].device)
        machine = replace(machine, processor=replace(machine.processor, capacity_bytes=found))
    if ballots:
        machine = from_text(lead_costs(ballots, to_text(machine)))
    fused = options.compute == "inductor"
    settings = settings_of(fsdp, exact_sums=not fused)
    if may_tune(options, machine):
        machine = seen_on(machine, groups, settings, ballots)
    if not may_add_process_groups(ballots):
        settings = tuple(replace(own, may_reduce_apart=False, node_ranks=0) for own in settings)
    policy = policy_of(options, machine)
    if policy.offload:
        policy = replace(policy, host_bytes=host_budget())
    if not is_whole(groups) and policy.budget_bytes is None and policy.reshard is Reshard.OPEN:
        policy = replace(policy, reshard=Reshard.FSDP2)
    again = agreed_recompute(ballots, tuple(live.fqn for live in groups))
    return PlanningInputs(settings, machine, policy, fused, again)


def seen_on(
    machine: Machine,
    groups: Sequence[LiveGroup],
    settings: Sequence[GroupSettings],
    ballots: Sequence[Ballot],
) -> Machine:
    """`machine` with collectives and products as they are in this job, if it has none of them yet:
    its lowest rank's costs have them from the first plan of a root on."""
    if any(curve.trust is Trust.MEASURED for curve in machine.measured):
        return machine
    found = probe(groups, ballots)
    for one in found.collectives:
        ranks = _ranks_of(one.kind, settings[groups.index(one.live)])
        sample = one.size_bytes, rounded(one.us)
        machine = observed_collective(machine, one.kind, ranks, [sample])
    for product in found.products:
        name = dtype_name(product.dtype, groups[0].fsdp.device)
        machine = observed_product(machine, name, product.flops, rounded(product.us))
    if found.collectives:
        say_costs(ballots, to_text(machine))
    return machine


def _ranks_of(kind: CollectiveKind, own: GroupSettings) -> RankGroup:
    if kind is CollectiveKind.ALL_REDUCE:
        found = replica_ranks(own)
        assert found is not None
        return found
    gathers = kind is CollectiveKind.ALL_GATHER
    lane = own.gather_lane if gathers else own.reduce_lane
    return shard_ranks(own, lane)


def rounded(us: float) -> float:
    """To a power of GRID, so that the next launch finds the same plan."""
    return GRID ** round(log(max(us, 1.0), GRID))


def may_add_process_groups(ballots: Sequence[Ballot]) -> bool:
    """All ranks of a process group have to make it, or none: they agree on one plan for all."""
    return whole_of(ballots) is not None


def is_whole(groups: Sequence[LiveGroup]) -> bool:
    """A graph of `groups` has all groups of its FSDP roots.

    What others keep or hold meanwhile is not in its peak: within FSDP2's own peak of this graph,
    keeping more than FSDP2 could still be above that of the model.
    """
    return {live for root in roots_of(groups) for live in root.groups} <= set(groups)


def costs_of(planning: PlanningInputs) -> str:
    """The costs that a plan was made with, as other ranks read them."""
    return to_text(planning.machine)


def policy_of(options: Options, machine: Machine) -> PlanningPolicy:
    """What the planner decides, of all that the user left open.

    In FSDP2's own schedule only the waits: what it keeps is kept, and like FSDP2 one group ahead.
    Raises OptionsError (GS103) for the budget of a machine that does not say what it has.
    """
    count = options.micro_steps
    optimizer = Optimizer(OptimizerKind(options.optimizer), options.clip)
    if not options.is_planned:
        return PlanningPolicy(most_ahead=1, micro_steps=count, optimizer=optimizer)
    budget = options.memory_budget
    if isinstance(budget, Device):
        budget = device_budget(machine)
    return PlanningPolicy(
        budget,
        reshard=Reshard.AUTO if options.reshard == "auto" else Reshard.OPEN,
        recompute=True,
        replaces_checkpoints=options.replaces_checkpoints,
        regroup=True,
        micro_steps=count,
        offload=options.offloads,
        optimizer=optimizer,
    )


def may_tune(options: Options, machine: Machine) -> bool:
    """The planner decides, by costs that nobody measured here, and the user said nothing of it."""
    calibrated = any(curve.trust is Trust.CALIBRATED for curve in machine.measured)
    return options.is_planned and options.replan_after is None and not calibrated


def machine_for(given: str | None, device: torch.device) -> Machine:
    """The machine that costs are taken from: a preset, a calibrated profile, or the device's."""
    if given is not None and not names_file(given):
        return preset(given)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    machine = preset_for(name)
    return machine if given is None else calibrated(machine, read_profile(Path(given)))
