"""`graphshard.metrics`: flat numbers, from nothing compiled over predicted to measured."""

import torch
from models import CASES
from parity import build, count_collectives, train
from pool import Ctx, Pool

import graphshard

CASE = CASES["llama"]
GROUPS = 5
COUNTS = ("groups", "groups_in_graphs", "plans")
COLLECTIVES = ("all_gathers", "reduce_scatters", "all_reduces", "collective_bytes")
PREDICTED = (
    "step_predicted_us", "exposed_predicted_us", "peak_predicted_bytes", "budget_bytes",
    "step_fsdp2_predicted_us", "gap", "optimizer_predicted_us",
)  # fmt: skip
MEASURED = ("step_measured_us", "exposed_measured_us")


def stages(ctx: Ctx) -> dict[str, float]:
    """The metrics after a profile; on the way there they say no more than is known."""
    model = build(CASE, ctx)
    assert graphshard.metrics(model) == told(groups=GROUPS, groups_in_graphs=0, plans=0)
    model.compile(backend="graphshard", options={"fallback": "error"})
    with torch.no_grad():
        CASE.loss(model, CASE.batch(0, ctx.rank, ctx.device))
    evaluated = graphshard.metrics(model)
    assert evaluated["graphshard/reduce_scatters"] == 0
    train(model, CASE, ctx, 1)
    with count_collectives() as counts:
        train(model, CASE, ctx, 1)
    trained = graphshard.metrics(model)
    assert trained["graphshard/all_gathers"] == counts.all_gather > 0
    assert trained["graphshard/reduce_scatters"] == counts.reduce_scatter > 0
    assert set(trained) == {f"graphshard/{key}" for key in (*COUNTS, *COLLECTIVES, *PREDICTED)}
    with graphshard.profile(model, steps=2):
        train(model, CASE, ctx, 3)
    return graphshard.metrics(model)


def told(**figures: float) -> dict[str, float]:
    return {f"graphshard/{name}": float(value) for name, value in figures.items()}


def test_metrics_are_flat_numbers_the_same_on_all_ranks(pool: Pool) -> None:
    first, second = pool.run(2, stages)
    assert first == second
    assert set(first) == {f"graphshard/{k}" for k in (*COUNTS, *COLLECTIVES, *PREDICTED, *MEASURED)}
    assert all(type(value) is float for value in first.values())
    assert first["graphshard/plans"] == 2
    assert first["graphshard/groups_in_graphs"] == GROUPS
    assert first["graphshard/step_measured_us"] > first["graphshard/exposed_measured_us"] >= 0
    assert first["graphshard/peak_predicted_bytes"] <= first["graphshard/budget_bytes"]
