"""Collectives and memory that are NaN where nobody may look: a missing wait or a use after the
release shows.

with poisoned(numbers): the next steps    # of a model that is compiled
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from patching import patched
from torch import Tensor

from graphshard.runtime import buckets, gather_buffers, reduce
from graphshard.runtime.gather_buffers import GatherBuffer


class PoisonedWork:
    """A collective whose output is NaN until somebody waits for it."""

    def __init__(self, work: Any, hidden: Tensor, output: Tensor) -> None:
        self.work, self.hidden, self.output = work, hidden, output

    def wait(self) -> None:
        self.work.wait()
        self.output.copy_(self.hidden)


def poison(original: Any) -> Any:
    """Of `all_gather` and `reduce_scatter`, whose first argument is the output."""

    def call(output: Tensor, source: Tensor, *rest: Any) -> PoisonedWork:
        hidden = torch.empty_like(output)
        if original.__name__ == "all_gather":
            source = source.clone()  # the input is a view of the output
        work = original(hidden, source, *rest)
        output.fill_(float("nan"))
        return PoisonedWork(work, hidden, output)

    return call


class LateWork:
    """A collective that only runs when somebody waits for it."""

    def __init__(self, issue: Callable[[], Any]) -> None:
        self.wait = lambda: issue().wait()


def late(original: Callable[..., Any]) -> Callable[..., Any]:
    """Of collectives in place: until the wait, outputs are NaN and inputs stay what they are."""

    def call(outputs: Any, inputs: Any, *rest: Any) -> LateWork:
        places = {output.untyped_storage().data_ptr() for output in outputs}
        own = [t.clone() if t.untyped_storage().data_ptr() in places else t for t in inputs]
        for output in outputs:
            output.fill_(float("nan"))
        return LateWork(lambda: original(outputs, own, *rest))

    return call


def poison_released(original: Any) -> Any:
    """The memory stays, so that who reads it finds NaN; the next gather finds its size right."""

    def call(buffer: GatherBuffer) -> None:
        for storage in buffer.storages:
            ones = torch.full((storage.nbytes(),), 0xFF, dtype=torch.uint8)
            storage.copy_(ones.untyped_storage())

    return call


@contextmanager
def poisoned() -> Iterator[dict[str, int]]:
    """All of it; how often each function was called."""
    seen: dict[str, int] = {}

    def counted(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def counting(original: Any) -> Any:
            bad = make(original)
            seen[original.__name__] = 0

            def call(*args: Any) -> Any:
                seen[original.__name__] += 1
                return bad(*args)

            return call

        return counting

    with ExitStack() as stack:
        for module, name, make in (
            (buckets, "all_gather", poison),
            (reduce, "reduce_scatter", poison),
            (buckets, "gather_in_place", late),
            (reduce, "reduce_in_place", late),
            (gather_buffers, "free", poison_released),
        ):
            stack.enter_context(patched(module, name, counted(make)))
        yield seen
