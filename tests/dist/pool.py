"""Persistent worker processes for tests that need several ranks.

`Pool.run(2, fn, *args)` runs `fn(ctx, *args)` on two ranks and returns their results in rank order.
The processes of a rank count start at the first case that asks for it and serve all later ones;
between cases the ranks meet at a barrier, and Dynamo is reset unless a case keeps what it compiled.
A case that fails, hangs or loses a rank costs its workers: they are killed, and the next case gets
fresh ones, so no case sees what a broken one left behind.

GRAPHSHARD_TEST_DEVICE=cuda runs the same cases on GPUs with NCCL, several ranks on one GPU if there
are more of them; GRAPHSHARD_TEST_WORLD=1 caps the rank count.
"""

import contextlib
import faulthandler
import gc
import multiprocessing as mp
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from patching import gather_as_one_tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from warm import leave_out, warm_context

START_S = 120.0  # to start the workers of one rank count
SETTLE_S = 60.0  # to reset and meet at the barrier after a case
GRACE_S = 3.0  # for the other ranks, once one has failed
COLLECTIVE_S = 60.0  # process-group timeout
# The threads of each of gloo's process groups wake up 100 times a second, used or not.
MOST_GROUPS = 8


@dataclass(frozen=True)
class Ctx:
    """What a case knows of the rank it runs on."""

    rank: int
    world_size: int
    mesh: DeviceMesh
    device: torch.device


class WorkerError(Exception):
    """At least one rank raised, died or did not finish; the message shows every such rank."""


class WorkerTimeout(WorkerError):
    """The time limit of the case passed before every rank had finished."""


@dataclass(frozen=True)
class _Reply:
    ok: bool
    value: Any  # the result, or the text of the failure


def device_type() -> str:
    return os.environ.get("GRAPHSHARD_TEST_DEVICE", "cpu")


def capped(world_size: int) -> int:
    """The rank count that a request for `world_size` really gets on this machine."""
    return min(world_size, int(os.environ.get("GRAPHSHARD_TEST_WORLD", world_size)))


class Pool:
    """One set of worker processes per rank count, started when first asked for.

    compute: what graphshard runs in them unless a test asks for something else.
    """

    def __init__(self, compute: str = "aten") -> None:
        self._compute = compute
        self._workers: dict[int, _Workers] = {}

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def run(
        self,
        world_size: int,
        fn: Callable[..., Any],
        *args: Any,
        timeout_s: float = 120,
        keeps_compiled: bool = False,
    ) -> list[Any]:
        """Run `fn(ctx, *args)` on every rank and return the results in rank order.

        keeps_compiled: the next case may find what this one has compiled. `fn` is a function of a
        module (it travels by name); arguments and results travel by pickle. Raises WorkerError with
        the traceback of every failing rank, WorkerTimeout when `timeout_s` passes. Starting workers
        is not part of the limit.
        """
        payload = pickle.dumps((fn, args))
        world_size = capped(world_size)
        if world_size not in self._workers:
            self._workers[world_size] = _Workers(world_size, self._compute)
        workers = self._workers[world_size]
        try:
            name = f"{fn.__module__}.{fn.__qualname__}"
            results = workers.call(payload, name, timeout_s, keeps_compiled)
        except BaseException:
            del self._workers[world_size]
            workers.kill()
            raise
        if workers.num_groups > MOST_GROUPS:
            self._workers.pop(world_size).close()
        return results

    def pids(self) -> list[int]:
        """Process ids of all workers that are running now."""
        return [pid for workers in self._workers.values() for pid in workers.pids()]

    def close(self) -> None:
        while self._workers:
            self._workers.popitem()[1].close()


