"""How a script uses FSDP2: pure functions from recorded facts to findings.

In: `Facts` of all ranks of one run, or of both. Out: findings with codes GS1121 to GS1130, each at
most once, faults first. Numbers are those of the first rank that recorded the thing: ranks of one
script differ only in which GPU they are on and in what they save.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from statistics import median

from graphshard.doctor.facts import ROOT_NAME, Facts, GroupFacts, Stack
from graphshard.doctor.findings import Finding, Level, fault, some, warning
from graphshard.view.text import bytes_text, count_text

# A root is worth splitting if the blocks left in it hold more than this share of the model.
ROOT_SHARE = 0.5
# Fewer groups of a single Linear may well be what the user wants (an output layer, for example).
MANY_LINEARS = 4
NO_REASON = "no compiled call reached them"


def lint(runs: Sequence[Sequence[Facts]]) -> tuple[Finding, ...]:
    """runs: of the eager run, then of the one with graphshard; an empty one is left out."""
    everywhere = list(chain.from_iterable(runs))
    found = [*_anywhere(everywhere)]
    for ranks in runs[-1:]:
        found += _not_captured(ranks)
    return tuple(sorted(found, key=lambda finding: finding.level is not Level.FAULT))


def _anywhere(ranks: Sequence[Facts]) -> Iterator[Finding]:
    yield from shared_gpu(ranks)
    for rank in _first(ranks, "direct_forwards"):
        yield from direct_forward(rank.direct_forwards)
    for rank in _first(ranks, "late_children"):
        yield from late_child(rank.late_children)
    for rank in _first(ranks, "stale_optimizers"):
        yield from stale_optimizer(rank.stale_optimizers)
    yield from saved_shards(ranks)
    for rank in _first(ranks, "groups"):
        if not rank.late_children:  # the script failed before it came to the blocks
            yield from left_in_root(rank.stacks, rank.numel)
        linears = tuple(single_linears(rank.groups))
        yield from linears or too_small(rank.groups, rank.latency_bytes)


def _first(ranks: Iterable[Facts], name: str) -> list[Facts]:
    """The first rank that recorded any `name`, or none."""
    return [rank for rank in ranks if getattr(rank, name)][:1]


def shared_gpu(ranks: Sequence[Facts]) -> Iterator[Finding]:
    """Ranks of one run and one host on one piece of hardware. A CPU may be shared."""
    users: dict[tuple[str, str, str], list[int]] = {}
    for rank in ranks:
        if rank.device_id:
            users.setdefault((rank.mode, rank.host, rank.device_id), []).append(rank.rank)
    for (_, host, _), numbers in users.items():
        if len(numbers) > 1:
            device = next(r.device for r in ranks if r.rank == numbers[0])
            yield fault(
                "GS1121",
                f"ranks {some(list(map(str, numbers)), 8)} share one GPU ({device} of {host})",
                'before init_process_group: torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))',
            )
            return


def direct_forward(calls: Sequence[tuple[str, int]]) -> Iterator[Finding]:
    if calls:
        name = calls[0][0]
        yield fault(
            "GS1122",
            f"forward() of {some([n for n, _ in calls])} was called directly "
            f"({count_text(sum(c for _, c in calls), 'time')}): fully_shard's hooks do not run, so "
            "nothing is gathered and nothing is compiled",
            f"call the module: {_called(name)}(...), not {_called(name)}.forward(...); for other "
            "methods register_fsdp_forward_method",
        )


def _called(name: str) -> str:
    return "model" if name == ROOT_NAME else f"model.{name}"


def late_child(pairs: Sequence[tuple[str, str]]) -> Iterator[Finding]:
    if pairs:
        child, parent = pairs[0]
        yield fault(
            "GS1123",
            f"{parent} was sharded before {child}, which is inside it ({len(pairs)} such calls): "
            f"the parameters of {child} were in the group of {parent} already",
            "call fully_shard bottom-up: the blocks first, the whole model last",
        )


def left_in_root(stacks: Sequence[Stack], numel: int) -> Iterator[Finding]:
    """One group, the root's as a rule, has most of the model in blocks that could be groups."""
    for group in dict.fromkeys(stack.group for stack in stacks):
        own = [stack for stack in stacks if stack.group == group]
        left = sum(stack.numel for stack in own)
        if left > ROOT_SHARE * numel:
            stack = max(own, key=lambda stack: stack.numel)
            yield warning(
                "GS1124",
                f"{left / numel:.0%} of {numel:,} parameters are in the group of {group}, in "
                f"blocks without a group of their own ({stack.count} {stack.kind} in {stack.path}"
                "): all of them are gathered at once, and nothing overlaps",
                f"before fully_shard({_called(group)}): for block in {_called(stack.path)}: "
                "fully_shard(block)",
            )


