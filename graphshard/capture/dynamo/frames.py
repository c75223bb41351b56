"""The frames in which Dynamo compiles modules: one for each class of them.

In: a function that Dynamo wraps. Out: the same, whose code is a copy that modules of one class
share. So one model cannot switch off another, and identical blocks still share their graphs. A
module whose graph breaks leaves the frame of its class for one of its own.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch._dynamo
from torch._dynamo import external_utils


@contextlib.contextmanager
def hooks_inside() -> Iterator[None]:
    """While a module is wrapped: the frame that Dynamo compiles includes the module's own hooks.

    Dynamo does so only with the process-wide setting `wrap_top_frame`, and with one frame for
    all modules of the process: what it decides for one (its recompile limit, a skipped frame)
    then holds for all. Here each class of modules has a frame of its own, so that identical
    blocks still share their graphs.
    """
    with _WRAPPING:
        yield from _with_hooks()


_WRAPPING = threading.RLock()  # two threads would put each other's function back


def _with_hooks() -> Iterator[None]:
    wrap = external_utils.wrap_inline

    def wrap_inline(fn: Any) -> Any:
        inner = wrap(fn)
        _give_frame(inner, _owner_of(fn))
        return inner

    external_utils.wrap_inline = wrap_inline
    try:
        with torch._dynamo.config.patch(wrap_top_frame=True):
            yield
    finally:
        external_utils.wrap_inline = wrap


@dataclass(slots=True, eq=False)
class _ClassFrame:
    """functions: those that have it, one for each module of the class that is compiled.

    given, left: how many modules got it, and how many left it, of all that there ever were: what is
    alive may differ from rank to rank. was_whole: one of them was compiled without a break.
    """

    code: CodeType
    functions: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    given: int = 0
    left: int = 0
    was_whole: bool = False


# So many leave a class of which none was compiled whole: then it seems that all of them break.
_MOST_LEFT = 4
# By class and wrapper's code, of which there is one per version of torch. Weak: a frame lives as
# long as its class.
_FRAMES: weakref.WeakKeyDictionary[type, dict[CodeType, _ClassFrame]] = weakref.WeakKeyDictionary()


def _give_frame(inner: Any, owner: Any) -> None:
    own, code = _FRAMES.setdefault(type(owner), {}), inner.__code__
    if code not in own:
        own[code] = _ClassFrame(code.replace(co_name=f"call_{type(owner).__name__}"))
    inner.__code__ = own[code].code
    own[code].functions.add(inner)
    own[code].given += 1


def note_whole(frame: Any) -> None:
    """Dynamo has compiled the frame without a break."""
    if (shared := _shared(frame)) is not None:
        shared.was_whole = True


def leave_class(frame: Any) -> bool:
    """The graph of the frame broke. If it is one that a module shares with others of its class, the
    module has its own from now on; otherwise returns False.

    What Dynamo makes of such a frame asks nothing of what is behind the break: it would fit the
    others, too, and they would run without a graph. Assumed: all ranks compile modules in the same
    order, so that they decide alike.
    """
    shared = _shared(frame)
    if shared is None or shared.given < 2:
        return False
    if not shared.was_whole and shared.left == _MOST_LEFT:
        return False
    owner = _owner_of(frame.f_locals["fn"])
    for inner in [f for f in shared.functions if _owner_of(f.__wrapped__) is owner]:
        inner.__code__ = shared.code.replace(co_name=f"{shared.code.co_name}_own")
        shared.functions.discard(inner)
    shared.left += 1
    return True


def _shared(frame: Any) -> _ClassFrame | None:
    """None for a frame that no class has."""
    known = _FRAMES.get(type(_owner_of(frame.f_locals.get("fn"))), {}).values()
    return next((one for one in known if one.code is frame.f_code), None)


def _owner_of(fn: Any) -> Any:
    return getattr(fn, "__self__", fn)
