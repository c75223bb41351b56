"""The one module that reads Dynamo's private state: substitutes, scoping, entry points.

`install` is called once, when the backend is first looked up. It changes nothing for any other
backend and nothing for eager FSDP2: the substitutes ask at trace time whose graph is being
built, and the patched entry point acts only for contexts of this backend.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any, TypeVar

import torch
import torch._dynamo
from torch import fx, nn
from torch._dynamo import eval_frame, external_utils
from torch._dynamo.convert_frame import CatchErrorsWrapper
from torch._dynamo.exc import RestartAnalysis, SkipFrame
from torch._dynamo.guards import install_guard
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import (
    _disable_side_effect_safety_checks_for_current_subtracer as allow_side_effects,
)
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from graphshard import fsdp2
from graphshard.capture.entrance import Entrance
from graphshard.capture.hooks import enter_group, leave_group
from graphshard.capture.ports import is_entered_as, port_of, prepare
from graphshard.options import Options, is_disabled, parse_options

# What a backend raises to steer Dynamo: no failure.
CONTROL_FLOW = (RestartAnalysis, SkipFrame)


def skip_frame(why: str) -> SkipFrame:
    """What a backend raises to have Dynamo run the frame in eager mode."""
    return SkipFrame(why)


_T = TypeVar("_T")

_WRAPPERS = (
    "_torchdynamo_orig_backend",
    "_torchdynamo_orig_callable",
    "_compiler_fn",
    "compiler_fn",
    "func",
)


def _wrappers(callback: Any) -> Iterator[Any]:
    """Dynamo's wrappers around a backend function, from the outside, the function last."""
    for _ in range(16):
        yield callback
        inner = next((getattr(callback, n) for n in _WRAPPERS if hasattr(callback, n)), None)
        if inner is None:
            return
        callback = inner


def is_ours(callback: Any) -> bool:
    return any(getattr(w, "is_graphshard_backend", False) for w in _wrappers(callback))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _compiling_for_graphshard() -> bool:
    transaction = InstructionTranslator.current_tx()
    return is_ours(transaction.output.compiler_fn)


_PRE_FORWARD: Any = FSDPState._pre_forward
_POST_FORWARD: Any = FSDPState._post_forward
# What FSDP2 itself does under Dynamo: break the graph and run the hook in eager mode.
_eager_pre_forward = torch._dynamo.disable(
    _PRE_FORWARD.__wrapped__, recursive=True, reason="skipping FSDP hooks"
)
_eager_post_forward = torch._dynamo.disable(
    _POST_FORWARD.__wrapped__, recursive=True, reason="skipping FSDP hooks"
)


def _pre_forward(self: Any, module: Any, args: Any, kwargs: Any) -> Any:
    entrance = module._graphshard_entrance()
    if entrance is None:
        return _eager_pre_forward(self, module, args, kwargs)
    return allow_side_effects(enter_group, module, entrance, args, kwargs)


def _post_forward(self: Any, module: Any, args: Any, output: Any) -> Any:
    if not _compiling_for_graphshard() or not module._graphshard_port.entered["top"]:
        return _eager_post_forward(self, module, args, output)
    return allow_side_effects(leave_group, module, output)


def _graphshard_entrance(self: nn.Module) -> Entrance | None:
    """What entering the module's group is traced as; None leaves it to FSDP2's own hook.

    Runs at trace time, on the real module: Dynamo calls a method with the constant mark on the
    real object and takes its result as a constant. The method has to be found on the class under
    the function's own name. What the result depends on becomes one guard.
    """
    transaction = InstructionTranslator.current_tx()
    state, is_new = fsdp2.state_of(self), port_of(self) is None
    if not is_ours(transaction.output.compiler_fn) or not prepare(state):
        return None
    if is_new:
        substitute_grouped_hooks(fsdp2.siblings(state))
    port = port_of(self)
    assert port is not None
    entrance = port.entrance()
    source = transaction.output.side_effects[self].source
    _guard(source, functools.partial(is_entered_as, entrance), f"group {port.fqn} as it was traced")
    return entrance


def _guard(source: Any, holds: Callable[[Any], bool], text: str) -> None:
    """The graph that is being traced is valid while `holds` of the object at `source`.

    text: what TORCH_LOGS="recompiles" shows when it holds no more.
    """

    def create(builder: Any, guard: Any) -> None:
        builder.get_guard_manager(guard).add_lambda_guard(holds, [text], guard.user_stack)

    install_guard(source.make_guard(create))


def substitute_grouped_hooks(states: Iterable[fsdp2.State]) -> None:
    """Make the closures that `fully_shard([a, b])` registered traceable."""
    for state in states:
        for hook, is_pre in fsdp2.forward_hooks(state):
            if not torch._dynamo.trace_rules.is_polyfilled_callable(hook):
                _substitute_grouped(hook, is_pre)


def _substitute_grouped(hook: Callable[..., Any], is_pre: bool) -> None:
    eager = torch._dynamo.disable(hook, recursive=True, reason="skipping FSDP hooks")

    def pre(module: Any, args: Any, kwargs: Any) -> Any:
        entrance = module._graphshard_entrance()
        if entrance is None:
            return eager(module, args, kwargs)
        return allow_side_effects(enter_group, module, entrance, args, kwargs)

    def post(module: Any, args: Any, output: Any) -> Any:
        if not _compiling_for_graphshard() or not module._graphshard_port.entered["top"]:
            return eager(module, args, output)
        return allow_side_effects(leave_group, module, output)

    torch.compiler.substitute_in_graph(hook, skip_signature_check=True)(pre if is_pre else post)


