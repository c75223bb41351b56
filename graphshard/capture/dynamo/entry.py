"""Where `torch.compile` hands a function to this backend, and the frames Dynamo makes for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from types import CodeType
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._dynamo import eval_frame
from torch._dynamo.convert_frame import CatchErrorsWrapper, ConvertFrame
from torch._dynamo.exc import (
    InternalTorchDynamoError,
    TorchDynamoException,
    TorchRuntimeError,
    Unsupported,
)
from torch._dynamo.output_graph import GraphCompileReason
from torch._dynamo.types import ConvertFrameReturn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from graphshard.capture.dynamo.frames import hooks_inside, leave_class, note_whole
from graphshard.capture.dynamo.hooks import is_ours, substitute_hooks, wrappers
from graphshard.capture.dynamo.logs import without_silent_logs
from graphshard.capture.dynamo.recurrent import substitute_recurrent
from graphshard.capture.interpreter import no_collections, on_large_stack
from graphshard.cost.profile import look_up
from graphshard.options import Options, is_disabled, parse_options

_LOOK_AGAIN = _FrameExecStrategy(_FrameAction.DEFAULT, _FrameAction.DEFAULT)


@functools.cache
def install(
    enter: Callable[..., Callable[..., Any]], unplugged: Callable[..., Callable[..., Any]]
) -> None:
    """Register the substitutes and patch the entry point, once per process.

    enter: gets each function that `torch.compile` made for this backend, the options, and the
    `Frames` of it; returns the function that users call instead.
    unplugged: for GRAPHSHARD_DISABLE.
    """
    substitute_hooks()
    substitute_recurrent()
    _patch_entry(enter, unplugged)


def _patch_entry(
    enter: Callable[..., Callable[..., Any]], unplugged: Callable[..., Callable[..., Any]]
) -> None:
    """Act on what `torch.compile` makes for this backend, and on nothing else."""
    context = eval_frame._TorchDynamoContext
    original = context.__call__

    @functools.wraps(original)
    def call(self: Any, fn: Any) -> Any:
        if not is_ours(self.callback):
            return original(self, fn)
        if is_disabled():
            return unplugged(fn)  # as torch.compile(fn, disable=True) does
        settings = _settings(self.callback)
        self.callback = Frames(self.callback._torchdynamo_orig_backend, self.callback.hooks)
        is_module = isinstance(fn, nn.Module) or isinstance(
            getattr(fn, "__self__", None), nn.Module
        )
        with hooks_inside() if is_module else nullcontext():
            compiled = original(self, fn)
        is_done = isinstance(fn, nn.Module)  # by this function, when torch called it for the module
        if is_done:
            return compiled
        return enter(compiled, settings, self.callback, dynamic=self._dynamic)

    context.__call__ = call  # type: ignore[method-assign]


class Frames(CatchErrorsWrapper):
    """Compiles frames, whole inside DistributedDataParallel too.

    By default Dynamo splits such a graph by DDP's buckets, and each part would be a graph of its
    own that knows nothing of the others' groups.

    goes_on: asked at Dynamo's recompile limit: whether to compile further nevertheless.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._skipped: dict[CodeType, None] = {}
        self._beyond: set[CodeType] = set()
        self.goes_on: Callable[[], bool] = lambda: False
        convert = self._torchdynamo_orig_backend
        # With `fullgraph` it is another one, and a break is an error.
        if isinstance(convert, ConvertFrame) and not isinstance(
            convert._inner_convert, _NotesBreaks
        ):
            convert._inner_convert = _NotesBreaks(convert._inner_convert)  # type: ignore[assignment]

    def __call__(self, frame: Any, *args: Any) -> Any:
        splits = torch._dynamo.utils.get_optimize_ddp_mode() == "ddp_optimizer"
        whole = torch._dynamo.config.patch(optimize_ddp=False) if splits else nullcontext()
        # Recurrent modules have a substitute (`graphshard.capture.dynamo.recurrent`).
        later = torch._dynamo.config.patch(run_gc_after_compile=False, allow_rnn=True)
        breaks = len(torch._dynamo.utils.graph_break_reasons)
        with no_collections(), later, without_silent_logs(), whole:
            result = self._within_limit(frame, *args)
        if len(torch._dynamo.utils.graph_break_reasons) > breaks:
            if leave_class(frame):
                return ConvertFrameReturn(apply_to_code=False)
        elif result.guarded_code is not None:
            note_whole(frame)
        if result.guarded_code is None and result.apply_to_code:
            self._skipped[frame.f_code] = None
        return result

    def _within_limit(self, frame: Any, *args: Any) -> Any:
        """Dynamo's limit, or where `goes_on`, the one of all graphs of a frame together."""
        if frame.f_code not in self._beyond:
            result = on_large_stack(super().__call__, frame, *args)
            if result.frame_exec_strategy.cur_action != _FrameAction.RUN_ONLY or not self.goes_on():
                return result
            self._beyond.add(frame.f_code)
        limit = torch._dynamo.config.accumulated_recompile_limit
        with torch._dynamo.config.patch(recompile_limit=limit):
            return on_large_stack(super().__call__, frame, *args)

    def try_again(self, failed: bool) -> None:
        """After each call: what was skipped in one that `failed` is looked at again in the next.

        An exception of the user's that Dynamo meets while it traces makes it skip a frame for good.
        """
        for code in self._skipped if failed else ():
            set_code_exec_strategy(code, _LOOK_AGAIN)
        self._skipped.clear()


class _NotesBreaks:
    """`convert`, which makes a graph of a frame. Where it gives the whole frame up for a break that
    it cannot go on after, Dynamo only logs that; here it counts as the break that it is. So does an
    error of Dynamo's own, which it raises otherwise (something is not implemented, or an op does
    not run without data): the frame runs as it is, and has its say about what is wrong there.
    """

    def __init__(self, convert: Any) -> None:
        self._convert = convert

    def __getattr__(self, name: str) -> Any:
        return getattr(self._convert, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._convert(*args, **kwargs)
        except Unsupported as error:
            # At the recompile limit nothing broke: the error says how frames go on.
            if error.frame_exec_strategy is None:
                GraphCompileReason(str(error), list(error.real_stack))  # enters itself in the list
            raise
        except _OWN_ERRORS as error:
            cause = _cause(error)
            stack = getattr(cause, "real_stack", None) or getattr(error, "real_stack", None)
            GraphCompileReason(f"{type(cause).__name__}: {cause}", list(stack or ()))
            raise Unsupported(str(error), real_stack=stack) from error


# What comes from the backend is none of these (BackendCompilerFailed), nor what the user asked to
# be told (constraints, limits).
_OWN_ERRORS = (
    InternalTorchDynamoError,
    TorchRuntimeError,
    AssertionError,
    IndexError,
    GuardOnDataDependentSymNode,  # with the user's `capture_dynamic_output_shape_ops`
)


def _cause(error: BaseException) -> BaseException:
    """What Dynamo has wrapped."""
    inner = error.__cause__ or error.__context__
    return error if inner is None or not isinstance(error, TorchDynamoException) else _cause(inner)


def _settings(callback: Any) -> Options:
    """The options of this `torch.compile`. Raises OptionsError before anything is traced.

    They take the place of what was given, so that a graph that is compiled later, after somebody
    has changed a file or the working directory, has the same.
    """
    for wrapper in wrappers(callback):
        given = getattr(wrapper, "kwargs", None)
        if isinstance(given, dict):
            settings = parse_options(given.get("options"), given.get("mode"), look_up)
            given["options"] = settings
            return settings
    return parse_options(None, None, look_up)
