"""The function that a user names on the command line, and how to call it."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from graphshard.errors import OfflineError
from graphshard.offline.world import Made

Sizes = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Target:
    """A function that makes a sharded model and its inputs. defaults: sizes that it knows."""

    name: str
    function: Callable[..., Any]
    defaults: Mapping[str, int]

    def sizes(self, given: Mapping[str, int]) -> Sizes:
        """What the function is called with. Raises OfflineError (GS907) for a size it lacks."""
        accepted = inspect.signature(self.function).parameters
        for name in given:
            if name not in accepted:
                raise OfflineError(
                    "GS907",
                    f"{self.name}{inspect.signature(self.function)} has no parameter {name!r}; "
                    f"add it, or leave --{name} out",
                )
        return tuple(sorted({**self.defaults, **given}.items()))

    def build(self, sizes: Sizes) -> Made:
        """The model and its inputs.

        Raises OfflineError: GS908 if that is not what comes back, GS911 if the function fails.
        """
        try:
            found = self.function(**dict(sizes))
        except Exception as error:
            raise OfflineError("GS911", _failure(self.name, self.function, error)) from error
        return made_of(self.name, found)


def _failure(name: str, function: Callable[..., Any], error: Exception) -> str:
    """What went wrong, and in which line of the user's file."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename == inspect.getfile(function)]
    where = f"{own[-1].filename}:{own[-1].lineno}" if own else "its call"
    text = f"{name} fails at {where}: {type(error).__name__}: {error}"
    if "CUDA" in str(error):
        text += (
            "; there is no GPU in planning: make meshes with init_device_mesh('cpu', ...), and "
            "leave tensors on the meta device"
        )
    return text


def target_of(text: str) -> Target:
    """ "FILE.py:FUNCTION", loaded. Raises OfflineError (GS906) if there is no such function."""
    file, _, name = text.rpartition(":")
    path = Path(file)
    if not path.is_file() or path.suffix != ".py":
        raise OfflineError(
            "GS906", f"{text!r} is not FILE.py:FUNCTION: no Python file {file or text!r}"
        )
    # As if the file was run: what lies beside it can be imported.
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        known = [n for n, f in vars(module).items() if inspect.isfunction(f)]
        raise OfflineError("GS906", f"{file} has no function {name!r}; it has {', '.join(known)}")
    parameters = inspect.signature(function).parameters.items()
    defaults = {n: p.default for n, p in parameters if isinstance(p.default, int)}
    return Target(name, function, {n: v for n, v in defaults.items() if n in ("batch", "seq")})


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
        parts[2](model)
    if isinstance(inputs, Mapping):
        return Made(model, (), dict(inputs))
    if isinstance(inputs, Tensor) or not isinstance(inputs, Sequence):
        inputs = (inputs,)
    return Made(model, tuple(inputs), {})
