"""C++ kernels that are compiled together: what Inductor makes of each alone."""

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from drawing import drawing
from hypothesis import given
from hypothesis import strategies as st
from patching import patched
from pool import Ctx, Pool
from torch import Tensor, fx
from torch._inductor import codecache, config, cpu_vec_isa
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from graphshard.codegen import inductor as codegen
from graphshard.codegen import kernels
from graphshard.codegen.kernels import Seat, compiled_together

COUNT = int(os.environ.get("GRAPHSHARD_KERNELS", "3"))
SEED = os.environ.get("GRAPHSHARD_KERNELS_SEED")
ALONE = Seat(0, 1)


@pytest.fixture(scope="module")
def inductor() -> Iterator[Pool]:
    with Pool("inductor") as workers:
        yield workers


@contextmanager
def fresh_cache() -> Iterator[Path]:
    """Inductor's, for this rank alone."""
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    with TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        try:
            yield Path(folder)
        finally:
            os.environ.pop("TORCHINDUCTOR_CACHE_DIR")
            if before is not None:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


# -- what is drawn ---------------------------------------------------------------------------------

STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: torch.nn.functional.gelu(x.float()),
    "sum": lambda x: x + x.sum(-1, keepdim=True),
    "half": lambda x: x.to(torch.bfloat16) * 3,
    "whole": lambda x: (x * 7).to(torch.int64) // 2,
    "softmax": lambda x: x.float().softmax(-1),
    "turn": lambda x: x.transpose(-1, -2).contiguous(),
    "most": lambda x: x - x.amax(0, keepdim=True),
    "many": lambda x: torch.cat([x, x * 2], -1),
}
programs = st.lists(
    st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=3), min_size=2, max_size=6
)


def body_of(steps: Sequence[str], size: int) -> fx.GraphModule:
    def run(x: Tensor) -> tuple[Tensor]:
        for step in steps:
            x = STEPS[step](x)
        return (x,)

    with FakeTensorMode():
        example = torch.empty(size, 8 + size)
    found: fx.GraphModule = make_fx(run, decomposition_table=select_decomp_table())(example)
    return found


def both_ways(ctx: Ctx, drawn: list[list[str]]) -> None:
    """Bits of kernels compiled together are those of kernels compiled one by one."""
    with fresh_cache() as folder:
        bodies = [body_of(steps, 3 + place) for place, steps in enumerate(drawn)]
        together = codegen.compile_regions(bodies, {}, trains=False, seat=ALONE)
        assert list(folder.glob("graphshard-*.so"))
    bodies = [body_of(steps, 3 + place) for place, steps in enumerate(drawn)]
    alone = [codegen._compiled(body, trains=False) for body in bodies]
    for place, (first, second) in enumerate(zip(together, alone, strict=True)):
        x = torch.randn(3 + place, 11 + place)
        (ours,), (theirs,) = first([x.clone()]), second([x.clone()])
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


def test_neighbours_do_not_change_a_kernel(inductor: Pool) -> None:
    """`GRAPHSHARD_KERNELS=30 GRAPHSHARD_KERNELS_SEED=1` draws more than CI's 3."""

    @drawing(COUNT, SEED)
    @given(programs)
    def draw(drawn: list[list[str]]) -> None:
        inductor.run(1, both_ways, drawn, timeout_s=300)

    draw()


# -- how they are compiled -------------------------------------------------------------------------

PREFIX = "#include <torch/csrc/inductor/cpp_prefix.h>\n"
TIMES = PREFIX + 'extern "C" void kernel(const float* x, float* y) {{ y[0] = x[0] * {factor}; }}\n'
# A specialization belongs into the namespace of its template.
OUTSIDE = (
    PREFIX
    + "struct Own { int x; };\n"
    + "template <> struct std::hash<Own> { size_t operator()(const Own& o) { return o.x; } };\n"
    + 'extern "C" void kernel(const float* x, float* y) '
    + "{ y[0] = x[0] * std::hash<Own>()(Own{5}); }\n"
)


def asked(sources: Sequence[str], seat: Seat) -> list[float]:
    """What kernels of `sources` make of 2."""
    scope: dict[str, Any] = {}
    with compiled_together(seat):
        compiler = AsyncCompile()
        for place, source in enumerate(sources):
            scope[str(place)] = compiler.cpp_pybinding(["const float*", "float*"], source)
        compiler.wait(scope)
    found = []
    for kernel in scope.values():
        y = torch.zeros(1)
        kernel(torch.full((1,), 2.0), y)
        found.append(float(y))
    return found


def with_a_stranger(ctx: Ctx) -> list[float]:
    with fresh_cache():
        return asked([TIMES.format(factor=3), OUTSIDE, TIMES.format(factor=7)], ALONE)


