"""Formulas: equal to the numeric functions, evaluated for other sizes without anything new."""

from dataclasses import replace

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from graphshard.cost import symbolic
from graphshard.cost.comm import CollectiveKind, MeasuredCurve, RankGroup
from graphshard.cost.curve import Curve, SizeClass
from graphshard.cost.machine import collective_us
from graphshard.cost.memory import OPTIMIZERS, ParamFacts, group_bytes
from graphshard.cost.presets import preset
from graphshard.cost.roofline import OpWork, ends_us
from graphshard.cost.symbolic import BATCH, LENGTH, WORLD, formula, with_symbolic_network

H100 = preset("h100")
MEASURED = replace(
    H100,
    measured=(
        MeasuredCurve(
            CollectiveKind.ALL_GATHER,
            RankGroup(8, 8, "dp"),
            Curve(30.0, (SizeClass(2**20, 1e-4), SizeClass(float("inf"), 3e-6))),
        ),
    ),
)
LEVELS = preset("h100-ib400:pod=4:oversubscribed=8:pod=64:oversubscribed=100")
PARAMS = (ParamFacts((1001, 64), 4, 2, 4), ParamFacts((64,), 4, 2, 4))


@settings(deadline=None)
@given(
    st.sampled_from(list(CollectiveKind)),
    st.integers(1, 4096),
    st.sampled_from([1, 4, 8]),
    st.integers(1, 10**10),
    st.sampled_from([H100, MEASURED, preset("cpu"), LEVELS]),
)
def test_collectives_are_the_same_as_formulas_and_as_numbers(kind, ranks, per_node, size, machine):
    numeric = collective_us(machine, kind, RankGroup(ranks, per_node, "dp"), size)
    bytes_ = sympy.Symbol("bytes", positive=True)
    found = formula(collective_us(machine, kind, RankGroup(WORLD, per_node, "dp"), bytes_))
    assert found.evaluate(W=ranks, bytes=size) == pytest.approx(numeric)


@settings(deadline=None)
@given(st.integers(1, 2000))
def test_memory_is_the_same_as_a_formula_and_as_a_number(world):
    adamw = OPTIMIZERS["adamw"]
    numeric, symbolic_ = group_bytes(PARAMS, world, adamw), group_bytes(PARAMS, WORLD, adamw)
    for name in ("resident", "all_gather", "unsharded_param", "reduce_scatter", "reduce_output"):
        found = formula(getattr(symbolic_, name))
        values = {"W": world} if found.free_symbols else {}
        assert found.evaluate(**values) == getattr(numeric, name)


def layer(batch, length):
    """A projection, its activation and attention's product, 64 wide."""
    tokens = batch * length
    return [
        OpWork(2 * tokens * 64 * 64, 2 * (2 * tokens * 64 + 64 * 64), "bfloat16"),
        OpWork(0, 4 * tokens * 64, "bfloat16"),
        OpWork(2 * batch * length * length * 64, 2 * (2 * tokens * 64 + batch * length**2)),
    ]


@given(st.integers(1, 64), st.integers(1, 10**6))
@settings(deadline=None)
def test_compute_is_the_same_as_a_formula_and_as_a_number(batch, length):
    found = formula(ends_us(H100.processor, layer(BATCH, LENGTH) * 3)[-1])
    assert found.free_symbols == ("B", "S")
    expected = ends_us(H100.processor, layer(batch, length) * 3)[-1]
    assert found.evaluate(B=batch, S=length) == pytest.approx(expected)


def test_bandwidth_and_latency_are_symbols_too():
    machine = with_symbolic_network(MEASURED)
    found = formula(collective_us(machine, CollectiveKind.ALL_GATHER, RankGroup(WORLD, 8), 10**8))
    names = ("W", "inter_bytes_per_us", "intra_bytes_per_us", "latency_us")
    assert found.free_symbols == names
    values = {"inter_bytes_per_us": 46e3, "intra_bytes_per_us": 360e3, "latency_us": 8.4}
    slow = found.evaluate(W=64, **{**values, "inter_bytes_per_us": 1e3})
    assert slow > 5 * found.evaluate(W=64, **values)
    inside = found.given(W=8, latency_us=8.4)
    assert inside.free_symbols == ("intra_bytes_per_us",)
    expected = found.evaluate(W=8, **values)
    assert inside.evaluate(intra_bytes_per_us=360e3) == pytest.approx(expected)


def test_values_have_to_fit():
    found = formula(BATCH * LENGTH)
    with pytest.raises(TypeError, match=r"missing \['S'\], unknown \['W'\]"):
        found.evaluate(B=1, W=2)


def test_formulas_print():
    assert str(formula(3 * WORLD + 1)) == "3*W + 1"
    assert str(formula(12)) == "12"


def test_formulas_of_one_structure_share_their_code():
    before = symbolic._compiled.cache_info().misses
    first, second = sympy.symbols("first second", positive=True)
    assert formula(first**2 + 17).evaluate(first=2) == 21
    assert formula(second**2 + 17).evaluate(second=3) == 26
    assert symbolic._compiled.cache_info().misses == before + 1
