"""The scripts of examples/integrations/, with the real frameworks, on two CPU processes.

Each runs with eager FSDP2 (GRAPHSHARD_DISABLE), with ops one by one and with Inductor. The table of
docs/integrations/README.md is made of what they print: `GRAPHSHARD_WRITE_FIGURES=1` writes it.
"""

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from script_runs import LIMIT_S, RUNNER, TOLERANCE, run

from bench.figures import compare, filled

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples/integrations"
PAGE = ROOT / "docs/integrations/README.md"
TORCHTITAN = ROOT / "tests/dist/framework_scripts/torchtitan_blocks.py"
MAKER = "make test-integrations"

pytestmark = pytest.mark.timeout(3 * LIMIT_S)


@dataclass(frozen=True)
class Client:
    """line: what a script that shards needs. outside: groups that stay with eager FSDP2; why.

    launches: the script starts its own workers.
    """

    title: str
    package: str
    line: str
    outside: int = 0
    why: str = ""
    launches: bool = False


CLIENTS = {
    "accelerate_by_name": Client(
        "accelerate", "accelerate", '`Accelerator(..., dynamo_backend="graphshard")`'
    ),
    "trainer_by_name": Client(
        "Trainer", "transformers", '`TrainingArguments(..., torch_compile_backend="graphshard")`'
    ),
    "trainer_callback": Client(
        "Trainer, with options", "transformers", "`Trainer(..., callbacks=[GraphshardCallback()])`"
    ),
    "trl_by_name": Client(
        "TRL",
        "trl",
        '`SFTConfig(..., torch_compile_backend="graphshard")`',
        outside=1,
        why=": its chunked loss reads the head's weight, and does not call it",
    ),
    "fabric": Client("Fabric", "lightning", '`model.compile(backend="graphshard")`'),
    "lightning_configure_model": Client(
        "Lightning", "lightning", '`self.model.compile(backend="graphshard")` in `configure_model`'
    ),
    "lightning_callback": Client(
        "Lightning, with options", "lightning", "`Trainer(..., callbacks=[GraphshardCallback()])`"
    ),
    "peft_lora": Client("PEFT", "peft", '`model.compile(backend="graphshard")`'),
    "ray_train": Client("Ray Train", "ray", '`model.compile(backend="graphshard")`', launches=True),
}


def said(name: str, folder: Path, **environment: str) -> Any:
    ranks = 0 if CLIENTS[name].launches else 2
    return run(RUNNER, SCRIPTS / f"{name}.py", folder=folder, ranks=ranks, **environment)


@pytest.fixture(scope="module")
def rows() -> dict[str, str]:
    return {}


def compared(eager: Any, ops: Any, fused: Any, outside: int = 0) -> tuple[str, str]:
    """Groups in graphs of all, and the number of plans."""
    captured, present, plans = ops["groups"]
    assert eager["groups"] == [0, present, 0]
    assert len(eager["losses"]) >= 3
    assert eager["losses"] == ops["losses"]
    assert fused["losses"] == pytest.approx(eager["losses"], rel=TOLERANCE)
    assert fused["groups"] == ops["groups"]
    assert captured == present - outside
    return f"{captured} of {present}", str(plans)


@pytest.mark.parametrize("name", CLIENTS)
def test_script(name: str, rows: dict[str, str], tmp_path: Path) -> None:
    client = CLIENTS[name]
    eager = said(name, tmp_path, GRAPHSHARD_DISABLE="1")
    ops = said(name, tmp_path, GRAPHSHARD_OPTIONS="compute=aten")
    groups, plans = compared(eager, ops, said(name, tmp_path), client.outside)
    rows[name] = (
        f"| {client.title} | {client.package} {version(client.package)} | {client.line} | "
        f"[{name}.py](../../examples/integrations/{name}.py) | {groups}{client.why} | {plans} | "
        "equal to the last bit |\n"
    )


def test_torchtitan(rows: dict[str, str], tmp_path: Path) -> None:
    """Its llama3, made as its trainer makes it; tests/dist/test_frameworks.py has more."""
    eager, ops, fused = (
        run(TORCHTITAN, "llama3", "graphshard", folder=tmp_path, **environment)
        for environment in ({"GRAPHSHARD_DISABLE": "1"}, {"GRAPHSHARD_OPTIONS": "compute=aten"}, {})
    )
    groups, plans = compared(eager, ops, fused)
    rows["torchtitan"] = (
        f"| torchtitan | torchtitan {version('torchtitan')} | `--compile.enable --compile.backend "
        "graphshard` | [torchtitan_blocks.py](../../tests/dist/framework_scripts/"
        f"torchtitan_blocks.py) | {groups} | {plans} | equal to the last bit |\n"
    )


def test_the_table_is_what_the_scripts_said(rows: dict[str, str]) -> None:
    if len(rows) <= len(CLIENTS):
        pytest.skip("the table is made of all scripts")
    head = (
        "| client | version | line | script | groups in a graph | plans | losses, `aten` |\n"
        "|---|---|---|---|---|---|---|\n"
    )
    table = "".join([head, *(rows[name] for name in (*CLIENTS, "torchtitan"))])
    compare(PAGE, filled(PAGE.read_text(), {MAKER: table}))
