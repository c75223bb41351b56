"""`graphshard.capture.interpreter`: memory of frames is not mapped again and again."""

import resource
import sys

import pytest

from graphshard.capture.interpreter import on_large_stack

TURNS = 50
DEPTH = 400  # more than a chunk of 16 KiB holds


def leaf(a: int, b: int) -> int:
    return a + b


def deeper(depth: int) -> None:
    """Calls a leaf in a loop at each depth, so that some of them go over the end of a chunk."""
    for turn in range(TURNS):
        leaf(turn, depth)
    if depth:
        deeper(depth - 1)


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.mark.skipif(sys.platform != "linux", reason="counts Linux's page faults")
def test_no_chunk_is_mapped_again_and_again() -> None:
    deeper(DEPTH)
    before = page_faults()
    deeper(DEPTH)
    apart = page_faults() - before
    on_large_stack(deeper, DEPTH)
    before = page_faults()
    on_large_stack(deeper, DEPTH)
    assert page_faults() - before < apart / 2


def test_what_comes_back() -> None:
    assert on_large_stack(leaf, 1, b=2) == 3
    with pytest.raises(TypeError):
        on_large_stack(leaf, 1)  # type: ignore[call-arg]