def test_what_cannot_stand_beside_others_is_compiled_alone(inductor: Pool) -> None:
    assert inductor.run(1, with_a_stranger) == [[6.0, 10.0, 14.0]]


def at_once(ctx: Ctx) -> list[list[float]]:
    before = AsyncCompile.cpp_pybinding, AsyncCompile.wait
    sources = [[TIMES.format(factor=10 * thread + n) for n in range(2)] for thread in range(3)]
    with fresh_cache(), ThreadPoolExecutor(3) as threads:
        found = list(threads.map(partial(asked, seat=ALONE), sources))
    assert before == (AsyncCompile.cpp_pybinding, AsyncCompile.wait)
    return found


def test_threads_take_turns(inductor: Pool) -> None:
    assert inductor.run(1, at_once) == [[[0.0, 2.0], [20.0, 22.0], [40.0, 42.0]]]


def shared(ctx: Ctx, folder: str) -> tuple[list[float], int]:
    """What the kernels make of 2, and how many runs of the compiler this rank needed."""
    runs = []

    def counting(original: Callable[..., None]) -> Callable[..., None]:
        def call(chunk: Sequence[Any]) -> None:
            runs.append(len(chunk))
            original(chunk)

        return call

    sources = [TIMES.format(factor=number) for number in range(8)]
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    try:
        with patched(kernels, "_compile", counting), patched(os, "cpu_count", lambda f: lambda: 2):
            return asked(sources, Seat(ctx.rank, ctx.world_size)), len(runs)
    finally:
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]


def test_ranks_of_a_machine_share_the_work(inductor: Pool, tmp_path: Path) -> None:
    ranks = inductor.run(2, shared, str(tmp_path))
    assert [found for found, _ in ranks] == [[2.0 * number for number in range(8)]] * 2
    assert [runs for _, runs in ranks] == [1, 1]
    assert [runs for _, runs in inductor.run(2, shared, str(tmp_path))] == [0, 0]


def many_sources(ctx: Ctx) -> tuple[list[float], list[int]]:
    """What one kernel after the other makes of 2, and which of them had headers precompiled. The
    last one is asked for as in a process that has read none yet."""
    found: list[float] = []
    makers: list[int] = []

    def counting(original: Callable[..., str]) -> Callable[..., str]:
        def call(*args: Any, **kwargs: Any) -> str:
            makers.append(len(found))
            return original(*args, **kwargs)

        return call

    def ask(numbers: range) -> None:
        with patched(kernels._Library, "cache", lambda cache: {}):
            for number in numbers:
                found.extend(asked([TIMES.format(factor=number)], ALONE))

    with fresh_cache(), patched(codecache, "_precompile_header", counting):
        ask(range(kernels.READINGS + 1))
        ask(range(kernels.READINGS + 1, kernels.READINGS + 2))
    return found, makers


def test_headers_are_precompiled_once_that_pays(inductor: Pool) -> None:
    first = kernels.READINGS
    doubles = [2.0 * number for number in range(first + 2)]
    assert inductor.run(1, many_sources) == [(doubles, [first, first + 1])]


# A compiler that is older than the processor.
OLD = """#!/bin/sh
for argument in "$@"; do
    case "$argument" in {flag}) echo "unknown $argument" >&2; exit 1;; esac
done
exec g++ "$@"
"""


def with_old_compiler(ctx: Ctx) -> tuple[str, str, bool]:
    """A flag that it does not know, those that were used in the end, and whether they work."""
    vectors = {"cpp.simdlen": None}  # the pool's workers do without
    codegen.forget_vector_instructions()
    with fresh_cache(), config.patch(vectors):
        flags = cpu_vec_isa.pick_vec_isa().build_arch_flags().split()
    flag = next(f for f in ("-mavx512f", "-mavx2") if f in flags)
    codegen.forget_vector_instructions()
    with fresh_cache(), TemporaryDirectory() as folder, config.patch(vectors):
        compiler = Path(folder, "g++")
        compiler.write_text(OLD.format(flag=flag))
        compiler.chmod(compiler.stat().st_mode | stat.S_IEXEC)
        settings = {"cpp.cxx": (None, str(compiler))}
        body = body_of(["gelu"], 16)
        (run,) = codegen.compile_regions([body], settings, trains=False, seat=ALONE)
        x = torch.randn(16, 24)
        is_right = torch.allclose(run([x])[0], torch.nn.functional.gelu(x), atol=1e-6)
        with config.patch(settings):
            used = cpu_vec_isa.pick_vec_isa().build_arch_flags()
    codegen.forget_vector_instructions()
    return flag, used, is_right


def test_a_compiler_that_is_older_than_the_processor(inductor: Pool) -> None:
    ((flag, used, is_right),) = inductor.run(1, with_old_compiler, timeout_s=300)
    assert is_right
    assert flag not in used.split()
