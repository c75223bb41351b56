"""The frames in which Dynamo compiles modules: one for each class of them.

In: a function that Dynamo wraps. Out: the same, whose code is a copy that modules of one class
share. So one model cannot switch off another, and identical blocks still share their graphs.
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
_MOST_ALONE = 4
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


def leaves_class(frame: Any, *, broke: bool) -> bool:
    """Dynamo has seen the frame. Whether it was one that a module shares with others of its class,
    and is no more: from now on, the module has its own.

    That is for one of which the graph broke. What Dynamo makes of it asks nothing of what is behind
    the break: it would fit the others, too, and they would run without a graph. Assumed: all ranks
    compile modules in the same order, so that they decide alike.
    """
    owner = _owner_of(frame.f_locals.get("fn"))
    for known in _FRAMES.get(type(owner), {}).values():
        mine = {inner for inner in known.functions if _owner_of(inner.__wrapped__) is owner}
        if known.code is not frame.f_code or not mine:
            continue
        if not broke:
            known.was_whole = True
        elif known.given > 1 and (known.was_whole or known.left < _MOST_ALONE):
            for inner in mine:
                inner.__code__ = known.code.replace(co_name=f"{known.code.co_name}_alone")
            known.functions.difference_update(mine)
            known.left += 1
            return True
    return False


def _owner_of(fn: Any) -> Any:
    return getattr(fn, "__self__", fn)
