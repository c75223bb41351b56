"""Random cases for the differential fuzzer, drawn by hypothesis.

Out: `fuzz_cases()`, a strategy of `FuzzCase`. True of every case: it is a use of FSDP2 that its
documentation allows, as far as a grammar can say; what eager FSDP2 refuses all the same is
discarded by the test, and counted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from fuzz_cases import (
    INNER,
    LEAVES,
    MESHES,
    OPTIMIZERS,
    SETTINGS,
    WRITES_BUFFERS,
    Call,
    Choose,
    Forward,
    Freeze,
    FuzzCase,
    Group,
    Hook,
    Part,
    Reload,
    Reshard,
    Set,
    Step,
    Tree,
    Unshard,
    choices,
    has,
    has_parameters,
    paths,
)
from hypothesis import strategies as st

OPTIONS: tuple[tuple[tuple[str, object], ...], ...] = (
    (("reshard", "auto"),),
    (("memory_budget", "1GiB"),),
    (("memory_budget", "1GiB"), ("reshard", "auto"), ("micro_steps", 2)),
    (("verify", "every"),),
    (("replan_after", 2),),
    (("overlap_optimizer", True),),
    (("overlap_optimizer", True), ("memory_budget", "1GiB"), ("verify", "every")),
    (("overlap_optimizer", True), ("replan_after", 3), ("micro_steps", 2)),
)


def _rarely(usual: Any, *others: Any) -> st.SearchStrategy[Any]:
    """`usual` in three cases of four or so, which is also what shrinking goes to."""
    return st.sampled_from([usual] * max(3, 2 * len(others)) + list(others))


def _compile(tree: Tree) -> st.SearchStrategy[str]:
    """A conv's output is not contiguous; see Net.forward about outputs of graphs."""
    each = () if has(tree, "conv") else ("each", "apart")
    return st.sampled_from(["own"] * 6 + ["wrap", "step", "inner", *each])


@st.composite
def _parts(draw: st.DrawFn, depth: int, pure: bool, once: bool = False) -> Part:
    """pure: nothing below writes to buffers, which a checkpoint would make happen twice.

    once: nothing below uses a parameter twice. A group that is called twice and does so sums its
    gradients as (a + b) + (c + d), where eager has ((a + b) + c) + d.
    """
    banned = (*(WRITES_BUFFERS if pure else ()), *(("twice", "tied") if once else ()))
    nests = [] if depth == 0 else list(INNER)
    kind = draw(st.sampled_from([k for k in (*LEAVES, *nests) if k not in banned]))
    if kind in LEAVES:
        return Part(kind, hidden=draw(st.sampled_from((4, 1, 3, 7))) if kind == "mlp" else 4)
    pure = pure or kind in ("checkpoint", "wrapper")
    most = {"sequence": 3, "branches": 2, "choice": 2}.get(kind, 1)
    least = 2 if kind == "choice" else 1
    once = once or kind == "twice"
    inner = draw(st.lists(_parts(depth - 1, pure, once), min_size=least, max_size=most))
    return Part(kind, tuple(inner))


@st.composite
def _trees(draw: st.DrawFn) -> Tree:
    body = draw(st.lists(_parts(2, False), min_size=1, max_size=3))
    width = draw(st.sampled_from((4, 8, 1, 3, 5, 7)))
    vocab = draw(_rarely(0, 7, 12))
    heads = draw(st.lists(st.sampled_from((4, 1, 3, 5)), max_size=2))
    tied = bool(vocab and heads) and draw(st.booleans())
    # A conv's output is not contiguous; see Net.forward about outputs of graphs.
    whole = Tree(Part("sequence", tuple(body)))
    if draw(_rarely(False, False, False, True)) and not has(whole, "conv"):
        body.insert(draw(st.integers(0, len(body))), Part("break"))
    tree = Tree(
        Part("sequence", tuple(body)),
        width,
        vocab,
        (vocab, *heads[1:]) if tied else tuple(heads),
        tied,
        extra=draw(_rarely(False, True)),
        own=draw(_rarely(False, True)),
        named=len(heads) > 1 and draw(st.booleans()),
    )
    return tree if has_parameters(tree) else replace(tree, own=True)


