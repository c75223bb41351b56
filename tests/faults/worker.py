"""One rank of a case: eager FSDP2 for reference, then the same steps compiled, with a fault."""

import os
import resource
import signal
import time
import traceback
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from points import strike
from processes import Place
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from graphshard.capture.ports import records_under

GROUP_S = 5.0  # time limit of the process group
PAUSE_S = 3.0  # longer than a collective may take unnoticed, shorter than GROUP_S
STEPS = 5


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens where. action: "" for nothing. rank: where; -1: on all ranks."""

    action: str
    point: str = "gather wait"
    count: int = 0
    rank: int = 1


@dataclass(frozen=True, slots=True)
class Case:
    world_size: int
    fault: Fault
    options: dict[str, Any] = field(default_factory=dict)
    micro_steps: int = 1


@dataclass(frozen=True, slots=True)
class Answer:
    """equal: to eager FSDP2, if it came to the end. error: type and text of what it raised."""

    equal: bool
    error: str = ""
    is_clear: bool = False
    text: str = ""
    dirty: tuple[str, ...] = ()
    warned: tuple[str, ...] = ()


class Boom(Exception):
    pass


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


def join(place: Place, seconds: float = GROUP_S) -> DeviceMesh:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.TCPStore("127.0.0.1", place.port, is_master=False, timeout=limit(30)),
        rank=place.rank,
        world_size=place.world_size,
        timeout=limit(30),
    )
    dist.barrier()  # processes start at different times
    ranks = list(range(place.world_size))
    dist.distributed_c10d._get_default_store().set_timeout(limit(seconds))
    return DeviceMesh.from_group(dist.new_group(ranks, timeout=limit(seconds)), "cpu")


def limit(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)


def build(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    net = Net()
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def train(model: nn.Module, rank: int, micro_steps: int, own: "Own") -> list[Tensor]:
    """own: what happens in the user's own code."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: own.passed("hook"))
    losses, own.model = [], model
    for step in range(STEPS):
        own.passed("step")
        number = micro_steps + own.take_once_more()
        for micro in range(number):
            if max(number, micro_steps) > 1:
                model.set_requires_gradient_sync(micro == number - 1)
            torch.manual_seed(100 * step + 10 * micro + rank)
            loss = model(torch.randn(3, 8)).square().mean()
            loss.backward()
            losses.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    return losses


OWN_POINTS = ("hook", "step")


class Own:
    """Points of the user's own code: his hooks on gradients, and the beginning of a step."""

    def __init__(self, fault: Fault | None, place: Place) -> None:
        self._fault, self._place = fault, place
        self._left = fault.count if fault is not None else -1
        self.once_more = False
        self.model: Any = None

    def passed(self, point: str) -> None:
        if self._fault is None or point != self._fault.point:
            return
        self._left -= 1
        if self._left == -1:
            if self._fault.action == "once more":
                self._place.note_fault()
                self.once_more = True
            elif self._fault.action in SETTINGS:
                self._place.note_fault()
                SETTINGS[self._fault.action](self.model)
            else:
                ACTIONS[self._fault.action](self._place)

    def take_once_more(self) -> int:
        more, self.once_more = self.once_more, False
        return int(more)


def work(place: Place, case: Case) -> Answer:
    mesh = join(place)
    expected = train(build(mesh), place.rank, case.micro_steps, Own(None, place))
    model = build(mesh)
    options = {"fallback": "warn", **case.options}
    for name in ("dump_dir", "report_dir"):
        if name in options:
            options[name] = str(Path(place.faults).parent / name)
    model.compile(backend="graphshard", options=options)
    fault = case.fault if case.fault.action and case.fault.rank in (place.rank, -1) else None
    if fault is not None and fault.point not in OWN_POINTS:
        strike(fault.point, fault.count, lambda: ACTIONS[fault.action](place))
    dist.barrier(mesh.get_group())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            actual = train(model, place.rank, case.micro_steps, Own(fault, place))
        except BaseException as error:
            return failed(model, error, seen)
    same = all(map(torch.equal, expected, actual))
    return Answer(same, dirty=left_gathered(model), warned=texts(seen))


def failed(model: nn.Module, error: BaseException, seen: Any) -> Answer:
    known = (Boom, KeyboardInterrupt)
    name = type(error).__name__
    clear = isinstance(error, known) or str(error).startswith("GS")
    text = "".join(traceback.format_exception(error))
    said = f"{name}: {error}"
    return Answer(False, said, clear, text, left_gathered(model), texts(seen))


def texts(seen: Any) -> tuple[str, ...]:
    return tuple(str(one.message) for one in seen)


def left_gathered(model: nn.Module) -> tuple[str, ...]:
    """Parameters that are not DTensors, and groups that are not SHARDED."""
    found = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    for record in records_under(model):
        found += [g.fqn for g in record.groups if g.held is not None or not g.fsdp.is_sharded]
    return tuple(found)


# -- what may happen -------------------------------------------------------------------------------


def kill(place: Place) -> None:
    place.note_fault()
    os.kill(os.getpid(), signal.SIGKILL)


def stop(place: Place) -> None:
    place.note_fault()
    os.kill(os.getpid(), signal.SIGSTOP)


def pause(place: Place) -> None:
    """Stopped for a while, with all threads, by a child that wakes it up."""
    place.note_fault()
    parent = os.getpid()
    if os.fork() == 0:
        time.sleep(PAUSE_S)
        os.kill(parent, signal.SIGCONT)
        os._exit(0)
    os.kill(parent, signal.SIGSTOP)


def fail(place: Place) -> None:
    place.note_fault()
    raise Boom(f"rank {place.rank}")


def sleep(place: Place) -> None:
    place.note_fault()
    time.sleep(PAUSE_S)


def full_disk(place: Place) -> None:
    """No file may grow any more."""
    place.note_fault()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


def interrupt(place: Place) -> None:
    """Ctrl-C, as torchrun hands it on to each rank."""
    place.note_fault()
    os.kill(os.getpid(), signal.SIGINT)


ACTIONS = {
    "kill": kill,
    "stop": stop,
    "pause": pause,
    "raise": fail,
    "slow": sleep,
    "full disk": full_disk,
    "interrupt": interrupt,
}


# Of the user's own code, on one rank only; at a point of OWN_POINTS. "once more": a micro-step.
SETTINGS = {
    "once more": lambda model: None,
    "unshard": lambda model: model.layers[1].unshard(),
    "unshard root": lambda model: model.unshard(),
    "unshard async": lambda model: model.layers[2].unshard(async_op=True),
    "keep": lambda model: model.set_reshard_after_forward(False),
    "keep one": lambda model: model.layers[1].set_reshard_after_forward(False),
    "no sync": lambda model: model.layers[1].set_requires_gradient_sync(False, recurse=False),
    "prefetch": lambda model: model.layers[0].set_modules_to_forward_prefetch([model.layers[2]]),
}
