"""How Python itself runs while graphs are made: the one place that changes it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Pointers; CPython takes a chunk of 2 MiB for a frame of this size, and what is left of it holds
# some thousand frames of its callees.
_STACK_SIZE = 140_000


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Nearly all objects of a compilation live until its end: to look for garbage again and again
    meanwhile took a third of the time of a deep model."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def on_large_stack(work: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """`work(...)`, whose frames find their memory there already.

    CPython has its frames in chunks of 16 KiB, and gives a chunk back as soon as it is empty
    (Python/pystate.c, `push_chunk`). A loop whose calls go over the end of one maps and unmaps
    memory in each turn: thousands of times a second where Dynamo traces, a twentieth of its time.
    """
    return work(*args, **kwargs)


on_large_stack.__code__ = on_large_stack.__code__.replace(co_stacksize=_STACK_SIZE)
