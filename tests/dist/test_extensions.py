"""All-gather extensions in the graph: drawn ones against eager FSDP2, bit by bit."""

import os
from typing import Any

import pytest
import torch
from drawing import drawing
from extension_cases import ExtensionCase, Packed, Recipe, Sends, build, train
from hypothesis import given
from hypothesis import strategies as st
from pool import Ctx, Pool

import graphshard
from graphshard.capture.root_state import root_states_under
from graphshard.errors import RuntimeStateError
from graphshard.fsdp2.extensions import Place
from graphshard.schedule.groups import size_bytes
from graphshard.schedule.steps import StepKind

pytestmark = pytest.mark.dist

CASES = int(os.environ.get("GRAPHSHARD_FUZZ_EXTENSIONS", "12"))
SEED = os.environ.get("GRAPHSHARD_FUZZ_SEED")
OPTIONS = {"compute": "aten", "fallback": "error"}


@st.composite
def recipes(draw: st.DrawFn, rows: int) -> Recipe:
    # FSDP2 wants what is sent to have the padded size where parts are uneven.
    others = ["rest", "rows"] if rows % 2 == 0 else ["rest"]
    sends = draw(st.permutations(["coarse", *draw(st.lists(st.sampled_from(others), unique=True))]))
    return Recipe(tuple(sends), scaled=draw(st.booleans()), wrapped=draw(st.booleans()))


@st.composite
def cases(draw: st.DrawFn) -> ExtensionCase:
    rows = draw(st.sampled_from([8, 7]))
    return ExtensionCase(
        draw(recipes(rows)),
        rows=rows,
        # Alike blocks share a traced graph by the number of their extension.
        second=draw(st.one_of(st.none(), recipes(rows))),
        frozen=draw(st.sampled_from([(), (1,), (0, 1, 2)])),
        half=draw(st.booleans()),
        reshard=draw(st.sampled_from([None, True, False])),
        micro_steps=draw(st.sampled_from([1, 2])),
        unshards=draw(st.booleans()),
        evaluates=draw(st.booleans()),
    )


def equals_eager(ctx: Ctx, case: ExtensionCase) -> tuple[bool, int]:
    oracle, model = build(case, ctx), build(case, ctx)
    model.compile(backend="graphshard", options=OPTIONS)
    wanted, found = train(oracle, case, ctx), train(model, case, ctx)
    same = len(wanted) == len(found) and all(map(torch.equal, wanted, found))
    return same, graphshard.explain(model).captured


@pytest.mark.slow
@pytest.mark.timeout(40 * CASES + 60)
@drawing(CASES, SEED)
@given(case=cases())
def test_drawn_extensions_equal_eager(pool: Pool, case: ExtensionCase) -> None:
    for same, captured in pool.run(2, equals_eager, case, timeout_s=120):
        assert captured == 3
        assert same, case


def test_an_evaluation_may_keep_them_for_the_next_forward(pool: Pool) -> None:
    recipe = Recipe(("rest", "coarse", "rows"), scaled=True, wrapped=True)
    case = ExtensionCase(recipe, reshard=False, evaluates=True, micro_steps=2)
    assert all(same for same, _ in pool.run(2, equals_eager, case, timeout_s=120))


# -- what travels --------------------------------------------------------------------------------

SENDS_ALL = ExtensionCase(Recipe(("rest", "coarse", "rows"), scaled=True, wrapped=False))


def bytes_said_and_sent(ctx: Ctx) -> tuple[int, int, int]:
    """Of the first block's group: what the plan says, and what FSDP2's own gather is of."""
    oracle, model = build(SENDS_ALL, ctx), build(SENDS_ALL, ctx)
    model.compile(backend="graphshard", options={**OPTIONS, "schedule": "fsdp2"})
    train(model, SENDS_ALL, ctx)
    oracle[0].unshard(async_op=True)  # type: ignore[index]
    state = oracle[0]._get_fsdp_state()  # type: ignore[index]
    (group,) = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    sent = group._all_gather_result.all_gather_output.nbytes
    (compiled,) = root_states_under(model)[0].plans.values()
    plan = compiled.plan
    issue = next(plan.forward.of_kind(StepKind.GATHER_ISSUE))
    first = plan.groups[issue.groups[0]]
    return size_bytes(issue, [first]), sent, first.room_bytes()


def test_the_plan_has_the_bytes_that_travel(pool: Pool) -> None:
    rows, columns = SENDS_ALL.rows, 6
    plain = 4 * (rows + columns * rows + columns)  # the bias, the other weight and its bias
    for said, sent, room in pool.run(2, bytes_said_and_sent):
        assert said == sent == rows * columns * (2 + 1) + rows * 4 + plain
        assert room >= sent + rows * columns * 4  # the float32 weight is made beside it


# -- what is not as it was -----------------------------------------------------------------------


def changes_what_it_sends(ctx: Ctx, part: str) -> str:
    case = ExtensionCase(Recipe(("coarse",), scaled=False, wrapped=True))
    model = build(case, ctx)
    model.compile(backend="graphshard", options=OPTIONS)
    train(model, case, ctx)
    before = Sends.fsdp_pre_all_gather, Packed.__tensor_flatten__

    def wider(self: Any, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
        parts, metadata = before[0](self, mesh, size, stride, module, policy)
        return tuple(p.to(torch.int16) for p in parts), metadata

    def other(self: Any) -> Any:
        names, context = before[1](self)
        return names, (*context, "new")

    if part == "sent":
        Sends.fsdp_pre_all_gather = wider  # type: ignore[method-assign]
    else:
        Packed.__tensor_flatten__ = other  # type: ignore[method-assign]
    try:
        with pytest.raises(RuntimeStateError) as raised:
            train(model, case, ctx)
    finally:
        Sends.fsdp_pre_all_gather, Packed.__tensor_flatten__ = before  # type: ignore[method-assign]
    train(model, case, ctx)  # all groups are SHARDED, and go on
    return str(raised.value)


@pytest.mark.parametrize("part", ["sent", "made"])
def test_a_change_is_an_error_that_names_the_parameter(pool: Pool, part: str) -> None:
    for text in pool.run(2, changes_what_it_sends, part):
        assert "GS406" in text
        assert "0.up.weight, a Sends" in text


def raises_itself(ctx: Ctx) -> dict[str, str]:
    case = ExtensionCase(Recipe(("coarse",), scaled=False, wrapped=True))
    model = build(case, ctx)
    model.compile(backend="graphshard", options={"compute": "aten"})
    flatten = Packed.__tensor_flatten__
    del Packed.__tensor_flatten__
    try:
        with pytest.warns(graphshard.GraphshardWarning, match="has no __tensor_flatten__"):
            train(model, case, ctx)
    finally:
        Packed.__tensor_flatten__ = flatten  # type: ignore[method-assign]
    return dict(graphshard.explain(model).reasons)


def test_what_cannot_be_traced_runs_through_fsdp2(pool: Pool) -> None:
    for reasons in pool.run(2, raises_itself):
        assert set(reasons) == {"0", "1", "2"}
        assert all("Packed has no __tensor_flatten__" in text for text in reasons.values())


def test_a_place_holds_what_is_between_its_first_and_last_element() -> None:
    memory = torch.arange(64, dtype=torch.uint8)
    place = Place((3, 2), (1, 5), torch.uint8, 4)
    assert place.extent == 8
    assert place.within(memory).tolist() == [[4, 9], [5, 10], [6, 11]]
    assert Place((0, 3), (3, 1), torch.float32, 8).within(memory).shape == (0, 3)
