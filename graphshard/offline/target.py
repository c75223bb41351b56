"""The function that a user names on the command line, and how to call it."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from graphshard.demo import models
from graphshard.demo.models import MODELS
from graphshard.errors import OfflineError, UserCodeError
from graphshard.files.reading import reason, shown
from graphshard.offline.world import Made

Sizes = tuple[tuple[str, int], ...]

# What stands for a file before the name of a model of `graphshard.demo`.
DEMO = "demo"


@dataclass(frozen=True, slots=True)
class Target:
    """A function that makes a sharded model and its inputs, in `file`.

    parameters: the names of its sizes and other arguments. defaults: sizes that it knows.
    """

    name: str
    file: Path
    function: Callable[..., Any]
    parameters: tuple[str, ...]
    defaults: Mapping[str, int]

    @property
    def signature(self) -> str:
        return f"{self.name}({', '.join(self.parameters)})"

    def sizes(self, given: Mapping[str, int]) -> Sizes:
        """What the function is called with. Raises OfflineError (GS907) for a size it lacks."""
        for name in given:
            if name not in self.parameters:
                raise OfflineError(
                    "GS907",
                    f"{self.signature} has no parameter {name!r}; add it, or leave --{name} out",
                )
        return tuple(sorted({**self.defaults, **given}.items()))

    def build(self, sizes: Sizes) -> Made:
        """The model and its inputs.

        Raises OfflineError: GS908 if that is not what comes back, GS902 if it fills memory;
        UserCodeError (GS911) if the function fails or ends the process.
        """
        try:
            return made_of(self.name, self.function(**dict(sizes)))
        except OfflineError as error:
            if error.code == "GS902":
                place = _place(self.file, error)
                raise OfflineError(error.code, f"{place}: {error.message}") from error
            raise
        except (Exception, SystemExit) as error:
            raise UserCodeError("GS911", _failure(self.name, self.file, error)) from error


def _place(file: Path, error: BaseException) -> str:
    """The last line of the user's file that the error went through."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename == str(file)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else "its call"


def _failure(name: str, file: Path, error: BaseException) -> str:
    """What went wrong, and in which line of the user's file."""
    said = error.msg if isinstance(error, SyntaxError) else error
    text = f"{name} fails at {_place(file, error)}: {type(error).__name__}: {said}"
    if "CUDA" in str(error):
        text += (
            "; there is no GPU in planning: make meshes with init_device_mesh('cpu', ...), and "
            "leave tensors on the meta device"
        )
    return text


def target_of(text: str) -> Target:
    """ "FILE.py:FUNCTION", loaded, or one of the models that come with the package: "demo:NAME".

    Raises OfflineError (GS906) if there is no such function, UserCodeError (GS911) if the file
    fails.
    """
    file, _, name = text.rpartition(":")
    if file == DEMO:
        return _demo(name)
    path = Path(file).absolute()  # as tracebacks name it
    try:
        is_python = path.suffix == ".py" and path.is_file()
    except OSError as error:  # a name that is too long
        raise OfflineError("GS906", f"cannot read {shown(path)}: {reason(error)}") from error
    if not is_python:
        raise OfflineError(
            "GS906",
            f"{text!r} is neither FILE.py:FUNCTION (no Python file {file or text!r}) nor "
            f"{DEMO}:NAME",
        )
    module = _loaded(path)
    function = getattr(module, name, None)
    if not callable(function):
        known = [n for n, f in vars(module).items() if inspect.isfunction(f)]
        raise OfflineError("GS906", f"{file} has no function {name!r}; it has {', '.join(known)}")
    return _target(name, path, function)


def _demo(name: str) -> Target:
    if name not in MODELS:
        known = ", ".join(f"{DEMO}:{known}" for known in MODELS)
        raise OfflineError("GS906", f"no model {DEMO}:{name}; there are {known}")
    return _target(name, Path(models.__file__), MODELS[name])


def _target(name: str, path: Path, function: Callable[..., Any]) -> Target:
    parameters = _parameters(function)
    defaults = {n: p.default for n, p in parameters.items() if isinstance(p.default, int)}
    sizes = {n: v for n, v in defaults.items() if n in ("batch", "seq")}
    return Target(name, path, function, tuple(parameters), sizes)


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # of what is not written in Python
        return {}


def _loaded(path: Path) -> ModuleType:
    """The file as a module of its own name, which is no other's, whatever the file is called.

    What lies beside it can be imported, but for names of the standard library.
    """
    sys.path.insert(_after_standard_library(), str(path.parent))
    name = f"_graphshard_plan_{re.sub(r'[^0-9A-Za-z_]', '_', path.stem)}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UserCodeError("GS911", _failure(shown(path), path, error)) from error
    return module


def _after_standard_library() -> int:
    """Where in sys.path: before installed packages, as if the file was run."""
    own = tuple(sysconfig.get_path(key) for key in ("stdlib", "platstdlib"))
    places = [
        place
        for place, entry in enumerate(sys.path)
        if entry in own or Path(entry).name == "lib-dynload"
    ]
    return max(places, default=-1) + 1


def made_of(name: str, found: Any) -> Made:
    """What a user's function returned: (model, inputs) or (model, inputs, shard).

    inputs: a tuple of arguments, a dict of keyword arguments, or one tensor. shard: shards the
    model when it is called with it.
    """
    parts = tuple(found) if isinstance(found, tuple | list) else ()
    if len(parts) not in (2, 3) or not isinstance(parts[0], nn.Module):
        kind = type(found).__name__
        raise OfflineError("GS908", f"{name} has to return (model, inputs), and returned {kind}")
    model, inputs = parts[:2]
    if len(parts) == 3:
        if not callable(parts[2]):
            kind = type(parts[2]).__name__
            raise OfflineError(
                "GS908",
                f"{name} returned (model, inputs, shard) with a {kind} for shard, which has to be "
                "a function; inputs that are keyword arguments are a dict, the second of the three",
            )
        parts[2](model)
    if isinstance(inputs, Mapping):
        return Made(model, (), dict(inputs))
    if isinstance(inputs, Tensor) or not isinstance(inputs, Sequence):
        inputs = (inputs,)
    return Made(model, tuple(inputs), {})