@st.composite
def _groups(draw: st.DrawFn, tree: Tree, ranks: int, shards: int) -> tuple[Group, ...]:
    """Any modules, children before parents; some calls of `fully_shard` get a list of two.

    A sharded module holds both: eager FSDP2 loses gradients otherwise (`rows_wrong.py`). Not on
    more than two ranks: eager FSDP2 reduces what each module leaves by itself, and where a gradient
    lies in what is reduced decides the order in which a backend adds it up.
    """
    factors = [factor for factor in (1, 2, 3, 4) if shards % factor == 0]
    order = paths(tree)
    shared = ("embed", "heads.0") if tree.tied else ()
    inner = [path for path in order[1:] if path not in shared]
    chosen = draw(st.lists(st.sampled_from(inner), unique=True, max_size=5)) if inner else []
    if not chosen or draw(_rarely(True, False)):
        chosen.append("")
    lists = [(path,) for path in sorted(chosen, key=order.index, reverse=True)]
    if ranks <= 2 and draw(_rarely(False, True)):
        lists = _first_two_joined(lists)
    if ranks <= 2 and shared and chosen[-1] == "" and draw(st.booleans()):
        lists.insert(0, shared)
    reshard = draw(_rarely(None, True, False, *factors))
    offload = draw(_rarely(False, False, False, True))
    precisions = draw(_precisions(tree, is_root=chosen[-1] == ""))
    return tuple(
        Group(
            modules,
            draw(_rarely(reshard, None, True, False, factors[-1])),
            draw(st.sampled_from(precisions)),
            draw(_rarely(False, True)),
            draw(_rarely(offload, offload, not offload)),
        )
        for modules in lists
    )


def _precisions(tree: Tree, is_root: bool) -> st.SearchStrategy[tuple[str, ...]]:
    """What the groups of one model may choose from, so that no layer gets a dtype not its own."""
    # Dropout of bfloat16 on a CPU: compiled by any backend, its last bit is not eager torch's.
    half = [] if has(tree, "dropout") or not is_root else [("bf16", "bf16-reduce-fp32")]
    if half and not has(tree, "norm", "rms", "scaled", "centred"):
        half.append(("bf16", "bf16-as-given"))
    alone = [("bf16-out-fp32",)] if half and has(tree, "norm", "rms", "scaled") else []
    return _rarely(("",), ("", "reduce-bf16"), *half, *alone)


