"""A case of the differential fuzzer as plain data; `fuzz_draw.py` draws them.

A case names modules by path and holds no torch object, so it travels by pickle, and its repr can be
pasted into a test. What a case means is in `fuzz_run.py`.
"""

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeAlias


def _brief(value: Any) -> str:
    """The repr without what is left at its default."""
    shown = [(f.name, f.default, getattr(value, f.name)) for f in fields(value)]
    given = [f"{n}={v!r}" for n, default, v in shown if default is MISSING or v != default]
    return f"{type(value).__name__}({', '.join(given)})"


# -- models ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, repr=False)
class Part:
    """A module from (rows, length, width) to the same shape; `hidden` is the inner size of an mlp.

    Leaves: linear, mlp, norm, rms, conv, scaled (buffers), tied (one weight twice), dropout,
    centred, break (of Dynamo's graph). Others, made of `parts`: sequence, residual, twice (called
    twice), branches (a ModuleDict, summed), choice (one of a ModuleDict runs), checkpoint, wrapper
    (checkpointed).
    """

    kind: str
    parts: tuple["Part", ...] = ()
    hidden: int = 4
    __repr__ = _brief


@dataclass(frozen=True, slots=True, repr=False)
class Tree:
    """A model: embedding (if `vocab`), body, heads.

    heads: rows of each head; without any the body's output is the result. tied: the first head has
    the embedding's weight. extra: a second input. own: the root has a parameter of its own.
    named: several outputs come in a dict, not in a tuple.
    """

    body: Part
    width: int = 4
    vocab: int = 0
    heads: tuple[int, ...] = ()
    tied: bool = False
    extra: bool = False
    own: bool = False
    named: bool = False
    __repr__ = _brief


TWO_HEADS = Tree(
    Part("sequence", (Part("twice", (Part("sequence", (Part("linear"), Part("linear"))),)),)),
    vocab=7,
    heads=(4, 4),
)
INNER = {
    "sequence": "{index}",
    "residual": "inner",
    "twice": "inner",
    "branches": "ways.{letter}",
    "choice": "ways.{letter}",
    "checkpoint": "inner",
    "wrapper": "_checkpoint_wrapped_module",
}
LEAVES = ("linear", "mlp", "norm", "rms", "conv", "scaled", "tied", "dropout", "centred")
BARE = ("dropout", "break")  # without parameters
WRITES_BUFFERS = ("scaled", "centred")


def paths(tree: Tree) -> list[str]:
    """Modules that have parameters and a forward, parents before children; "" is the root."""
    embed = ["embed"] if tree.vocab else []
    heads = [f"heads.{index}" for index in range(len(tree.heads))]
    return ["", *embed, *_below("body", tree.body), *heads]


def _below(path: str, part: Part) -> Iterator[str]:
    if part.kind not in BARE:
        yield path
    for index, inner in enumerate(part.parts):
        name = INNER[part.kind].format(index=index, letter="abcd"[index])
        yield from _below(f"{path}.{name}", inner)


def has_parameters(tree: Tree) -> bool:
    parts = [part.kind for _, part in _walk("body", tree.body)]
    return bool(tree.vocab or tree.heads or tree.own or set(parts) & set(LEAVES) - set(BARE))


def has(tree: Tree, *kinds: str) -> bool:
    """Some part is of one of these kinds."""
    return any(part.kind in kinds for _, part in _walk("body", tree.body))


def choices(tree: Tree) -> list[str]:
    """Paths of the modules of which one of several parts runs."""
    return [path for path, part in _walk("body", tree.body) if part.kind == "choice"]


def _walk(path: str, part: Part) -> Iterator[tuple[str, Part]]:
    yield path, part
    for index, inner in enumerate(part.parts):
        name = INNER[part.kind].format(index=index, letter="abcd"[index])
        yield from _walk(f"{path}.{name}", inner)


# -- how it is sharded -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, repr=False)
class Group:
    """One call of `fully_shard`. columns: matrices are sharded on dim 1 where that is even."""

    modules: tuple[str, ...]
    reshard: bool | int | None = None
    precision: str = ""
    columns: bool = False
    offload: bool = False
    __repr__ = _brief


