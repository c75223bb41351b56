"""C++ kernels of all regions in a few runs of the compiler.

Inductor gives each kernel for the CPU a run of the compiler of its own, nearly all of which goes
into the same headers (1.4 of 1.6 s here). In: what Inductor asks for while it makes code for
regions. Afterwards: the kernels are in their places, compiled together, each in a namespace of one
source file; on disk each is found by its own key, so that it does not matter which others it was
compiled with. Processes of one machine share the work.

A source that cannot stand in a namespace is compiled in Inductor's own way.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from filelock import FileLock, Timeout
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions, get_compiler_version_info
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.exc import CppCompileError
from torch._inductor.runtime.cache_dir_utils import cache_dir

logger = logging.getLogger(__name__)

LEAST_TOGETHER = 4  # kernels: fewer are not worth another run of the compiler
# To precompile the headers takes as long as to read them this often (9.7 s against 3.4; g++ 12).
READINGS = 3


@dataclass(frozen=True, slots=True)
class Seat:
    """This process among those of the machine that compile the same: its number, and how many."""

    number: int
    of: int

    @staticmethod
    def here() -> Seat:
        return Seat(
            int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        )


@dataclass(slots=True, eq=False)
class Kernel:
    """What stands for a kernel until it is compiled. argument_types: C++'s."""

    argument_types: Sequence[str]
    source: str
    key: str

    @property
    def name(self) -> str:
        return f"kernel_{self.key}"

    def alone(self) -> Callable[..., Any]:
        """In Inductor's way."""
        types = list(self.argument_types)
        return CppPythonBindingsCodeCache.load_pybinding(types, self.source)  # type: ignore[no-any-return]

    def __call__(self, *args: Any) -> Any:
        """Left over from a compilation that failed."""
        return self.alone()(*args)


_TURN = threading.RLock()  # two threads would put each other's functions back


@contextmanager
def compiled_together(seat: Seat) -> Iterator[None]:
    """Inside, Inductor makes code for regions on this thread; at the end their kernels are
    compiled.

    Raises CppCompileError at the end.
    """
    with _TURN:
        yield from _noting(seat)


def _noting(seat: Seat) -> Iterator[None]:
    owner = threading.get_ident()
    kernels: dict[str, Kernel] = {}
    scopes: list[dict[str, Any]] = []
    setting: list[str] = []
    ask, wait = AsyncCompile.cpp_pybinding, AsyncCompile.wait

    def note(compiler: AsyncCompile, argtypes: list[str], source_code: str) -> Any:
        if threading.get_ident() != owner:
            return ask(compiler, argtypes, source_code)
        if not setting:
            setting.extend(_setting())
        found = Kernel(argtypes, source_code, _key(argtypes, source_code, setting))
        return kernels.setdefault(found.key, found)

    def remember(compiler: AsyncCompile, scope: dict[str, Any]) -> None:
        if threading.get_ident() == owner:
            scopes.append(scope)
        wait(compiler, scope)

    AsyncCompile.cpp_pybinding = note  # type: ignore[method-assign, assignment]
    AsyncCompile.wait = remember  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        AsyncCompile.cpp_pybinding, AsyncCompile.wait = ask, wait  # type: ignore[method-assign]
    made = _compiled(list(kernels.values()), seat)
    for scope in scopes:
        scope |= {k: made[v.key] for k, v in scope.items() if isinstance(v, Kernel)}


def _compiled(kernels: Sequence[Kernel], seat: Seat) -> dict[str, Callable[..., Any]]:
    """The function of each kernel, by key."""
    chunks = _chunks(sorted(kernels, key=lambda kernel: kernel.key), seat)
    first = seat.number * len(chunks) // seat.of
    if chunks and seat.number == 0:
        logger.info("compiling %d C++ kernels in %d runs", len(kernels), len(chunks))
    with ThreadPoolExecutor(_workers(seat)) as threads:
        contexts = [copy_context() for _ in chunks]  # which have Inductor's settings
        order = [*chunks[first:], *chunks[:first]]
        done = threads.map(lambda own, chunk: own.run(_build, chunk), contexts, order)
        late = [chunk for chunk, built in zip(order, done, strict=True) if not built]
    for chunk in late:  # while another process was at it
        _build(chunk, waits=True)
    return {kernel.key: _loaded(kernel) for kernel in kernels}


