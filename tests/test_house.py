"""What holds for every file of the package."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import graphshard

ROOT = Path(__file__).parents[1]
PASSES = sorted((ROOT / "passes").glob("*.py"))
# Without graphshard/passes: a link to the folder above, which only older Pythons follow.
PACKAGE = [p for p in sorted((ROOT / "graphshard").rglob("*.py")) if "passes" not in p.parts[-2:-1]]
MODULES = [*PACKAGE, *PASSES]


def offenders(measure, limit):
    """`path: name is n lines` for what `measure(tree, text)` finds longer than `limit`."""
    found = []
    for path in MODULES:
        text = path.read_text()
        for name, lines in measure(ast.parse(text), text):
            if lines > limit(path):
                found.append(f"{path.relative_to(ROOT)}: {name} is {lines} lines")
    return found


def functions(tree, text):
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds):
            yield node.name, node.end_lineno - node.lineno + 1


def test_the_files_are_found():
    names = {str(p.relative_to(ROOT)) for p in MODULES}
    assert {
        "graphshard/graph/program.py",
        "graphshard/runtime/run.py",
        "passes/sink_views.py",
    } <= names
    assert len(names) == len(MODULES)


def test_modules_are_short():
    whole = offenders(
        lambda tree, text: [("module", len(text.splitlines()))],
        lambda path: 200 if path in PASSES else 400,
    )
    assert whole == []


def test_functions_are_short():
    assert offenders(functions, lambda path: 60) == []


def test_every_module_says_what_it_is_for():
    silent = [p for p in MODULES if not ast.get_docstring(ast.parse(p.read_text()))]
    assert silent == []


def test_code_is_ascii():
    assert [p for p in MODULES if not p.read_bytes().isascii()] == []


def test_a_pass_is_a_module_with_one_public_function_of_its_name():
    for path in PASSES:
        if path.stem == "__init__":
            continue
        body = ast.parse(path.read_text()).body
        functions = [n for n in body if isinstance(n, ast.FunctionDef)]
        own = next(n for n in functions if n.name == path.stem)
        assert ast.get_docstring(own)


def test_passes_are_one_folder_under_two_names():
    link = ROOT / "graphshard" / "passes"
    assert link.is_symlink()
    assert link.readlink() == Path("../passes")


def test_passes_are_not_importable_under_their_folders_name():
    done = python("import passes", cwd=ROOT)
    assert done.returncode == 1
    assert "import graphshard.passes, not the top-level folder" in done.stderr


LIGHT = (
    "graphshard",
    "graphshard.cli",
    "graphshard.cost.memory",
    "graphshard.cost.presets",
    "graphshard.cost.profile",
    "graphshard.cost.symbolic",
    "graphshard.schedule.plan",
    "graphshard.planner.plan_step",
    "graphshard.view.costs",
    "graphshard.view.diff_text",
    "graphshard.view.html",
    "graphshard.view.profiled",
    "graphshard.view.trace",
)


@pytest.mark.parametrize("module", LIGHT)
def test_importing_does_not_load_torch(module):
    done = python(f"import sys, {module}; print('torch' in sys.modules)")
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr


def python(code, cwd=None):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=cwd, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def test_every_error_code_has_an_entry():
    used = {code for p in MODULES for code in re.findall(r"\bGS\d{3,4}\b", p.read_text())}
    entries = re.findall(r"^### (GS\d{3,4})$", (ROOT / "docs/errors.md").read_text(), re.MULTILINE)
    assert sorted(used, key=lambda code: int(code[2:])) == entries


def test_every_public_name_resolves():
    for name in graphshard.__all__:
        assert getattr(graphshard, name) is not None
    assert sorted(graphshard.__all__) == dir(graphshard)
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        graphshard.no_such_name  # noqa: B018
