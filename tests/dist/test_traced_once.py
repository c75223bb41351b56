"""What `TracedOnce` assumes: no option changes what is traced.

Two drawn sets of options: a model that is compiled from the other one's trace gets the plan that it
gets when it is traced itself, and the same bits as eager.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from drawing import drawing
from hypothesis import given
from hypothesis import strategies as st
from models import CASES, of_depth
from parity import assert_equal, build, train
from pool import Ctx, Pool
from traced_once import TracedOnce

import graphshard

pytestmark = pytest.mark.dist

NAMES = ("llama", "gpt_tied_ac", "convnet")
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "schedule": st.sampled_from(["fsdp2", "planned"]),
        "memory_budget": st.sampled_from(["fsdp2", "1000 GiB"]),
        "reshard": st.sampled_from(["fsdp2", "auto"]),
        "recompute": st.sampled_from(["user", "auto"]),
        "micro_steps": st.sampled_from([1, 3]),
        "optimizer": st.sampled_from(["adamw", "sgd"]),
        "verify": st.sampled_from(["compile", "every"]),
        "machine": st.sampled_from(["h100-ib400", "a100-ethernet100"]),
    },
)


def trains_alike(ctx: Ctx, name: str, first: dict[str, Any], second: dict[str, Any]) -> None:
    case, once = CASES[name] if name == "convnet" else of_depth(name, 2), TracedOnce()
    make = partial(build, case, ctx)
    expected = train(make(), case, ctx, 2)
    plain = make()
    plain.compile(backend="graphshard", options={"fallback": "error", **second})
    models = [once.compiled(make, **first), once.compiled(make, **second), plain]
    for model in models:
        assert_equal(expected, train(model, case, ctx, 2))
    shared, own = (
        [replace(plan, name="") for plan in graphshard.plans(model)] for model in models[1:]
    )
    assert len(shared) == 1
    assert shared == own


@drawing(4, None)
@given(name=st.sampled_from(NAMES), first=OPTIONS, second=OPTIONS)
def test_what_is_traced_for_other_options(
    pool: Pool, name: str, first: dict[str, Any], second: dict[str, Any]
) -> None:
    pool.run(2, trains_alike, name, first, second)
