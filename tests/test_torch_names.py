"""The private names of torch that the package touches: all are listed, and this torch has them."""

import dis
import importlib
import inspect
from types import FunctionType
from typing import Any

import pytest
import torch
from torch_names import ELSEWHERE, NAMES, SINCE, UNTIL
from torch_touch import touched

from graphshard.fsdp2 import versions

SETS = ("STORE_ATTR", "DELETE_ATTR")


def find(path: str) -> Any:
    """A module, or what stands in one: "torch.fx.Node"."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        owner, _, name = path.rpartition(".")
        return getattr(find(owner), name)


def is_there(owner: Any, name: str) -> bool:
    """Also of attributes that a class only annotates, or that its methods give to instances."""
    if hasattr(owner, name) or not isinstance(owner, type):
        return hasattr(owner, name)
    annotated = [n for kind in owner.__mro__ for n in inspect.get_annotations(kind)]
    methods = (inspect.unwrap(f) for f in vars(owner).values() if isinstance(f, FunctionType))
    code = (i for f in methods for i in dis.get_instructions(f))
    return name in annotated or any(i.opname in SETS and i.argval == name for i in code)


def takes(function: Any, wanted: list[str]) -> bool:
    """`wanted` are parameters of it in this order, and the others may be left out."""
    found = inspect.signature(function).parameters
    others = [p for name, p in found.items() if name not in wanted]
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    optional = all(p.default is not p.empty or p.kind in kinds for p in others)
    return optional and [name for name in found if name in wanted] == wanted


def here(name: str) -> bool:
    came = next((v for v, names in SINCE.items() if name in names), (0, 0))
    went = next((v for v, names in UNTIL.items() if name in names), versions.TORCH)
    return came <= versions.TORCH <= went


@pytest.mark.parametrize("path", sorted(NAMES))
def test_this_torch_has_the_names(path: str) -> None:
    owner = find(path)
    for name, parameters in NAMES[path].items():
        assert is_there(owner, name) == here(name), f"{path}.{name}, torch {torch.__version__}"
        if parameters is not None and here(name):
            function = getattr(owner, name)
            assert takes(function, parameters.split()), (path, name, inspect.signature(function))


def test_every_private_name_in_the_source_is_listed() -> None:
    listed = {name for names in NAMES.values() for name in names}
    owners = {part for path in NAMES for part in path.split(".")}
    assert touched() - owners - ELSEWHERE <= listed
    assert listed <= touched()


def test_no_flag_asks_for_a_name_that_is_gone() -> None:
    assert versions.MISSING == []