@functools.cache
def install(enter: Callable[..., Callable[..., Any]]) -> None:
    """Register the substitutes and patch the entry point, once per process.

    enter: gets each function that `torch.compile` made for this backend, and the options, and
    returns the function that users call instead.
    """
    constant = torch.compiler.assume_constant_result(_graphshard_entrance)
    setattr(fsdp2.ShardedModule, _graphshard_entrance.__name__, constant)
    torch.compiler.substitute_in_graph(_PRE_FORWARD, skip_signature_check=True)(_pre_forward)
    torch.compiler.substitute_in_graph(_POST_FORWARD, skip_signature_check=True)(_post_forward)
    _patch_entry(enter)


def _patch_entry(enter: Callable[..., Callable[..., Any]]) -> None:
    """Act on what `torch.compile` makes for this backend, and on nothing else."""
    context = eval_frame._TorchDynamoContext
    original = context.__call__

    @functools.wraps(original)
    def call(self: Any, fn: Any) -> Any:
        if not is_ours(self.callback):
            return original(self, fn)
        if is_disabled():
            # As torch.compile(fn, disable=True) does; torch marks the result, which it cannot do
            # to a bound method (`Module.compile` gives one).
            return fn if isinstance(fn, nn.Module) else _plain(fn)
        settings = _settings(self.callback)
        self.callback = _Unsplit(self.callback._torchdynamo_orig_backend, self.callback.hooks)
        is_module = isinstance(fn, nn.Module) or isinstance(
            getattr(fn, "__self__", None), nn.Module
        )
        with _hooks_inside() if is_module else contextlib.nullcontext():
            compiled = original(self, fn)
        return compiled if isinstance(fn, nn.Module) else enter(compiled, settings)

    context.__call__ = call  # type: ignore[method-assign]


def _plain(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return call


class _Unsplit(CatchErrorsWrapper):
    """Compiles a frame whole inside DistributedDataParallel too.

    By default Dynamo splits such a graph by DDP's buckets, and each part would be a graph of its
    own that knows nothing of the others' groups.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        splits = torch._dynamo.utils.get_optimize_ddp_mode() == "ddp_optimizer"
        whole = torch._dynamo.config.patch(optimize_ddp=False)
        with _no_collections(), whole if splits else contextlib.nullcontext():
            return super().__call__(*args, **kwargs)


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Nearly all objects of a compilation live until its end: to look for garbage again and again
    meanwhile took a third of the time of a deep model."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with torch._dynamo.config.patch(run_gc_after_compile=False):
            yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _hooks_inside() -> Iterator[None]:
    """While a module is wrapped: the frame that Dynamo compiles includes the module's own hooks.

    Dynamo does so only with the process-wide setting `wrap_top_frame`, and with one frame for
    all modules of the process: what it decides for one (its recompile limit, a skipped frame)
    then holds for all. Here each class of modules has a frame of its own, so that identical
    blocks still share their graphs.
    """
    wrap = external_utils.wrap_inline

    def wrap_inline(fn: Any) -> Any:
        inner = wrap(fn)
        owner = getattr(fn, "__self__", fn)
        inner.__code__ = _frame_of_class(inner.__code__, type(owner))  # type: ignore[arg-type]
        return inner

    external_utils.wrap_inline = wrap_inline
    try:
        with torch._dynamo.config.patch(wrap_top_frame=True):
            yield
    finally:
        external_utils.wrap_inline = wrap


@functools.cache
def _frame_of_class(code: CodeType, owner: type) -> CodeType:
    return code.replace(co_name=f"call_{owner.__name__}")


def _settings(callback: Any) -> Options:
    """The options given to `torch.compile`. Raises OptionsError before anything is traced."""
    for wrapper in _wrappers(callback):
        given = getattr(wrapper, "kwargs", None)
        if isinstance(given, dict):
            return parse_options(given.get("options"), given.get("mode"))
    return Options()


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


def compile_variant() -> tuple[int, int]:
    """How often the frame being compiled was compiled before, and Dynamo's limit for it."""
    compile_id = torch._guards.CompileContext.current_compile_id()
    done = 0 if compile_id is None else (compile_id.frame_compile_id or 0)
    return done, int(torch._dynamo.config.recompile_limit)


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """Why Dynamo ended a graph early, and where in the user's code.

    at_eager_group: it was at a group that runs through FSDP2's own hooks.
    """

    reason: str
    where: str
    at_eager_group: bool


def frames_seen() -> int:
    """How many frames Dynamo has looked at; changes when something is compiled."""
    return int(torch._dynamo.utils.counters["frames"]["total"])


def graph_breaks() -> list[GraphBreak]:
    """All graph breaks of this process so far, oldest first."""
    return [_graph_break(b) for b in torch._dynamo.utils.graph_break_reasons if b.graph_break]


def _graph_break(found: Any) -> GraphBreak:
    libraries = (torch.__file__, __file__, sysconfig.__file__)
    skipped = tuple(str(Path(file).parent) for file in libraries)
    frames = [f for f in found.user_stack or () if not f.filename.startswith(skipped)]
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown place"
    own_hook = bool(found.user_stack) and found.user_stack[-1].filename == __file__
    return GraphBreak(str(found.reason).split("\n", 1)[0], where, own_hook)


def wrapped_module(fn: Any) -> nn.Module | None:
    """The module whose call `fn` (made by torch.compile) runs, if any."""
    for candidate in _callables_of(fn):
        owner = getattr(candidate, "__self__", None)
        if isinstance(candidate, nn.Module):
            return candidate
        if isinstance(owner, nn.Module):
            return owner
    return None


def _callables_of(fn: Any) -> Iterator[Any]:
    for _ in range(8):
        if fn is None:
            return
        yield fn
        fn = getattr(fn, "_torchdynamo_orig_callable", None) or getattr(fn, "__wrapped__", None)