class _Workers:
    """The processes of one rank count, seen from the test process."""

    def __init__(self, world_size: int, compute: str) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._stacks = tempfile.TemporaryDirectory(prefix="graphshard-tests-")
        self._conns: list[Connection] = []
        self._procs: list[Any] = []
        context = warm_context(device_type())
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            place = (rank, world_size, self._store.port)
            args = (theirs, *place, self._stack_file(rank), compute)
            proc = context.Process(
                target=_worker_main, args=args, name=f"graphshard-rank{rank}", daemon=True
            )
            proc.start()
            theirs.close()
            self._conns.append(ours)
            self._procs.append(proc)
        self._started = False
        self._kept = False  # what the case before has compiled
        self.num_groups = 1

    def call(self, payload: bytes, name: str, timeout_s: float, keeps_compiled: bool) -> list[Any]:
        if not self._started:
            self._round(None, "starting the workers", START_S)
            self._started = True
        if self._kept and not keeps_compiled:
            self._settle(_FORGET, name)
        results = self._round(payload, name, timeout_s)
        self._settle(_KEEP if keeps_compiled else _RESET, name)
        self._kept = keeps_compiled
        return results

    def _settle(self, how: bytes, name: str) -> None:
        left = self._round(how, f"clean-up and barrier at {name}", SETTLE_S)
        self.num_groups = max(left)

    def pids(self) -> list[int]:
        return [proc.pid for proc in self._procs]

    def close(self) -> None:
        """Ask the workers to leave; kill() takes those that do not, and what they started."""
        for conn in self._conns:
            with contextlib.suppress(OSError):
                conn.send_bytes(_LEAVE)
        deadline = time.monotonic() + 5
        for proc in self._procs:
            proc.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        for proc in self._procs:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(proc.pid, signal.SIGKILL)  # each worker leads a group of its own
            proc.kill()
        for proc, conn in zip(self._procs, self._conns, strict=True):
            proc.join()
            proc.close()
            conn.close()
        self._procs, self._conns = [], []
        self._stacks.cleanup()

    def _round(self, message: bytes | None, name: str, timeout_s: float) -> list[Any]:
        """One message to every rank and one reply from each."""
        for conn in self._conns if message is not None else []:
            with contextlib.suppress(
                BrokenPipeError
            ):  # a dead rank is reported when its reply is read
                conn.send_bytes(message)
        replies = self._collect(time.monotonic() + timeout_s)
        if len(replies) == len(self._conns) and all(reply.ok for reply in replies.values()):
            return [replies[rank].value for rank in range(len(self._conns))]
        raise self._failure(replies, name, timeout_s)

    def _collect(self, deadline: float) -> dict[int, _Reply]:
        replies: dict[int, _Reply] = {}
        while len(replies) < len(self._conns):
            pending = {conn: rank for rank, conn in enumerate(self._conns) if rank not in replies}
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for conn in ready:
                rank = pending[conn]  # type: ignore[index]
                replies[rank] = self._read(rank)
                if not replies[rank].ok:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return replies

    def _read(self, rank: int) -> _Reply:
        try:
            return _Reply(*pickle.loads(self._conns[rank].recv_bytes()))
        except (EOFError, ConnectionError):
            proc = self._procs[rank]
            proc.join(5)
            died = f"the process died (exit code {proc.exitcode})"
            return _Reply(False, f"{died}\n{self._stacks_of(rank)}")

    def _failure(self, replies: dict[int, _Reply], name: str, timeout_s: float) -> WorkerError:
        ranks = range(len(self._conns))
        failed = [rank for rank in ranks if rank in replies and not replies[rank].ok]
        missing = [rank for rank in ranks if rank not in replies]
        if failed:
            parts = [f"{name}: failed on ranks {failed} of {len(ranks)}"]
        else:
            late = f"ranks {missing} of {len(ranks)} did not finish within {timeout_s:g} s"
            parts = [f"{name}: {late}; all were killed"]
        parts += [f"--- rank {rank} ---\n{replies[rank].value}" for rank in failed]
        stacks = self._dump_stacks(missing)
        parts += [f"--- rank {rank} was still running ---\n{stacks[rank]}" for rank in missing]
        return (WorkerError if failed else WorkerTimeout)("\n".join(parts))

    def _stack_file(self, rank: int) -> str:
        return str(Path(self._stacks.name) / f"rank{rank}.txt")

    def _dump_stacks(self, ranks: list[int]) -> dict[int, str]:
        """Where these ranks are now, by the signal that faulthandler listens to in each worker."""
        ranks_with_handler = [rank for rank in ranks if Path(self._stack_file(rank)).exists()]
        for rank in ranks_with_handler:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._procs[rank].pid, signal.SIGUSR1)
        time.sleep(0.3 if ranks_with_handler else 0)
        return {rank: self._stacks_of(rank) for rank in ranks}

    def _stacks_of(self, rank: int) -> str:
        path = Path(self._stack_file(rank))
        return path.read_text() if path.exists() else ""


