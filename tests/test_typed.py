"""What a type checker makes of an editable install: the whole public API is typed."""

import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import graphshard

ROOT = Path(__file__).parents[1]

USER = """
import graphshard
from torch import nn


def planned(model: nn.Module) -> graphshard.Plan:
    plan = graphshard.plan(model, (), world_size=8, hardware="h100-ib400", memory_budget="70GiB")
    plan.save("plan.json")
    return graphshard.load_plan("plan.json")


def told(plan: graphshard.Plan) -> str:
    summary: graphshard.Summary = plan.summary()
    gain_us: float = summary.fsdp2.whole_step_us - summary.whole_step_us
    spare_bytes: int = plan.estimate.budget_bytes - plan.estimate.peak_bytes
    plan.to_html("plan.html")
    return plan.to_html() if gain_us > 0 and spare_bytes > 0 else repr(plan)


def explained(model: nn.Module) -> int:
    report: graphshard.Report = graphshard.explain(model)
    found = [m.measured.step_time_us for m in graphshard.measurements(model) if m is not None]
    return sum(plan.collectives for plan in report.plans) + len(found)
"""


def editable(folder: Path) -> Path:
    """A Python with graphshard installed as by `pip install -e`, and mypy's own packages."""
    source, env = folder / "source", folder / "env"
    skip = shutil.ignore_patterns(".*", "build", "dist", "out", "__pycache__", "*.egg-info")
    source.mkdir()
    for name in ("graphshard", "passes"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = f"import setuptools.build_meta as b; b.build_editable({str(folder)!r})"
    ran([sys.executable, "-W", "ignore", "-c", build], source).check_returncode()
    venv.create(env)
    (packages,) = env.glob("lib/python*/site-packages")
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(packages)
    (packages / "below.pth").write_text(sysconfig.get_path("purelib"))
    return env / "bin" / "python"


def ran(command, folder):
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=240
    )


@pytest.mark.slow
def test_a_users_file_is_checked_against_an_editable_install(tmp_path):
    python = editable(tmp_path)
    names = "".join(f"reveal_type(graphshard.{name})\n" for name in graphshard.__all__)
    (tmp_path / "user.py").write_text(USER + names)
    wrong = USER.replace("plan.estimate.peak_bytes", "plan.estimate.peak")
    (tmp_path / "wrong.py").write_text(wrong)
    check = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python)]
    said = ran([*check, "user.py", "wrong.py"], tmp_path).stdout
    shown = re.findall(r'Revealed type is "(.*)"$', said, re.MULTILINE)
    assert len(shown) == len(graphshard.__all__)
    assert "Any" not in shown
    (error,) = (line for line in said.splitlines() if ": error: " in line)
    assert error.startswith("wrong.py:")
    assert '"Estimate" has no attribute "peak"' in error
