"""Frameworks that hand on a backend's name and nothing else, with their real packages.

Options come from the environment or from a file, and reach each rank.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from warm import run_script

TORCHTITAN = Path(__file__).parent / "framework_scripts/torchtitan_blocks.py"
WHOLE = [4, 4, 1]  # groups in graphs, all groups, plans
LIMIT_S = 120.0

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]


def trained(*backend: str, model: str = "llama3", **environment: str) -> Any:
    own = {"GRAPHSHARD_COMPUTE": "", "GRAPHSHARD_OPTIONS": "", **environment}
    return json.loads(run_script(TORCHTITAN, 2, LIMIT_S, model, *backend, environment=own))


@pytest.fixture(scope="module")
def eager() -> Any:
    """The losses of eager FSDP2."""
    found = trained()
    assert found["groups"] == [0, 4, 0]
    return found["losses"]


def test_options_of_the_environment(eager: Any) -> None:
    found = trained("graphshard", GRAPHSHARD_OPTIONS="compute=aten,schedule=fsdp2")
    assert found["options"] == [
        "compute='aten' from GRAPHSHARD_OPTIONS",
        "schedule='fsdp2' from GRAPHSHARD_OPTIONS",
    ]
    assert found["groups"] == WHOLE
    assert found["losses"] == eager


def test_options_of_a_file(eager: Any, tmp_path: Path) -> None:
    """The environment goes over it."""
    file = tmp_path / "graphshard.toml"
    file.write_text('compute = "inductor"\nverify = "every"\n')
    found = trained("graphshard", GRAPHSHARD_CONFIG=str(file), GRAPHSHARD_OPTIONS="compute=aten")
    assert sorted(found["options"]) == [
        "compute='aten' from GRAPHSHARD_OPTIONS",
        f"verify='every' from {file}",
    ]
    assert found["groups"] == WHOLE
    assert found["losses"] == eager


def test_blocks_apart(eager: Any) -> None:
    found = trained("graphshard", GRAPHSHARD_OPTIONS="compute=aten,promote=false")
    assert found["groups"] == [2, 4, 1]
    assert found["losses"] == eager


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(AssertionError, match=r"GS102: unknown option 'comput'; did you mean"):
        trained("graphshard", GRAPHSHARD_OPTIONS="comput=aten")


def test_a_mixture_of_experts_that_are_divided_over_the_ranks() -> None:
    """How many tokens go where is data; torchtitan has Dynamo capture such sizes."""
    eager = trained(model="qwen3")
    assert eager["groups"] == [0, 6, 0]
    found = trained("graphshard", model="qwen3", GRAPHSHARD_OPTIONS="compute=aten,fallback=error")
    assert found["groups"] == [6, 6, 1]
    assert found["losses"] == eager["losses"]
