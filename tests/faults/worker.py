"""One rank of a case: eager FSDP2 for reference, then the same steps compiled, with a fault."""

import traceback
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from actions import ACTIONS, SETTINGS, Boom
from points import strike
from processes import Place
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from graphshard.capture.root_state import root_states_under

GROUP_S = 5.0  # time limit of the process group
STEPS = 5
SAVED = 2  # the step after which a case that saves does


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens where. action: "" for nothing. rank: where; -1: on all ranks."""

    action: str
    point: str = "gather wait"
    count: int = 0
    rank: int = 1


@dataclass(frozen=True, slots=True)
class Case:
    """replicas: HSDP's, that share the ranks. saves: a checkpoint, by DCP, in the middle.
    rehearsed: a setting that all ranks have called once before."""

    world_size: int
    fault: Fault
    options: dict[str, Any] = field(default_factory=dict)
    micro_steps: int = 1
    replicas: int = 1
    saves: bool = False
    rehearsed: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """equal: to eager FSDP2, if it came to the end. error: type and text of what it raised."""

    equal: bool
    error: str = ""
    is_clear: bool = False
    text: str = ""
    dirty: tuple[str, ...] = ()
    warned: tuple[str, ...] = ()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


def join(place: Place, replicas: int = 1, seconds: float = GROUP_S) -> DeviceMesh:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.TCPStore("127.0.0.1", place.port, is_master=False, timeout=limit(30)),
        rank=place.rank,
        world_size=place.world_size,
        timeout=limit(30),
    )
    dist.barrier()  # processes start at different times
    dist.distributed_c10d._get_default_store().set_timeout(limit(seconds))
    grid = torch.arange(place.world_size).view(replicas, -1)
    if replicas == 1:
        group = dist.new_group(grid[0].tolist(), timeout=limit(seconds))
        return DeviceMesh.from_group(group, "cpu")
    groups = [
        dist.new_subgroups_by_enumeration(lines.tolist(), timeout=limit(seconds))[0]
        for lines in (grid.t(), grid)
    ]
    return DeviceMesh.from_group(groups, "cpu", grid, mesh_dim_names=("replicate", "shard"))


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
        if step == SAVED:
            own.save()
    return losses


OWN_POINTS = ("hook", "step")


class Own:
    """What the user's own code does: hooks on gradients, the beginning of a step, saving.

    folder: where it saves; None if it does not. state: what it then had to save. rehearsal: of
    SETTINGS, for the second step.
    """

    def __init__(
        self, fault: Fault | None, place: Place, folder: Path | None = None, rehearsal: str = ""
    ) -> None:
        self._fault, self._place, self._folder = fault, place, folder
        self._rehearsal, self._steps = rehearsal, 0
        self._left = fault.count if fault is not None else -1
        self._group = dist.new_group(timeout=limit(GROUP_S)) if folder is not None else None
        self.once_more = self.is_saving = False
        self.model: Any = None
        self.state: dict[str, Tensor] = {}

    def passed(self, point: str) -> None:
        self._steps += point == "step"
        if self._rehearsal and self._steps == 2:
            SETTINGS[self._rehearsal](self.model)
            self._rehearsal = ""
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

    def save(self) -> None:
        self.state = shards(self.model)
        if self._folder is not None:
            self.is_saving = True
            state = {"model": self.model.state_dict()}
            dcp.save(state, checkpoint_id=self._folder, process_group=self._group)
            self.is_saving = False

    def loaded(self, model: nn.Module) -> dict[str, Tensor]:
        """What was saved, in `model`."""
        state = {"model": model.state_dict()}
        self.is_saving = True
        dcp.load(state, checkpoint_id=self._folder, process_group=self._group)
        self.is_saving = False
        return shards(model)


def shards(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.to_local().detach().clone() for name, p in model.named_parameters()}


def work(place: Place, case: Case) -> Answer:
    mesh = join(place, case.replicas)
    reference = Own(None, place)
    expected = train(build(mesh), place.rank, case.micro_steps, reference)
    model = build(mesh)
    folder = Path(place.faults).parent
    options = {"fallback": "warn", **case.options}
    for name in ("dump_dir", "report_dir"):
        if name in options:
            options[name] = str(folder / name)
    model.compile(backend="graphshard", options=options)
    fault = case.fault if case.fault.action and case.fault.rank in (place.rank, -1) else None
    rehearsal = case.fault.action if case.rehearsed else ""
    own = Own(fault, place, folder / "checkpoint" if case.saves else None, rehearsal)
    if fault is not None and fault.point not in OWN_POINTS:
        strike(fault.point, fault.count, lambda: ACTIONS[fault.action](place))
    dist.barrier()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            actual = train(model, place.rank, case.micro_steps, own)
            states = [own.state, *([own.loaded(build(mesh))] if case.saves else [])]
        except BaseException as error:
            return failed(model, error, seen, own.is_saving)
    same = all(map(torch.equal, expected, actual))
    for state in states:
        same = same and all(torch.equal(state[name], reference.state[name]) for name in state)
    return Answer(same, dirty=left_gathered(model), warned=texts(seen))


def failed(model: nn.Module, error: BaseException, seen: Any, is_saving: bool) -> Answer:
    """While DCP saves or loads, what it says of it is not graphshard's."""
    known = (Boom, KeyboardInterrupt)
    name = type(error).__name__
    clear = is_saving or isinstance(error, known) or str(error).startswith("GS")
    text = "".join(traceback.format_exception(error))
    said = f"{name}: {error}"
    return Answer(False, said, clear, text, left_gathered(model), texts(seen))


def texts(seen: Any) -> tuple[str, ...]:
    return tuple(str(one.message) for one in seen)


def left_gathered(model: nn.Module) -> tuple[str, ...]:
    """Parameters that are not DTensors, and groups that are not SHARDED."""
    found = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    for record in root_states_under(model):
        found += [g.fqn for g in record.groups if g.kept is not None or not g.fsdp.is_sharded]
    return tuple(found)
