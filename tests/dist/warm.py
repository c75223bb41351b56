"""Processes that need not import torch again, and scripts and modules that run in them."""

import faulthandler
import gc
import multiprocessing as mp
import os
import runpy
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

# By the server that processes are forked from: what a first compilation imports in each of them.
PRELOADED = [
    "pytest",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.experimental",
    "torch.distributed.tensor.parallel",
    "torch._dynamo.backends.registry",
    "torch._dynamo.repro.after_dynamo",
    "torch._inductor.compile_fx",
    "torch.export",
    "graphshard.backend",
    "graphshard.compiler.graph_compiler",
    "graphshard.report.announce",
    "graphshard.report.explain",
]


def warm_context(device_type: str = "cpu") -> Any:
    """A `multiprocessing` context. Processes are forked from a server that has only imported torch,
    so fresh ones cost little."""
    if device_type == "cuda":
        return mp.get_context("spawn")  # an import may touch CUDA, which does not survive a fork
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def leave_out() -> None:
    """What torch does in a compilation for logs and warnings that nobody reads here: a sixth of its
    time.

    AOTAutograd prints each graph; torch.fx searches the arguments of each node that it makes for
    what it would warn about; Dynamo empties the CPU's caches to time the guards of each graph once.
    """
    from torch._dynamo import guards
    from torch.fx import graph

    torch.fx.GraphModule.print_readable = lambda *args, **kwargs: ""  # type: ignore[method-assign]
    own = {**vars(graph.pytree), "tree_iter": lambda arguments: ()}
    graph.pytree = SimpleNamespace(**own)  # type: ignore[assignment]
    guards.profile_guard_manager = lambda *args: 0.0


def run_script(
    script: Path,
    world_size: int,
    limit_s: float,
    *args: str,
    environment: Mapping[str, str] | None = None,
) -> str:
    """What rank 0 of `script` prints; its ranks have the environment that torchrun gives them."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        **(environment or {}),
    }
    ranks = [{**job, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
    return _said_by_first([str(script), *args], ranks, limit_s)


def python(
    *args: str, environment: Mapping[str, str] | None = None, limit_s: float | None = None
) -> str:
    """As `bench.rounds.python` does it: the stdout of `python -m MODULE ...`."""
    return _said_by_first(args, [environment or {}], limit_s)


def _said_by_first(
    args: Sequence[str], environments: Sequence[Mapping[str, str]], limit_s: float | None
) -> str:
    """The stdout of the first of the processes; an assertion that all end well, with the stderr."""
    with tempfile.TemporaryDirectory(prefix="graphshard-warm-") as name:
        places = [Path(name) / str(index) for index in range(len(environments))]
        processes = [
            warm_context().Process(target=_main, args=(args, environment, place, limit_s))
            for environment, place in zip(environments, places, strict=True)
        ]
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.join(limit_s)
            codes = [process.exitcode for process in processes]  # None: still running at the limit
            said = "\n".join(place.with_suffix(".err").read_text() for place in places)
            assert codes == [0] * len(processes), f"exit codes {codes}\n{said}"
            return places[0].with_suffix(".out").read_text()
        finally:
            for process in processes:
                process.kill()
                process.join()


def _main(
    args: Sequence[str], environment: Mapping[str, str], place: Path, limit_s: float | None
) -> None:
    os.environ.update(environment)
    for stream, number in ((".out", 1), (".err", 2)):
        with place.with_suffix(stream).open("w") as file:
            os.dup2(file.fileno(), number)
    faulthandler.enable()
    if limit_s is not None:  # what a process that hangs is at, before it is killed
        faulthandler.dump_traceback_later(max(1.0, limit_s - 5.0))
    torch.set_num_threads(1)
    gc.freeze()  # the modules: collections pass them over
    if args[0] == "-m":
        sys.argv = list(args[1:])
        runpy.run_module(args[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[:0] = list(args), [str(Path(args[0]).parent)]
        runpy.run_path(args[0], run_name="__main__")