# -- in the worker process -------------------------------------------------------------------------

# After a case: _RESET makes Dynamo forget what it has compiled, _KEEP does not, and _FORGET, after
# _KEEP, frees that too.
_LEAVE, _KEEP, _RESET, _FORGET = b"leave", b"keep", b"reset", b"forget"


def _worker_main(
    conn: Connection, rank: int, world_size: int, port: int, stack_file: str, compute: str
) -> None:
    os.setsid()
    gc.freeze()  # the modules: collections pass them over
    os.environ["GRAPHSHARD_COMPUTE"] = compute
    # What tunes itself counts and orders collectives as its measurements come out: tests that are
    # about that ask for it (`replan_after` None).
    os.environ["GRAPHSHARD_OPTIONS"] = "replan_after=0"
    # As torchrun does. Regions are compiled beginning with different ones.
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}
    if compute == "inductor":
        from torch._inductor import config

        config.fallback_random = True  # dropout masks are those of eager torch
        config.cpp.simdlen = 1  # without vectors a kernel is compiled in half of the time
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    with open(stack_file, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        faulthandler.enable(file=stacks)  # where it was when it died of a signal
        ctx: list[Ctx] = []
        _reply(conn, lambda: ctx.append(_join(rank, world_size, port)))
        with contextlib.suppress(EOFError):  # the test process is gone
            while (message := conn.recv_bytes()) != _LEAVE:
                settles = message in (_KEEP, _RESET, _FORGET)
                _reply(conn, partial(_settle if settles else _run_case, *ctx, message))
        dist.destroy_process_group()
        os._exit(
            0
        )  # nothing is left to flush, and teardown of a process that compiled takes seconds


def _leave_with_parent() -> None:
    """Workers never outlive the test process, however it ended."""
    parent = mp.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)


def _join(rank: int, world_size: int, port: int) -> Ctx:
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    here = Path(__file__).parent
    sys.path[:0] = [str(path) for path in (here, here.parent) if str(path) not in sys.path]
    torch.set_num_threads(1)
    # Tracing makes much, of which little is garbage; what is left goes after each case.
    gc.set_threshold(500_000, 20, 20)
    leave_out()
    gather_as_one_tensor()
    device = torch.device("cpu")
    if device_type() == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        torch.use_deterministic_algorithms(True, warn_only=True)  # bits are compared
        torch.utils.deterministic.fill_uninitialized_memory = False
        # Eager's batch norm is cuDNN's, AOTAutograd traces torch's own: the last bits differ.
        torch.backends.cudnn.enabled = False
        if world_size > torch.cuda.device_count():
            share_gpus(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=dist.TCPStore("127.0.0.1", port, is_master=False),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=COLLECTIVE_S),
        device_id=device if device.type == "cuda" else None,
    )
    return Ctx(rank, world_size, init_device_mesh(device.type, (world_size,)), device)


def share_gpus(rank: int) -> None:
    """NCCL refuses two ranks of one host on one GPU: each says that it is a host of its own, and
    they talk through sockets."""
    os.environ |= {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo"}


def _run_case(ctx: Ctx, payload: bytes) -> Any:
    """Later cases of this process have the environment that this one found."""
    fn, args = pickle.loads(payload)
    with mock.patch.dict(os.environ):
        return fn(ctx, *args)


def _settle(ctx: Ctx, what: bytes) -> int:
    """How many process groups are left."""
    if what != _KEEP and "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    if what == _FORGET:
        gc.unfreeze()
    gc.collect()
    # Later collections pass over what is left now. Assumed: no case but those that begin with
    # `collect_all` counts what an earlier one left and only a collection frees.
    gc.freeze()
    dist.barrier()
    return len(dist.distributed_c10d._world.pg_map)


def collect_all() -> None:
    """At the start of a case that counts what is left: frees what earlier cases left, too. The rest
    is passed over again."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def _reply(conn: Connection, work: Callable[[], Any]) -> None:
    try:
        message = pickle.dumps((True, work()))
    except BaseException:
        message = pickle.dumps((False, traceback.format_exc()))
    conn.send_bytes(message)
