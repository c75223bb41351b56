"""Curves, fits and the roofline: numbers by hand, monotonicity, recovery of known parameters."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphshard.calibrate.fit import fit_curve
from graphshard.cost.curve import Curve, Sample, SizeClass, Trust, curve_us, line, scaled
from graphshard.cost.roofline import (
    FREE,
    Arithmetic,
    Attention,
    AttentionRate,
    Bandwidth,
    Kernel,
    OpWork,
    Processor,
    arithmetic_of,
    copy_us,
    ends_us,
    op_us,
    region_us,
)

TAXED = Curve(10.0, (SizeClass(100.0, 0.5), SizeClass(300.0, 0.25), SizeClass(math.inf, 1.0)))
SIZES = [4096.0 * 4**i for i in range(9)]


@pytest.mark.parametrize(
    ("amount", "us"),
    [(0, 10), (40, 10 + 20), (100, 10 + 50), (200, 10 + 50 + 25), (400, 10 + 50 + 50 + 100)],
)
def test_each_part_is_charged_at_the_rate_of_its_class(amount, us):
    assert curve_us(TAXED, amount) == us
    assert curve_us(TAXED, amount, starts=0) == us - 10


def test_scaling_changes_the_constant_and_the_rates():
    assert curve_us(scaled(TAXED, 2, 4), 400) == 20 + (50 + 50 + 100) / 4


@pytest.mark.parametrize("bounds", [[], [5.0], [math.inf, math.inf], [9.0, 5.0, math.inf]])
def test_classes_rise_and_end_open(bounds):
    with pytest.raises(ValueError, match="size classes must rise"):
        Curve(1.0, tuple(SizeClass(b, 1.0) for b in bounds))


costs = st.floats(0, 1e3)


@st.composite
def curves(draw):
    cuts = sorted(draw(st.sets(st.integers(1, 10**9), max_size=3)))
    return Curve(draw(costs), tuple(SizeClass(b, draw(costs)) for b in [*cuts, math.inf]))


@given(curves(), st.integers(0, 10**10), st.integers(0, 10**10))
def test_more_work_is_never_cheaper(curve, first, second):
    low, high = sorted((first, second))
    assert curve_us(curve, low) <= curve_us(curve, high) * (1 + 1e-12)


def noisy(truth, seed, spread=0.05):
    rng = random.Random(seed)
    return [Sample(x, truth(x) * rng.lognormvariate(0, spread)) for x in SIZES]


@settings(deadline=None, max_examples=60)
@given(st.floats(20, 2000), st.floats(100, 100_000), st.integers(0, 10**6))
def test_a_fit_recovers_alpha_and_beta(alpha_us, bytes_per_us, seed):
    fit = fit_curve(noisy(lambda x: alpha_us + x / bytes_per_us, seed), max_classes=1)
    for amount in (SIZES[0], SIZES[-1]):
        assert curve_us(fit.curve, amount) == pytest.approx(
            alpha_us + amount / bytes_per_us, rel=0.25
        )


def test_an_outlier_hardly_moves_the_fit():
    samples = noisy(lambda x: 200 + x / 1000, seed=1, spread=0.02)
    samples[4] = Sample(samples[4].amount, samples[4].us * 20)
    curve = fit_curve(samples, max_classes=1).curve
    assert curve.base_us == pytest.approx(200, rel=0.05)
    assert 1 / curve.classes[0].us_per_unit == pytest.approx(1000, rel=0.05)


def test_a_size_class_is_split_where_the_samples_ask_for_it():
    def truth(x):
        return 20 + min(x, SIZES[3]) / 500 + max(x - SIZES[3], 0) / 50

    fit = fit_curve(noisy(truth, seed=3, spread=0.01))
    assert len(fit.curve.classes) == 2
    assert fit.curve.classes[0].upto == SIZES[3]
    assert fit.worst_error < 0.05
    assert len(fit_curve(noisy(lambda x: 20 + x / 50, seed=3)).curve.classes) == 1


def test_fitted_costs_are_never_negative():
    falling = [Sample(x, 1000 - i) for i, x in enumerate(SIZES)]
    curve = fit_curve(falling).curve
    assert curve.base_us >= 0
    assert all(c.us_per_unit >= 0 for c in curve.classes)


@pytest.mark.parametrize(
    "samples", [[], [Sample(1, 1)], [Sample(1, 1), Sample(1, 2)], [Sample(1, 0), Sample(2, 1)]]
)
def test_too_few_samples_for_a_fit(samples):
    with pytest.raises(ValueError, match="two different sizes"):
        fit_curve(samples)


# 1000 flop/us in bfloat16, 100 in float32; 10 bytes/us; a launch takes 5 us.
TOY = Processor(
    (
        Arithmetic("bfloat16", line(5.0, 1000.0), Trust.PRESET),
        Arithmetic("float32", line(5.0, 100.0), Trust.PRESET),
    ),
    line(5.0, 10.0),
    Trust.PRESET,
)


def test_an_op_takes_the_longer_of_arithmetic_and_memory():
    assert op_us(TOY, OpWork(50_000, 100, "bfloat16")) == 5 + 50
    assert op_us(TOY, OpWork(50_000, 1000, "bfloat16")) == 5 + 100
    assert op_us(TOY, OpWork(50_000, 1000, "float32")) == 5 + 500
    assert op_us(TOY, OpWork(0, 1000)) == 5 + 100


def test_views_are_free_and_fused_ops_do_not_launch():
    assert op_us(TOY, FREE) == 0
    assert op_us(TOY, OpWork(0, 1000, launches=0)) == 100


def test_an_unlisted_dtype_is_not_thought_fast():
    assert arithmetic_of(TOY, "float64").dtype == "float32"


def test_every_format_of_8_bits_has_the_rate_of_the_listed_one():
    float8 = Arithmetic("float8_e4m3fn", line(5.0, 2000.0), Trust.PRESET)
    fast = replace(TOY, arithmetic=(float8, *TOY.arithmetic))
    assert arithmetic_of(fast, "float8_e5m2") is float8
    assert arithmetic_of(TOY, "float8_e5m2").dtype == "float32"


LONG = Attention(head_dim=128, length=10**9)


def with_attention(*rates):
    return replace(TOY, attention=rates)


def test_attention_has_its_own_rate_where_it_was_measured():
    work = OpWork(50_000, 0, "bfloat16", attention=LONG)
    slow = with_attention(AttentionRate("bfloat16", line(5.0, 500.0), Trust.CALIBRATED))
    assert op_us(TOY, work) == 5 + 50
    assert op_us(slow, work) == 5 + 100
    assert op_us(slow, replace(work, attention=None)) == 5 + 50
    assert op_us(slow, replace(work, dtype="float32")) == 5 + 500


def test_attention_without_a_mask_does_twice_as_much():
    slow = with_attention(AttentionRate("bfloat16", line(5.0, 500.0), Trust.CALIBRATED))
    work = OpWork(50_000, 0, "bfloat16", attention=replace(LONG, causal=False))
    assert op_us(slow, work) == 5 + 200


def test_attention_is_slower_over_few_keys():
    rate = AttentionRate("bfloat16", line(5.0, 500.0), Trust.PRESET, half_length=1000)
    work = OpWork(50_000, 0, "bfloat16", attention=replace(LONG, length=1000))
    assert op_us(with_attention(rate), work) == 5 + 200


def test_the_rate_of_attention_is_that_of_its_direction_and_of_the_nearest_heads():
    rates = [
        AttentionRate("bfloat16", line(5.0, rate), Trust.PRESET, dim, backward)
        for dim, backward, rate in ((64, False, 500.0), (64, True, 250.0), (128, False, 1000.0))
    ]
    us = {
        (dim, backward): op_us(
            with_attention(*rates),
            OpWork(50_000, 0, "bfloat16", attention=Attention(dim, 10**9, backward=backward)),
        )
        for dim in (32, 80, 120, 256)
        for backward in (False, True)
    }
    assert {dim: us[dim, False] - 5 for dim in (32, 80, 120, 256)} == {
        32: 100,
        80: 100,
        120: 50,
        256: 50,
    }
    assert {us[dim, True] - 5 for dim in (32, 80, 120, 256)} == {200}


def test_some_kernels_stay_below_the_memory():
    slow = replace(TOY, slower=(Bandwidth(Kernel.CAST, line(5.0, 5.0)),))
    assert op_us(slow, OpWork(0, 100, kernel=Kernel.CAST)) == 5 + 20
    assert op_us(slow, OpWork(0, 100)) == 5 + 10
    # A product that is bound by arithmetic is not slowed down by its traffic.
    assert op_us(slow, OpWork(50_000, 100, "bfloat16", kernel=Kernel.CAST)) == 5 + 50


def test_a_region_is_the_sum_of_its_ops():
    works = [OpWork(0, 10), FREE, OpWork(0, 20), OpWork(0, 30)]
    assert region_us(TOY, works, 1, 3) == 7
    ends = ends_us(TOY, works)
    assert ends == (6, 6, 13, 21)
    assert ends[2] - ends[0] == region_us(TOY, works, 1, 3)


def test_a_copy_reads_and_writes():
    assert copy_us(TOY, 100) == 5 + 20
