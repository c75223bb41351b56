"""What Dynamo says of what it traces and has traced, and what steers it."""

from __future__ import annotations

import contextlib
import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch._dynamo
from torch import fx, nn
from torch._dynamo import convert_frame, eval_frame
from torch._dynamo.exc import RestartAnalysis, SkipFrame
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from graphshard.capture.dynamo import hooks

_T = TypeVar("_T")

# What a backend raises to steer Dynamo: no failure.
CONTROL_FLOW = (RestartAnalysis, SkipFrame)


def skip_frame(why: str) -> SkipFrame:
    """What a backend raises to have Dynamo run the frame in eager mode."""
    return SkipFrame(why)


def invisible(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, whose own frame Dynamo leaves alone when it runs; what it calls is its business."""
    eval_frame.skip_code(fn.__code__)
    return fn


def hidden(fn: Callable[..., _T]) -> Callable[..., _T]:
    """`fn`, into which Dynamo does not look, nor into anything that it calls."""
    disabled = torch._dynamo.disable(fn, recursive=True, reason="graphshard's own bookkeeping")
    return disabled  # type: ignore[no-any-return]


def input_example(placeholder: fx.Node) -> Any:
    """The real object behind a graph input of the graph that Dynamo hands to a backend."""
    argument = placeholder.meta.get("grapharg")
    return None if argument is None else argument.example


def tracing_context() -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Makes contexts in which torch's compiler finds what is being traced now, later on."""
    now = torch._guards.TracingContext.try_get()
    return lambda: torch._guards.tracing(now)


def ends_early(gm: fx.GraphModule) -> bool:
    """A graph break ended `gm`, as Dynamo hands it to a backend: the call goes on after it."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return reason is not None and bool(reason.graph_break)


def compile_variant() -> tuple[int, int]:
    """How often the frame being compiled was compiled before, and Dynamo's limit for it."""
    compile_id = torch._guards.CompileContext.current_compile_id()
    done = 0 if compile_id is None else (compile_id.frame_compile_id or 0)
    return done, int(torch._dynamo.config.recompile_limit)


def most_variants() -> int:
    """How often Dynamo compiles one frame at most, whatever its limit for one object is."""
    return int(torch._dynamo.config.accumulated_recompile_limit)


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """Why Dynamo ended a graph early, and where in the user's code.

    at_eager_group: it was at a group that runs through FSDP2's own hooks. at_limit: nothing was
    traced, since the frame has as many variants as Dynamo allows. setting: of Dynamo's, that may
    capture it; "" if it names none.
    """

    reason: str
    where: str
    at_eager_group: bool
    at_limit: bool
    setting: str


def resets() -> int:
    """How often `torch._dynamo.reset()` took away what was compiled, as far as anyone asked."""
    known = convert_frame.input_codes
    if _Resets.token not in known:  # a reset forgets all code that Dynamo has seen
        known.add(_Resets.token)
        _Resets.count += 1
    return _Resets.count


class _Resets:
    """A code object that only `resets` shows to Dynamo, and how often it was forgotten."""

    token = compile("", "<graphshard>", "exec")
    count = 0


def frames_seen() -> int:
    """How many frames Dynamo has looked at; changes when something is compiled."""
    return int(torch._dynamo.utils.counters["frames"]["total"])


def num_graph_breaks() -> int:
    """Of this process so far. Asked in each call: none of them is read."""
    return sum(b.graph_break for b in torch._dynamo.utils.graph_break_reasons)


def graph_breaks(first: int = 0) -> list[GraphBreak]:
    """All graph breaks of this process so far from number `first` on, oldest first."""
    found = [b for b in torch._dynamo.utils.graph_break_reasons if b.graph_break]
    return [_graph_break(b) for b in found[first:]]


def _graph_break(found: Any) -> GraphBreak:
    libraries = (torch.__file__, str(Path(__file__).parent), sysconfig.__file__)
    skipped = tuple(str(Path(file).parent) for file in libraries)
    frames = [f for f in found.user_stack or () if not f.filename.startswith(skipped)]
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown place"
    own_hook = bool(found.user_stack) and found.user_stack[-1].filename == hooks.__file__
    reason = str(found.reason).split("\n", 1)[0]
    setting = re.search(r"torch\._dynamo\.config\.\w+ = True", str(found.reason))
    return GraphBreak(
        reason,
        where,
        own_hook,
        reason.startswith("Dynamo recompile limit"),
        setting[0] if setting else "",
    )


def setting_for(error: BaseException) -> str:
    """Dynamo's setting with which AOTAutograd may trace what it failed on: a backward that picks
    as many rows as data says (`x[mask] = parameter`). "" for any other error."""
    if isinstance(error, DynamicOutputShapeException):
        return "torch._dynamo.config.capture_dynamic_output_shape_ops = True"
    return ""


def wrapped_module(fn: Any) -> nn.Module | None:
    """The module whose call `fn` (made by torch.compile) runs, if any."""
    for candidate in _callables_of(fn):
        owner = getattr(candidate, "__self__", None)
        if isinstance(candidate, nn.Module):
            return candidate
        if isinstance(owner, nn.Module):
            return owner
    return None


def is_in_place(fn: Any) -> bool:
    """`fn` was made for `Module.compile`."""
    names = [getattr(candidate, "__name__", "") for candidate in _callables_of(fn)]
    return "_call_impl" in names


def inside_of(module: nn.Module) -> nn.Module | None:
    """What `torch.compile(module)` of this backend has wrapped, if `module` is such a wrapper."""
    if not isinstance(module, eval_frame.OptimizedModule):
        return None
    return module._orig_mod if hooks.is_ours(module.dynamo_ctx.callback) else None


def compile_as(inner: nn.Module, wrapper: nn.Module) -> None:
    """Compile `inner` in place as the `wrapper` around it is, unless it is compiled in place."""
    assert isinstance(wrapper, eval_frame.OptimizedModule)
    if vars(inner).get("_compiled_call_impl") is None:
        inner._compiled_call_impl = wrapper.dynamo_ctx(inner._call_impl)


def _callables_of(fn: Any) -> Iterator[Any]:
    for _ in range(8):
        if fn is None:
            return
        yield fn
        fn = getattr(fn, "_torchdynamo_orig_callable", None) or getattr(fn, "__wrapped__", None)