OPTIMIZERS = ("sgd", "adamw", "adamw-foreach", "adamw-fused", "in-backward")
MESHES = {  # by the number of ranks; replicas x shards
    1: ("flat",),
    2: ("flat", "1x2", "2x1"),
    3: ("flat", "1x3", "3x1"),
    4: ("flat", "1x4", "2x2", "4x1"),
}

# -- what is done with it --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, repr=False)
class Step:
    """A training step.

    rows, length: of the batch; ragged: rank 1 has a row more. micro_steps: forward and backward
    runs; sync: gradients are synchronised in all of them, in the last one, or as they were set.
    forwards: before each backward. backwards: of each loss. uses: outputs in the loss (modulo
    their number). zero: what happens to gradients at the end ("keep": nothing). eager: the
    uncompiled model.
    """

    rows: int = 2
    length: int = 3
    ragged: bool = False
    micro_steps: int = 1
    sync: str = "as set"
    forwards: int = 1
    backwards: int = 1
    uses: tuple[int, ...] = (0, 1)
    input_grad: bool = False
    clip: bool = False
    optimize: bool = True
    zero: str = "none"
    eager: bool = False
    __repr__ = _brief


@dataclass(frozen=True, slots=True, repr=False)
class Forward:
    """A forward without backward: "no_grad", "inference", "eval" or "train"."""

    mode: str
    rows: int = 2
    length: int = 3
    eager: bool = False
    __repr__ = _brief


@dataclass(frozen=True, slots=True, repr=False)
class Set:
    """`set_<what>(value)` of the first module of a group, by the group's number."""

    what: str
    value: bool
    group: int = 0
    recurse: bool = True
    __repr__ = _brief


@dataclass(frozen=True, slots=True, repr=False)
class Unshard:
    """`unshard()` of a group; wait: None synchronous, else asynchronous and waited for or not."""

    group: int = 0
    wait: bool | None = None
    __repr__ = _brief


@dataclass(frozen=True, slots=True, repr=False)
class Reshard:
    group: int = 0
    __repr__ = _brief


@dataclass(frozen=True, slots=True, repr=False)
class Hook:
    """`set_all_reduce_hook` of the first module of a group: gradients come out halved."""

    group: int = 0
    __repr__ = _brief


@dataclass(frozen=True, slots=True, repr=False)
class Freeze:
    """`requires_grad_(value)` of a module."""

    module: str
    value: bool
    __repr__ = _brief


@dataclass(frozen=True, slots=True, repr=False)
class Choose:
    """Which part of a `choice` runs from now on."""

    module: str
    index: int
    __repr__ = _brief


@dataclass(frozen=True, slots=True, repr=False)
class Reload:
    """Half of what `state_dict()` gave is loaded, with or without `assign`."""

    assign: bool = False
    __repr__ = _brief


Call: TypeAlias = Step | Forward | Set | Unshard | Reshard | Hook | Freeze | Choose | Reload
SETTINGS = (
    "requires_gradient_sync",
    "is_last_backward",
    "requires_all_reduce",
    "reshard_after_forward",
    "reshard_after_backward",
    "unshard_in_backward",
)
NOT_RECURSIVE = ("is_last_backward", "unshard_in_backward")


@dataclass(frozen=True, slots=True, repr=False)
class FuzzCase:
    """groups: in the order in which they are sharded. ignored, frozen: paths of modules whose
    parameters FSDP2 does not manage, or which do not require grad when it gets them. divide: the
    divide factor. forward_prefetch, backward_prefetch: a group's number and those in its list.
    compile: "own" (`model.compile`), "wrap" (`torch.compile(model)`), "step" (a compiled function
    that calls the model), "each" (the modules of each group), "inner" (those but the root, which
    is to be compiled in their place) or "apart" (in no case). mesh: one of `MESHES`. meshes: those
    that the parameters of a group take by turns, in place of `mesh`.
    """

    tree: Tree
    groups: tuple[Group, ...]
    calls: tuple[Call, ...]
    mesh: str = "flat"
    compile: str = "own"
    options: tuple[tuple[str, object], ...] = ()
    optimizer: str = "sgd"
    divide: float | None = None
    ignored: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    forward_prefetch: tuple[tuple[int, tuple[int, ...]], ...] = ()
    backward_prefetch: tuple[tuple[int, tuple[int, ...]], ...] = ()
    ranks: int = 2
    meshes: tuple[str, ...] = ()
    __repr__ = _brief