def _workers(seat: Seat) -> int:
    return max(1, (os.cpu_count() or 1) // seat.of)


def _chunks(kernels: Sequence[Kernel], seat: Seat) -> list[Sequence[Kernel]]:
    """The same in each process that has the same kernels."""
    parts = _workers(seat) * seat.of
    size = max(LEAST_TOGETHER, -(-len(kernels) // parts))
    return [kernels[start : start + size] for start in range(0, len(kernels), size)]


def _build(chunk: Sequence[Kernel], *, waits: bool = False) -> bool:
    """Compile what of `chunk` nobody has compiled. False if another process is just doing it."""
    if all(_path(kernel).exists() for kernel in chunk):
        return True
    name = hashlib.sha256("".join(kernel.key for kernel in chunk).encode()).hexdigest()
    try:
        with FileLock(Path(cache_dir(), f"graphshard-{name}.lock"), timeout=-1 if waits else 0):
            missing = [kernel for kernel in chunk if not _path(kernel).exists()]
            if missing:
                _compile(missing)
    except Timeout:
        return False
    except OSError as error:  # a disk that is full, say: Inductor's own way may fail too, and says
        logger.debug("kernels cannot be shared: %s", error)
    return True


def _compile(kernels: Sequence[Kernel]) -> None:
    try:
        # Most processes read the headers less often than making precompiled ones is worth. One that
        # has read them that often is likely to go on: at worst it spends twice what was needed.
        # Once made, they serve all processes.
        pays = len(_Library.cache) >= READINGS or _headers().exists()
        precompiles = config.cpp_cache_precompile_headers and pays
        with config.patch(cpp_cache_precompile_headers=precompiles):
            library = Path(_Library.load_async(_joined(kernels))().path)
    except CppCompileError as error:
        logger.debug("%d kernels cannot be compiled together: %s", len(kernels), error)
        return
    for path in [*map(_path, kernels), *([_headers()] if precompiles else [])]:
        link = path.with_suffix(f".{os.getpid()}")
        link.symlink_to(library)
        link.replace(path)


def _joined(kernels: Sequence[Kernel]) -> str:
    """One source file. What is included comes first, outside of all namespaces."""
    includes: dict[str, None] = {"#define PY_SSIZE_T_CLEAN": None}
    bodies = []
    for kernel in kernels:
        lines = _text(kernel).splitlines()
        includes |= dict.fromkeys(line for line in lines if line.startswith("#include"))
        own = "\n".join(line for line in lines if not line.startswith("#include"))
        bodies.append(
            f"#define kernel {kernel.name}\nnamespace of_{kernel.name} {{\n{own}\n}}\n#undef kernel"
        )
    return "\n".join([*includes, *bodies])


class _Library(CppPythonBindingsCodeCache):
    """A source file as it is compiled, and not loaded. `load_async` gives where it is."""

    cache: dict[str, Any] = {}  # noqa: RUF012 (Inductor's, by source)

    @classmethod
    def _load_library_inner(cls, path: str, key: str) -> Any:
        return SimpleNamespace(path=path)


def _binding(kernel: Kernel) -> Any:
    """Inductor's class that knows how Python calls a kernel, for this one under its own name."""

    class Binding(CppPythonBindingsCodeCache):
        entry_function = kernel.name
        text = ""

        @classmethod
        def load_async(cls, main_code: str, *args: Any, **kwargs: Any) -> Any:
            cls.text = main_code
            return None

    return Binding


def _text(kernel: Kernel) -> str:
    """What Inductor would compile for it."""
    binding = _binding(kernel)
    binding.load_pybinding_async(list(kernel.argument_types), kernel.source)
    return str(binding.text)


def _loaded(kernel: Kernel) -> Callable[..., Any]:
    if not _path(kernel).exists():
        return kernel.alone()
    module = _binding(kernel)._load_library_inner(str(_path(kernel)), kernel.key)
    return getattr(module, kernel.name)  # type: ignore[no-any-return]


def _path(kernel: Kernel) -> Path:
    """In Inductor's folder, which it makes."""
    return Path(cache_dir(), f"graphshard-{kernel.key}.so")


def _headers() -> Path:
    """There if a library was made of precompiled headers in this setting, which then are, too."""
    return Path(cache_dir(), f"graphshard-headers-{_key((), '', _setting())}.so")


def _setting() -> tuple[str, ...]:
    """What a compiled kernel depends on beside its source."""
    options = CppTorchDeviceOptions(vec_isa=pick_vec_isa(), device_type="cpu", shared=True)
    command = CppBuilder(name="o", sources="i", BuildOption=options).get_command_line()
    compiler = get_compiler_version_info(options.get_compiler())
    return CppPythonBindingsCodeCache.suffix_template, command, compiler


def _key(argument_types: Sequence[str], source: str, setting: Sequence[str]) -> str:
    parts = [source, *argument_types, *setting]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
