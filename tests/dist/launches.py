"""Launches that tune themselves: the cache that they begin with, and the tunings that they make."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from patching import patched
from pool import Ctx

from graphshard.compiler import shared_graph
from graphshard.compiler.tuning import Tuned, Tuning

OPTIONS: dict[str, Any] = {"fallback": "error", "replan_after": None}


def first_launch(case: Callable[..., Any]) -> Callable[..., Any]:
    """`case` with an empty cache: no earlier launch has tuned anything."""

    @wraps(case)
    def run(ctx: Ctx, *args: Any) -> Any:
        with TemporaryDirectory() as folder, cache_in(Path(folder)):
            return case(ctx, *args)

    return run


def cache_in(folder: Path) -> Any:
    return mock.patch.dict(os.environ, {"GRAPHSHARD_CACHE_DIR": str(folder)})


@contextmanager
def tunings() -> Iterator[list[Tuning]]:
    """Of the graphs that are compiled inside."""
    made: list[Tuning] = []

    def noted(original: Callable[..., Tuned]) -> Callable[..., Tuned]:
        def call(*args: Any) -> Tuned:
            one = original(*args)
            made.append(one.tuning)
            return one

        return call

    with patched(shared_graph, "tuned", noted):
        yield made
