"""Where a fault strikes: a rank's nth passage of a point of the runtime, counted from a moment on.

Nothing of this is in the package: the worker replaces functions by ones that count.
"""

from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter

from graphshard.compiler import graph_compiler, tuning
from graphshard.report import announce
from graphshard.runtime import agree, finish, gather, reduce

# point -> the function, and where it is looked up when it is called
POINTS: dict[str, tuple[Any, str]] = {
    "capture": (graph_compiler.GraphCompiler, "compile"),
    "agreement": (agree, "_ask"),
    "gather issue": (gather, "send"),
    "gather wait": (gather.Gather, "wait"),
    "reduce issue": (reduce.Reduction, "_issue"),
    "reduce wait": (reduce.Reduction, "wait"),
    "all-reduce": (reduce.Reduction, "all_reduce"),
    "all-reduce wait": (reduce.AllReduce, "wait"),
    "assign": (reduce.Reduction, "assign"),
    "finish": (finish, "_finish"),
    "replan": (tuning.Tuning, "_judge"),
    "save": (announce, "_stem"),
    "checkpoint": (FileSystemWriter, "write_data"),
}


def strike(point: str, count: int, fault: Callable[[], None]) -> None:
    """Call `fault` once, before passage `count` (from 0) of `point`."""
    place, name = POINTS[point]
    original, left = getattr(place, name), count

    def passed(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left == -1:
            fault()
        return original(*args, **kwargs)

    setattr(place, name, passed)
