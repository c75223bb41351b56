"""The only package that reads Dynamo's private state: substitutes, scoping, entry points.

`install` is called once, when the backend is first looked up. It changes nothing for any other
backend and nothing for eager FSDP2: the substitutes ask at trace time whose graph is being
built, and the patched entry point acts only for contexts of this backend.
"""

from graphshard.capture.dynamo.entry import Frames, install
from graphshard.capture.dynamo.hooks import substitute_grouped_hooks
from graphshard.capture.dynamo.state import (
    CONTROL_FLOW,
    GraphBreak,
    compile_as,
    compile_variant,
    ends_early,
    frames_seen,
    graph_breaks,
    hidden,
    input_example,
    inside_of,
    invisible,
    is_in_place,
    most_variants,
    num_graph_breaks,
    resets,
    setting_for,
    skip_frame,
    tracing_context,
    wrapped_module,
)

__all__ = [
    "CONTROL_FLOW",
    "Frames",
    "GraphBreak",
    "compile_as",
    "compile_variant",
    "ends_early",
    "frames_seen",
    "graph_breaks",
    "hidden",
    "input_example",
    "inside_of",
    "install",
    "invisible",
    "is_in_place",
    "most_variants",
    "num_graph_breaks",
    "resets",
    "setting_for",
    "skip_frame",
    "substitute_grouped_hooks",
    "tracing_context",
    "wrapped_module",
]
