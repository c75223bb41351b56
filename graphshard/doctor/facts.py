"""What one rank recorded of one run: plain numbers and names, with a JSON form.

In: what `graphshard.doctor.watch` saw. Out: what lints and verdict read. No torch here, and nothing
is judged. Groups have graphshard's names: the FQN of the `fully_shard` module, "(root)" for a root.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

ROOT_NAME = "(root)"


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """The parameters of one `fully_shard` call. kind: class of the module.

    numel: elements of its parameters, unsharded. gathered_bytes: of its all-gather's result.
    ran: it ran forward at all. in_graph: it did so in a graph of graphshard. reason: why not.
    """

    name: str
    kind: str
    numel: int
    gathered_bytes: int
    ranks: int
    dtype: str
    ran: bool = False
    in_graph: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Stack:
    """Alike modules in one container, none of them sharded: their parameters are in `group`.

    path: of the container, from the root. numel: elements of their parameters together.
    """

    path: str
    kind: str
    count: int
    numel: int
    group: str


@dataclass(frozen=True, slots=True)
class GradientFacts:
    """A group's gradients on this rank: of each parameter two numbers in double precision.

    norms: Euclidean. projections: onto fixed weights in [-1, 1], so that two gradients of one norm
    but of other elements differ. digests: of all their bits, exact whatever the order of sums; two
    gradients that `torch.equal` tells apart have others. None: the parameter has no gradient.
    """

    group: str
    norms: tuple[float | None, ...]
    projections: tuple[float | None, ...]
    digests: tuple[int | None, ...] = ()


@dataclass(frozen=True, slots=True)
class StepFacts:
    """From one optimizer step to the next.

    losses: what backward was called on, micro-batch by micro-batch. gradients: after the last
    backward, as the script had not touched them. time_us: to the optimizer's end, without what the
    doctor itself took.
    """

    losses: tuple[float, ...]
    gradients: tuple[GradientFacts, ...]
    all_gathers: int
    reduce_scatters: int
    other_collectives: int
    time_us: float


@dataclass(frozen=True, slots=True)
class Facts:
    """One rank of one run.

    mode: "eager", "graphshard" or "aot_eager". device: such as "cuda:0". device_id: of the piece of
    hardware (a GPU's UUID), "" on a CPU. numel: elements of all sharded parameters. latency_bytes:
    size of an all-gather that takes as long to start as to send, on the machine's cost preset.
    peak_bytes: from the second step on; of the allocator on a GPU, else of the process.
    direct_forwards: modules whose `forward` was called past `fully_shard`'s hooks, with the number
    of calls. late_children: (child, parent) where the parent was sharded first. stale_optimizers:
    (class, parameters that `fully_shard` replaced afterwards, all parameters). saves: (file,
    DTensors in it, their local bytes) of `torch.save`. is_exact: graphshard ran graphs, all of them
    as captured ATen ops. aot_graphs: how many `aot_eager` compiled. failure: the exception that
    ended the script, "" if none did.
    """

    mode: str
    rank: int
    world_size: int
    host: str
    device: str
    device_id: str
    numel: int
    groups: tuple[GroupFacts, ...] = ()
    stacks: tuple[Stack, ...] = ()
    steps: tuple[StepFacts, ...] = ()
    latency_bytes: int = 0
    peak_bytes: int = 0
    direct_forwards: tuple[tuple[str, int], ...] = ()
    late_children: tuple[tuple[str, str], ...] = ()
    stale_optimizers: tuple[tuple[str, int, int], ...] = ()
    saves: tuple[tuple[str, int, int], ...] = ()
    is_exact: bool = False
    aot_graphs: int = 0
    failure: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Facts:
        """Raises ValueError or TypeError if `text` is none that `to_json` wrote."""
        given = {key: _frozen(value) for key, value in json.loads(text).items()}
        given["groups"] = tuple(GroupFacts(**group) for group in given["groups"])
        given["stacks"] = tuple(Stack(**stack) for stack in given["stacks"])
        given["steps"] = tuple(_step(step) for step in given["steps"])
        return cls(**given)


def _step(given: dict[str, Any]) -> StepFacts:
    gradients = tuple(GradientFacts(**gradient) for gradient in given["gradients"])
    return StepFacts(**{**given, "gradients": gradients})


def _frozen(value: Any) -> Any:
    """JSON has no tuples."""
    if isinstance(value, list):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    return value