def stale_optimizer(optimizers: Sequence[tuple[str, int, int]]) -> Iterator[Finding]:
    for kind, stale, total in optimizers[:1]:
        yield fault(
            "GS1125",
            f"{kind} holds {stale:,} of {total:,} parameters that fully_shard replaced after it "
            "was built: they get no gradients, and the sharded ones are never updated",
            "build the optimizer after the last fully_shard call, from model.parameters()",
        )


def single_linears(groups: Sequence[GroupFacts]) -> Iterator[Finding]:
    linears = [group for group in groups if group.kind == "Linear"]
    if len(linears) >= MANY_LINEARS and 2 * len(linears) > len(groups):
        size = bytes_text(int(median(group.gathered_bytes for group in linears)))
        yield warning(
            "GS1127",
            f"{len(linears)} of {len(groups)} groups are a single Linear (median all-gather "
            f"{size}): each has its own all-gather and reduce-scatter",
            "call fully_shard on the blocks, not on the layers inside them",
        )


def saved_shards(ranks: Sequence[Facts]) -> Iterator[Finding]:
    """`torch.save` of DTensors: a file then has one rank's part, and the mesh it belongs to."""
    savers = [rank for rank in ranks if rank.saves]
    if not savers:
        return
    path, tensors, held = savers[0].saves[0]
    writers = sorted({rank.rank for rank in savers})
    yield fault(
        "GS1128",
        f"torch.save wrote {tensors:,} sharded tensors to {path} on "
        f"{count_text(len(writers), 'rank')} of {savers[0].world_size}: the file has only "
        f"{bytes_text(held)}, the rank's own part, and loads only on as many ranks",
        "save with torch.distributed.checkpoint, or torch.save what get_model_state_dict returns "
        "with StateDictOptions(full_state_dict=True)",
    )


def not_captured(groups: Sequence[GroupFacts]) -> Iterator[Finding]:
    outside = [group for group in groups if group.ran and not group.in_graph]
    if outside:
        reason = next((group.reason for group in outside if group.reason), "")
        yield warning(
            "GS1129",
            f"{some([group.name for group in outside])} ran through eager FSDP2 "
            f"({len(outside)} of {len(groups)} groups): {reason or NO_REASON}",
            "graphshard.explain(model) lists them; options={'fallback': 'error'} raises instead"
            if reason
            else "compile what is called, in place: model.compile(backend='graphshard'); or call "
            "what torch.compile returned, not the model that it wrapped",
        )


def _not_captured(ranks: Sequence[Facts]) -> Iterator[Finding]:
    for rank in ranks[:1]:
        if rank.mode == "graphshard":
            yield from not_captured(rank.groups)


def too_small(groups: Sequence[GroupFacts], latency_bytes: int) -> Iterator[Finding]:
    """The median all-gather takes longer to start than to send. One group cannot be fewer."""
    sent = [group for group in groups if group.ranks > 1]
    if len(sent) < 2:
        return
    size = int(median(group.gathered_bytes for group in sent))
    if size < latency_bytes:
        yield warning(
            "GS1130",
            f"the median all-gather of {len(sent)} groups has {bytes_text(size)}; below "
            f"{bytes_text(latency_bytes)} its latency is longer than its transfer",
            f"shard larger modules, such as {-(-latency_bytes // max(size, 1))} blocks in one "
            "call: fully_shard([a, b])",
        )
