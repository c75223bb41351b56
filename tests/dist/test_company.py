"""A compiled model beside threads, worker processes, copies, pickles and resets."""

import copy
import gc
import io
import multiprocessing
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from numbers_data import Numbers
from pool import Ctx, Pool, collect_all
from students import WIDTH, Blocks, Student, facts, gradients, in_place, sharded
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

import graphshard
from graphshard.runtime.live import _LIVE

pytestmark = pytest.mark.dist

ALL = (2, 3, ["(root)", "blocks.0", "blocks.1"])


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Starts `work` on a thread of its own; the result waits for it, and raises what it raised."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append((work(), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()

    def result() -> Any:
        thread.join(100)
        assert not thread.is_alive(), "the thread hangs"
        ((value, error),) = found
        if error is not None:
            raise error
        return value

    return result


def reset_between_steps(ctx: Ctx) -> None:
    student = Student(ctx, 1, in_place)
    for _ in range(4):
        torch._dynamo.reset()
        student.step()
        student.step()
        assert facts(student.model) == ALL
    torch._dynamo.reset()
    with torch.no_grad():
        student.call(torch.ones(2, WIDTH))
    assert facts(student.model)[0] == 1, "what was compiled before the reset is gone"


def copied_before_sharding(ctx: Ctx) -> None:
    """A copy of a model on which `compile` was called, sharded and compiled for itself."""
    base = Blocks()
    in_place(base)
    students = [Student(ctx, seed, in_place, base) for seed in (1, 2)]
    for _ in range(2):
        for student in students:
            student.step()
    assert [facts(s.model) for s in students] == [ALL, ALL]
    with pytest.raises(AssertionError, match="deepcopy"):
        copy.deepcopy(students[0].model)


def saved_and_loaded(ctx: Ctx) -> None:
    """The state of a compiled model through torch.save, into another one."""
    first, second = Student(ctx, 1, in_place), Student(ctx, 2, in_place)
    first.step()
    second.step()
    file = io.BytesIO()
    torch.save({n: t.to_local() for n, t in first.model.state_dict().items()}, file)
    file.seek(0)
    loaded = torch.load(file)
    for model in (second.model, second.oracle):
        with torch.no_grad():
            for name, value in model.state_dict().items():
                value.to_local().copy_(loaded[name])
    x = torch.ones(2, WIDTH)
    with torch.no_grad():
        assert torch.equal(first.call(x), second.call(x))
    second.step()


def backward_in_a_thread(ctx: Ctx) -> None:
    ours, eager = in_place(sharded(ctx)), sharded(ctx)
    for ours_param, param in zip(ours.parameters(), eager.parameters(), strict=True):
        param.data.copy_(ours_param.data)
    for _ in range(2):
        for model in (ours, eager):
            loss = model(torch.ones(4, WIDTH)).square().mean()
            in_thread(loss.backward)()
        assert all(map(torch.equal, gradients(ours), gradients(eager)))


def forward_in_a_thread(ctx: Ctx) -> None:
    student = Student(ctx, 1, in_place)
    for _ in range(2):
        in_thread(student.step)()
    student.step()
    assert facts(student.model) == ALL


def two_threads(ctx: Ctx) -> None:
    """Two models in training at once, each on a process group of its own."""
    ranks = list(range(ctx.world_size))
    meshes = [DeviceMesh.from_group(dist.new_group(ranks), "cpu") for _ in range(2)]
    at = [Ctx(ctx.rank, ctx.world_size, mesh, ctx.device) for mesh in meshes]
    students = [Student(at[i], i + 1, in_place) for i in range(2)]
    # Roots are prepared in one order on all ranks, which threads do not promise.
    for student in students:
        student.step()

    def train(student: Student) -> None:
        for _ in range(10):
            student.step()

    results = [in_thread(lambda s=student: train(s)) for student in students]
    for result in results:
        result()
    assert [facts(s.model) for s in students] == [ALL, ALL]


def data_workers(ctx: Ctx, how: str, holds_model: bool) -> None:
    """Batches from worker processes that are started after the model was compiled."""
    # A daemon may have no children by default; the pool kills the whole group of its workers.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    student = Student(ctx, 1, in_place)
    student.step()
    loader = DataLoader(
        Numbers(WIDTH, student.model if holds_model else None),
        batch_size=4,
        num_workers=2,
        multiprocessing_context=how,
        persistent_workers=how == "spawn",  # fresh ones take seconds
    )
    for _ in range(2):
        for batch in loader:
            student.call(batch).sum().backward()
            student.model.zero_grad()
    student.step()
    assert facts(student.model) == ALL


def everything_alone(ctx: Ctx) -> None:
    collect_all()
    cases: list[Callable[[Ctx], None]] = [
        reset_between_steps,
        copied_before_sharding,
        saved_and_loaded,
        backward_in_a_thread,
        forward_in_a_thread,
        two_threads,
    ]
    for case in cases:
        torch._dynamo.reset()
        try:
            case(ctx)
        except BaseException as error:
            error.add_note(f"in {case.__name__}")
            raise
    gc.collect()
    assert not len(_LIVE)


def test_threads_copies_and_resets(pool: Pool) -> None:
    pool.run(2, everything_alone, timeout_s=240)


def in_workers(ctx: Ctx, how: str) -> None:
    for holds_model in (False, True) if how == "fork" else (False,):
        data_workers(ctx, how, holds_model)


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_data_workers_beside_a_compiled_model(pool: Pool, how: str) -> None:
    pool.run(2, in_workers, how, timeout_s=240)


def odd_ranks(ctx: Ctx) -> int:
    """On 5 ranks a dimension of 8 is uneven, and the last rank has nothing."""
    student = Student(ctx, 1, in_place)
    for _ in range(2):
        student.step()
    assert facts(student.model) == ALL
    return len(graphshard.plans(student.model))


@pytest.mark.parametrize("ranks", [5, 7])
def test_odd_numbers_of_ranks(pool: Pool, ranks: int) -> None:
    assert pool.run(ranks, odd_ranks, timeout_s=240) == [1] * ranks
