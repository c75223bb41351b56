"""Plans for the tests of the viewer: of every kind that it draws, made by the planner."""

from dataclasses import replace

from forecasts import as_predicted
from planning import layers, random_problem
from plans import group, plan, two_layers

from graphshard.planner.plan_step import plan_step
from graphshard.planner.problem import Problem, Region
from graphshard.schedule.estimate import Allocation
from graphshard.schedule.plan import Category, ParamInfo, Plan, PricedOn, StepKind

GIB = 2**30
VIEWS = ("lanes", "residency", "memory")  # of a page


def planned(problem, name, *, world=8) -> Plan:
    """The plan of `problem`, with all that the pipeline puts into one."""
    found = plan_step(problem)
    schedules = {s.direction: s for s in found.schedules}
    return Plan(
        name=name,
        torch_version="2.13.0",
        groups=tuple(_group(g, world) for g in problem.groups),
        forward=schedules["forward"],
        backward=schedules.get("backward"),
        estimate=found.estimate,
        reasons=found.reasons,
        forecasts=found.forecasts,
        priced_on=PricedOn("numbers by hand", min(world, 8)),
        fsdp2=found.fsdp2,
    )


def _group(found, world):
    info = group(found.id, found.fqn, found.gathered_bytes, world=world)
    params = tuple(
        ParamInfo(f"{found.fqn}.w{place}", (part.gathered_bytes // 2, 1), "bfloat16", True,
                  part.gathered_bytes)
        for place, part in enumerate(found.parts)
    )  # fmt: skip
    grads = sum(part.gathered_bytes for part in found.parts)
    return replace(info, params=params, reduce_dtype="bfloat16", reduce_bytes=grads)


def llama(num_layers=32, *, budget_bytes=None, **settings) -> Problem:
    """Blocks with the sizes of an 8B model on a network that is too slow for them."""
    size = 436 * 2**20
    blocks = layers(
        num_layers, compute_us=5200.0, gather_us=11500.0, reduce_us=9000.0, size=size,
        activations=int(0.55 * GIB), temporary=int(1.1 * GIB), root=True,
        regroup_gathers=False, **settings,
    )  # fmt: skip
    state = num_layers * size // 8
    resident = (
        Allocation(Category.SHARDED_PARAM, state),
        Allocation(Category.OPT_STATE, 4 * state),
        Allocation(Category.INPUTS, 60 * 2**20),
    )
    return replace(blocks, resident=resident, budget_bytes=budget_bytes)


def inference(num_layers=8) -> Problem:
    """Forward alone."""
    whole = layers(num_layers, gather_us=150.0, size=200 * 2**20)
    groups = tuple(
        replace(g, parts=tuple(replace(p, backward=None, gradient=None) for p in g.parts))
        for g in whole.groups
    )
    forward = tuple(Region(r.us, 2**20, 2**22) for r in whole.forward)
    return replace(whole, groups=groups, forward=forward, backward=())


def measured(plan: Plan, compute=1.06, comm=1.2) -> Plan:
    """As predicted, times two factors; waits are as long as predicted."""
    return replace(plan, measured=as_predicted(plan, compute, comm))


def every_plan() -> dict[str, Plan]:
    """One of each kind."""
    return {
        "llama": measured(planned(llama(budget_bytes=40 * GIB), "32 blocks of an 8B model")),
        "merged": planned(layers(6, gather_us=150.0, root=True, activations=500), "merged"),
        "split": planned(split_problem(), "split"),
        "random": planned(replace(random_problem(3), budget_bytes=None), "random"),
        "inference": planned(inference(), "inference"),
        "one lane": planned(layers(4, gather_us=150.0, shared_lane=True), "one lane"),
        "no costs": two_layers(),
        "no costs forward": plan([group(0, "")], "issue 0, wait 0, compute 1, release 0"),
        "empty": plan([], ""),
        "hostile": plan([group(0, "</script><script>x()</script>")], "issue 0", name="<img src=x>"),
    }


def split_problem() -> Problem:
    """A random problem of which the planner splits a group."""
    for seed in range(400):
        problem = replace(random_problem(seed, micro=False), budget_bytes=None)
        found = plan_step(problem)
        if any(s.params for d in found.schedules for s in d.of_kind(StepKind.GATHER_ISSUE)):
            return problem
    raise AssertionError("no problem with a split group")
