"""Ranks are shared by tests: what one case leaves does not reach the next one."""

import os

import pytest
from pool import Ctx, Pool

pytestmark = pytest.mark.dist


def told(ctx: Ctx) -> str:
    return os.environ["LOCAL_WORLD_SIZE"]


def leaves_another(ctx: Ctx) -> str:
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    return told(ctx)


def test_a_case_leaves_the_environment_as_it_was(pool: Pool) -> None:
    assert pool.run(2, leaves_another) == ["1"] * 2
    assert pool.run(2, told) == ["2"] * 2
