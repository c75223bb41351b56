"""Compiled compute: within tolerance of eager FSDP2, few regions, each compiled once."""

from collections.abc import Iterator

import pytest
import test_parity
import test_semantics
from models import CASES
from pool import Pool
from test_semantics import Step


@pytest.fixture(scope="module")
def inductor() -> Iterator[Pool]:
    with Pool("inductor") as workers:
        yield workers


@pytest.mark.parametrize("name", list(CASES))
def test_models_follow_eager_fsdp2(inductor: Pool, name: str) -> None:
    inductor.run(2, test_parity.parity_case, name, "in place", 5, {}, timeout_s=300)


@pytest.mark.parametrize("step", test_semantics.STEPS, ids=lambda s: s.__name__)
def test_semantics_are_those_of_fsdp2(inductor: Pool, step: Step) -> None:
    inductor.run(2, test_semantics.both, step, timeout_s=300)