def _first_two_joined(lists: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Neighbours of which neither is inside the other become one group, if a third holds both."""
    paths = [path for (path,) in lists]
    for index, (one, other) in enumerate(pairwise(paths)):
        held = any(_is_in(one, path) and _is_in(other, path) for path in paths[index + 2 :])
        if held and not _is_in(one, other):
            return [*lists[:index], (other, one), *lists[index + 2 :]]
    return lists


def _is_in(path: str, holder: str) -> bool:
    return path.startswith(f"{holder}." if holder else "")


def _steps(tree: Tree) -> st.SearchStrategy[Step]:
    # Twice in each of two forwards is (a + b) + (c + d); eager has ((a + b) + c) + d.
    forwards = st.just(1) if tree.tied or has(tree, "tied", "twice") else _rarely(1, 2)
    return st.builds(
        Step,
        rows=st.sampled_from((2, 3, 1, 5)),
        length=st.sampled_from((3, 2, 4)),
        ragged=_rarely(False, True),
        micro_steps=_rarely(1, 2, 3),
        sync=st.sampled_from(("as set", "last", "always")),
        forwards=forwards,
        backwards=_rarely(1, 2),
        uses=_rarely((0, 1), (0,), (1,)),
        input_grad=_rarely(False, True),
        clip=_rarely(False, True),
        optimize=_rarely(True, False),
        zero=_rarely("none", "zeros", "keep"),
        eager=_rarely(False, True),
    )


def _calls(tree: Tree, groups: int) -> st.SearchStrategy[Call]:
    numbers = st.integers(0, groups - 1)
    kinds: list[st.SearchStrategy[Any]] = [
        _steps(tree),
        st.builds(
            Forward,
            st.sampled_from(("no_grad", "inference", "eval", "train")),
            rows=st.sampled_from((2, 3)),
            eager=_rarely(False, True),
        ),
        st.builds(Set, st.sampled_from(SETTINGS), st.booleans(), numbers, st.booleans()),
        st.builds(Unshard, numbers, st.sampled_from((None, True, False))),
        st.builds(Reshard, numbers),
        st.builds(Hook, numbers),
        st.builds(Freeze, st.sampled_from(paths(tree)), st.booleans()),
        st.builds(Reload, st.booleans()),
    ]
    if choices(tree):
        kinds.append(st.builds(Choose, st.sampled_from(choices(tree)), st.integers(0, 1)))
    return st.one_of(kinds[0], *kinds)  # steps twice as often


def _prefetches(groups: int) -> st.SearchStrategy[Any]:
    """Lists of groups that are sharded earlier (forward uses them later), or the other way."""
    numbers = st.integers(0, groups - 1)
    lists = st.lists(numbers, min_size=1, max_size=2, unique=True).map(tuple)
    entries = st.lists(st.tuples(numbers, lists), max_size=2, unique_by=lambda e: e[0])
    return _rarely(False, True).flatmap(lambda some: entries.map(tuple) if some else st.just(()))


@st.composite
def fuzz_cases(draw: st.DrawFn, most_ranks: int = 4, *, replicated: bool = False) -> FuzzCase:
    """A model, how it is sharded and compiled, and two to six things that are done with it.

    replicated: in any case over several replicas.
    """
    counts = st.sampled_from([4, 4, 3, 2]) if replicated else _rarely(2, 1, 3, 4)
    ranks = draw(counts.filter(lambda number: number <= most_ranks))
    several = MESHES[ranks][2 if replicated else 1 :]
    mesh = draw(st.sampled_from(several) if replicated else _rarely("flat", *several))
    tree = draw(_trees())
    groups = draw(_groups(tree, ranks, ranks if mesh == "flat" else int(mesh.split("x")[1])))
    calls = draw(st.lists(_calls(tree, len(groups)), min_size=1, max_size=5))
    first = draw(_steps(tree))
    calls = [first, *calls] if draw(_rarely(True, False)) else [*calls, first]
    calls = _without_late_sums(tree, groups, list(_inference_after_training(calls)))
    calls = [_with_what_backward_reads(groups, call) for call in calls]
    inner = paths(tree)[1:]
    some = st.lists(st.sampled_from(inner), max_size=1).map(tuple)
    ignored = draw(_rarely(st.just(()), some).flatmap(lambda s: s))
    if ignored or has(tree, "break") or not any("" in group.modules for group in groups):
        calls = [_with_all_outputs(call) for call in calls]
    return FuzzCase(
        tree,
        groups,
        tuple(calls),
        mesh=mesh,
        compile=draw(_compile(tree)),
        options=draw(_rarely((), *OPTIONS)),
        optimizer=draw(st.sampled_from(_optimizers(tree, calls))),
        divide=draw(_rarely(None, 3.0)),
        ignored=ignored,
        frozen=draw(_rarely(st.just(()), some).flatmap(lambda s: s)),
        forward_prefetch=_among(draw(_prefetches(len(groups))), earlier=True),
        backward_prefetch=_among(draw(_prefetches(len(groups))), earlier=False),
        ranks=ranks,
    )


def from_the_host(case: FuzzCase) -> FuzzCase:
    """The same on one rank, all of whose shards are on the host."""
    groups = tuple(
        replace(g, offload=True, reshard=g.reshard and bool(g.reshard)) for g in case.groups
    )
    return replace(case, ranks=1, mesh="flat", groups=groups)


@st.composite
def on_several_meshes(draw: st.DrawFn, cases: st.SearchStrategy[FuzzCase]) -> FuzzCase:
    """The same, with the parameters of each group on two or three meshes.

    There torch refuses a hook for each all-reduce, one norm of all gradients, and an int
    `reshard_after_forward` that does not divide each mesh.
    """
    case = draw(cases.filter(lambda case: case.ranks > 1))
    names = st.lists(st.sampled_from(MESHES[case.ranks]), min_size=2, max_size=3, unique=True)
    return replace(
        case,
        meshes=tuple(draw(names)),
        groups=tuple(replace(g, reshard=g.reshard and bool(g.reshard)) for g in case.groups),
        calls=tuple(
            replace(call, clip=False) if isinstance(call, Step) else call
            for call in case.calls
            if not isinstance(call, Hook)
        ),
    )


def _optimizers(tree: Tree, calls: Sequence[Call]) -> tuple[str, ...]:
    """Not in backward where the next backward of the same loss computes again what its forward did
    with other parameters: eager torch saves what leaves a checkpoint, a compiled graph may not. Nor
    where it reads what FSDP2 kept after the first, which is gathered again here once it changed."""
    twice = any(isinstance(call, Step) and call.backwards > 1 for call in calls)
    keeps = any(isinstance(call, Set) and call.what == "reshard_after_backward" for call in calls)
    if twice and (keeps or has(tree, "checkpoint", "wrapper")):
        return tuple(name for name in OPTIMIZERS if name != "in-backward")
    return OPTIMIZERS


def _without_late_sums(tree: Tree, groups: Sequence[Group], calls: list[Call]) -> list[Call]:
    """Where a group is called several times before its backward, every micro-step synchronises.

    Each module of a list is a call, too. Eager FSDP2 reduces what earlier micro-steps left with the
    first of these calls, and the rest with the last; graphshard adds them up and reduces once.
    """
    several = any(isinstance(call, Step) and call.forwards > 1 for call in calls)
    several = several or any(len(group.modules) > 1 for group in groups)
    if not several and not has(tree, "twice"):
        return calls
    return [
        replace(call, sync="always") if isinstance(call, Step) else call
        for call in calls
        if not isinstance(call, Set) or call.what != "requires_gradient_sync"
    ]


def _with_what_backward_reads(groups: Sequence[Group], call: Call) -> Call:
    """Backward that reads what `set_unshard_in_backward(False)` left out crashes in FSDP2."""
    if not isinstance(call, Set) or call.what != "unshard_in_backward":
        return call
    is_unread = groups[call.group].modules == ("embed",)
    return replace(call, value=call.value or not is_unread)


def _with_all_outputs(call: Call) -> Call:
    """A parameter that only an unused output needs, and that no group of the graph has: as with any
    backend of torch.compile, its gradient is zeros and not None. A list that a graph break divides:
    its forward ends with the root's, so that its backward begins with any output's."""
    return replace(call, uses=(0, 1)) if isinstance(call, Step) else call


def _inference_after_training(calls: list[Call]) -> Iterator[Call]:
    """What eager FSDP2 gathers first under inference_mode fails, or makes training fail later."""
    trained = False
    for call in calls:
        trained = trained or isinstance(call, Step)
        if isinstance(call, Forward) and call.mode == "inference":
            call = call if trained else replace(call, mode="no_grad")
        yield call


def _among(lists: Any, earlier: bool) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Groups are sharded last module first: what forward uses later has a lower number."""
    kept = [
        (group, tuple(t for t in targets if (t < group if earlier else t > group)))
        for group, targets in lists
    ]
    return tuple((group, targets) for group, targets in kept if targets)
