"""Finds in the package's source which private names of torch it touches."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "graphshard"
PROBES = ("getattr", "hasattr", "setattr")
# Attributes of these are FSDP2's, with an underscore or without.
FSDP2_OBJECTS = (
    *("raw", "state", "context", "pending", "mesh_info"),
    *("TrainingState", "_comm_ctx", "_state_ctx", "_module_info"),
)


def touched() -> set[str]:
    """Names without their owners: "FSDPState", "_to_sharded", "wrap_inline"."""
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    own = {name for tree in trees.values() for name in _defined(tree)}
    found: set[str] = set()
    for path, tree in trees.items():
        imported = dict(_private_imports(tree))
        found |= set(imported.values())
        found |= {name for name in _underscored(tree) if name not in own}
        owners = [*imported, *(FSDP2_OBJECTS if "fsdp2" in path.parts else ())]
        found |= set(_attributes_of(tree, owners))
    return {name for name in found if not name.startswith(("__", "_graphshard"))}


def _private_imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(as what, which name) of what stands in a private module of torch, or is one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            for alias in node.names:
                if "._" in f"{node.module}.{alias.name}":
                    yield alias.asname or alias.name, alias.name


def _underscored(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            yield node.attr
        if isinstance(node, ast.Call) and ast.unparse(node.func) in PROBES:
            name = node.args[1]
            if isinstance(name, ast.Constant) and str(name.value).startswith("_"):
                yield name.value


def _attributes_of(tree: ast.AST, owners: list[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value
            last = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", None)
            if last in owners:
                yield node.attr


def _defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        for target in _targets(node):
            if isinstance(target, ast.Name):
                yield target.id
            elif isinstance(target, ast.Attribute) and ast.unparse(target.value) in ("self", "cls"):
                yield target.attr


def _targets(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from ast.walk(target)
    if isinstance(node, ast.AnnAssign):
        yield node.target
