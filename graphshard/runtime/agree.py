"""The ranks of one mesh agree on what they run, through the job's store and never by a collective.

In: the plan that this rank made for one graph of an FSDP root. Out: the plan to run, or the same
DivergedRanks on every rank. A skeleton that the ranks agreed on before is not asked about again, so
a rank that compiles anew for another length waits for nobody.

Each question has a number, the ballot's `slot`. A rank leaves its vote under that number and reads
the others'. A rank that runs something agreed on earlier has no question; it answers one when a
collective of its own is late (`answer`), for then the rank that asks is the one that is missing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from graphshard.errors import DivergedRanks
from graphshard.skeleton import Skeleton, difference, fingerprint, from_text, same_way, to_text
from graphshard.step_plan import Plan

logger = logging.getLogger(__name__)

SLOW_S = 15.0  # then the ranks that are missing are named in the log
SILENT_S = 10.0  # of a rank that is in the model and gets no further: FSDP2 runs it there
COMPILING, IDLE = "compiling", "idle"
STEP_LIMIT_S = 60.0  # for `verify="every"`: then they are an error
POLL_S = (0.001, 0.05)  # first and longest pause between two looks at the store


@dataclass(frozen=True, slots=True)
class Vote:
    """What one rank is about to run, or runs.

    structure: equal where one plan fits all (see `structure`). is_planned: the cost model made the
    plan. runs: it is being run, too late to fall back. refusal: why the rank cannot compile, or "".
    """

    graph: str
    fingerprint: str = ""
    structure: str = ""
    is_planned: bool = False
    runs: bool = False
    refusal: str = ""


@dataclass(eq=False, slots=True)
class Ballot:
    """What the ranks of one mesh have agreed on about one FSDP root.

    groups: FQNs of the root's groups on this mesh. slot: the number of the next question. calls:
    forward calls so far (`verify="every"`). profiles: blocks of `graphshard.profile` so far.
    running: the plan of the last call.
    """

    store: Any
    rank: int
    ranks: tuple[int, ...]
    groups: tuple[str, ...]
    limit_s: float
    slot: int = 0
    calls: int = 0
    profiles: int = 0
    agreed: list[Plan] = field(default_factory=list)
    running: Plan | None = None

    @property
    def others(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.ranks if rank != self.rank)


def open_ballots(groups: Iterable[tuple[str, tuple[int, ...]]]) -> list[Ballot]:
    """One ballot per mesh of an FSDP root. groups: FQN and global ranks of each of its groups.

    None for a mesh of one rank, nor where other ranks are only pretended (the "fake" backend).
    """
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return []
    meshes: dict[tuple[int, ...], list[str]] = {}
    for fqn, ranks in groups:
        meshes.setdefault(ranks, []).append(fqn)
    return [_open(ranks, tuple(fqns)) for ranks, fqns in meshes.items() if len(ranks) > 1]


def _open(ranks: tuple[int, ...], fqns: tuple[str, ...]) -> Ballot:
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    name = hashlib.sha256(json.dumps([ranks, fqns]).encode()).hexdigest()[:16]
    # The store counts the roots of this name, so that the nth of each rank belong together.
    nth = store.add(f"graphshard/{name}/{rank}", 1)
    own = PrefixStore(f"graphshard/{name}/{nth}", store)
    limit: timedelta = store.timeout  # type: ignore[attr-defined]
    return Ballot(own, rank, ranks, fqns, limit.total_seconds())


# -- the question --------------------------------------------------------------------------------


def settle(ballots: Iterable[Ballot], plan: Plan) -> Plan:
    """The plan to run in place of `plan`: the same on all ranks, up to its name.

    The plan of the lowest rank is taken where costs decided and it fits all ranks; only then may
    reductions get a process group of their own. Raises
    DivergedRanks: GS701, GS702 (skeletons differ), GS703 (a rank cannot compile), GS704 (a rank
    did not answer within the time limit of the job's store).
    """
    found = list(ballots)
    for ballot in found:
        plan = _settle(ballot, plan, may_adopt=len(found) == 1)
    # A process group needs all ranks: that of one plan for all, and of no other.
    return plan if len(found) == 1 else replace(plan, reduces_apart=False)


def _settle(ballot: Ballot, plan: Plan, *, may_adopt: bool) -> Plan:
    own = fingerprint(_part(ballot, plan))
    for known in ballot.agreed:
        if own == fingerprint(_part(ballot, known)):
            return replace(plan, reduces_apart=plan.reduces_apart and known.reduces_apart)
    shape = structure(plan)
    if plan.estimate is not None and may_adopt:
        for known in ballot.agreed:
            if structure(known) == shape:  # costs changed with the batch; the ranks did not
                return replace(known, name=plan.name)
    number, lead = ballot.slot, ballot.ranks[0]
    votes = _ask(ballot, plan, may_adopt=may_adopt)
    alike = len({vote.structure for vote in votes.values()}) == 1
    if votes[lead].is_planned and alike and not _is_running(votes):
        text = ballot.store.get(f"{number}/{lead}/plan").decode()
        plan = replace(Plan.from_json(text), name=plan.name)
    else:
        _compare(ballot, number, votes)
        plan = replace(plan, reduces_apart=False)
    ballot.agreed.append(plan)
    return plan


def lead_costs(ballots: Iterable[Ballot], own: str) -> str:
    """The costs of the lowest rank, for this rank to plan with; `own` if there are several meshes.

    Raises DivergedRanks (GS703, GS704, GS707) if that rank does not plan.
    """
    found = list(ballots)
    if len(found) != 1:
        return own
    ballot = found[0]
    lead, keys = ballot.ranks[0], {ballot.ranks[0]: "costs"}
    if ballot.rank == lead:
        ballot.store.set("costs", own)
    look = partial(_look, ballot, keys, {})
    return _collect(ballot, keys, "plan", ballot.limit_s, look)[lead]


def told(ballots: Iterable[Ballot], key: str, text: str) -> list[str]:
    """What every rank says under `key`, in rank order; `text` alone if there is no other rank.

    All ranks of the meshes call it at the same forward. Raises DivergedRanks (GS704) if one does
    not within the store's time limit, and what `answer` raises.
    """
    found: dict[int, str] = {}
    for ballot in ballots:
        ballot.store.set(f"{key}/{ballot.rank}", text)
        keys = {rank: f"{key}/{rank}" for rank in ballot.ranks}
        found |= _collect(ballot, keys, key, ballot.limit_s, partial(answer, [ballot]))
    return [found[rank] for rank in sorted(found)] or [text]


def refuse(ballots: Iterable[Ballot], graph: str, reason: str, *, waits: bool) -> bool:
    """Say that this rank cannot compile. True if that holds for all ranks (asked only if `waits`).

    Raises DivergedRanks (GS704) if a rank did not answer.
    """
    alike = True
    for ballot in ballots:
        _leave(ballot, Vote(graph, refusal=reason))
        if waits:
            votes = _votes(ballot)
            alike = alike and all(v.refusal for v in votes.values())
        else:
            ballot.slot += 1
    return alike


def mark(ballots: Iterable[Ballot], what: str) -> None:
    """Say where this rank is, while it may compile: COMPILING, IDLE (not in the model), or how much
    of the model Dynamo has traced."""
    for ballot in ballots:
        ballot.store.set(f"at/{ballot.rank}", what)


def leave(ballots: Iterable[Ballot], reason: str) -> None:
    """Say that this rank runs the whole root through FSDP2 from now on."""
    for ballot in ballots:
        ballot.store.set(f"left/{ballot.rank}", reason)


def answer(ballots: Iterable[Ballot]) -> None:
    """Called while a collective is late: if another rank asks for a new plan, say what runs here.

    Raises the DivergedRanks that the other rank raises too.
    """
    for ballot in ballots:
        if ballot.running is not None and _is_asked(ballot):
            number = ballot.slot
            _compare(ballot, number, _ask(ballot, ballot.running, runs=True))


def _is_asked(ballot: Ballot) -> bool:
    return any(ballot.store.check([f"{ballot.slot}/{rank}/vote"]) for rank in ballot.others)


def _ask(
    ballot: Ballot, plan: Plan, *, runs: bool = False, may_adopt: bool = False
) -> dict[int, Vote]:
    """Leave this rank's vote and read all. What a vote refers to is stored before it."""
    skeleton, own = _part(ballot, plan), f"{ballot.slot}/{ballot.rank}"
    is_planned = plan.estimate is not None and may_adopt
    if is_planned and ballot.rank == ballot.ranks[0]:
        ballot.store.set(f"{own}/plan", plan.to_json(indent=None))
    ballot.store.set(f"{own}/skeleton", to_text(skeleton))
    _leave(ballot, Vote(plan.name, fingerprint(skeleton), structure(plan), is_planned, runs))
    return _votes(ballot)


def _leave(ballot: Ballot, vote: Vote) -> None:
    ballot.store.set(f"{ballot.slot}/{ballot.rank}/vote", json.dumps(asdict(vote)))


def _votes(ballot: Ballot) -> dict[int, Vote]:
    """All votes on the question of now; the next question is another one, whatever happens."""
    keys = {rank: f"{ballot.slot}/{rank}/vote" for rank in ballot.ranks}
    what = f"a new graph of {_named(ballot.groups)}"
    look = partial(_look, ballot, keys, {})
    try:
        texts = _collect(ballot, keys, what, ballot.limit_s, look)
    except DivergedRanks as error:
        _leave(ballot, Vote(what, refusal=error.message))  # for ranks that come too late
        raise
    finally:
        ballot.slot += 1
    return {rank: Vote(**json.loads(text)) for rank, text in texts.items()}


def _look(ballot: Ballot, keys: Mapping[int, str], seen: dict[int, tuple[bytes, float]]) -> None:
    """Raises DivergedRanks if a rank that is missing runs through FSDP2: GS703 if it said so, GS707
    if it is in the model and traces nothing more. seen: where each was, and since when."""
    now = time.monotonic()
    for rank in ballot.others:
        if rank not in keys or ballot.store.check([keys[rank]]):
            continue
        if ballot.store.check([f"left/{rank}"]):
            reason = ballot.store.get(f"left/{rank}").decode()
            raise DivergedRanks("GS703", f"rank {rank} runs through eager FSDP2: {reason}")
        at = ballot.store.get(f"at/{rank}") if ballot.store.check([f"at/{rank}"]) else b""
        place, since = seen.setdefault(rank, (at, now))
        if at != place or at.decode() in ("", COMPILING, IDLE):
            seen[rank] = at, now
        elif now - since > SILENT_S:
            text = f"rank {rank} is in the model and compiles nothing (a graph break?)"
            raise DivergedRanks("GS707", text)


def _compare(ballot: Ballot, number: int, votes: Mapping[int, Vote]) -> None:
    """Raises the same DivergedRanks on every rank unless all skeletons are the same."""
    for rank, vote in votes.items():
        if vote.refusal:
            text = f"rank {rank} could not compile {vote.graph}: {vote.refusal}"
            raise DivergedRanks("GS702" if _is_running(votes) else "GS703", text)
    texts: dict[str, Skeleton] = {}
    for rank, vote in votes.items():
        if vote.fingerprint not in texts:
            stored = ballot.store.get(f"{number}/{rank}/skeleton")
            texts[vote.fingerprint] = from_text(stored.decode())
    by_rank = {rank: texts[vote.fingerprint] for rank, vote in votes.items()}
    where = difference(by_rank)
    if where is None:
        return
    names = ", ".join(f"{vote.graph} on rank {rank}" for rank, vote in votes.items())
    code = "GS701" if same_way(by_rank) and not _is_running(votes) else "GS702"
    raise DivergedRanks(code, f"the ranks would issue different collectives: {where} ({names})")


def _is_running(votes: Mapping[int, Vote]) -> bool:
    return any(vote.runs for vote in votes.values())


def _part(ballot: Ballot, plan: Plan) -> Skeleton:
    """The plan's collectives on the ballot's mesh."""
    return tuple(e for e in plan.skeleton if e.group.split(" + ")[0] in ballot.groups)


def structure(plan: Plan) -> str:
    """Equal for two graphs that the same schedules fit: groups, ops and communication to place."""
    stages = [
        [
            schedule.direction,
            max((step.stop for step in schedule.steps), default=0),
            sorted({(str(s.kind), g) for s in schedule.steps for g in s.groups}),
        ]
        for schedule in plan.schedules
    ]
    groups = [asdict(group) for group in plan.groups]
    return hashlib.sha256(json.dumps([groups, stages]).encode()).hexdigest()


# -- every step ----------------------------------------------------------------------------------


def check_call(ballots: Iterable[Ballot], plan: Plan, fqns: tuple[str, ...]) -> None:
    """`verify="every"`: all ranks are about to run the same. fqns: the groups of this call.

    Raises the same DivergedRanks on every rank: GS705 if they run different graphs or groups, GS704
    if a rank did not come within STEP_LIMIT_S.
    """
    for ballot in ballots:
        number, own = ballot.calls, f"{plan.fingerprint}\n{_named(fqns)}"
        ballot.calls += 1
        ballot.store.set(f"call/{number}/{ballot.rank}", own)
        if number > 1:  # every rank has read what was left two calls ago
            ballot.store.delete_key(f"call/{number - 2}/{ballot.rank}")
        keys = {rank: f"call/{number}/{rank}" for rank in ballot.ranks}
        limit_s = min(STEP_LIMIT_S, ballot.limit_s)
        what = f"call {number} of {_named(fqns)}"
        found = _collect(ballot, keys, what, limit_s, partial(answer, [ballot]))
        if len(set(found.values())) > 1:
            listed = "; ".join(f"rank {r} runs {t.split(chr(10))[1]}" for r, t in found.items())
            alike = len({t.split("\n")[1] for t in found.values()}) == 1
            hint = ", with other collectives" if alike else ""
            raise DivergedRanks("GS705", f"at call {number}, {listed}{hint}")


def _named(fqns: tuple[str, ...]) -> str:
    shown = ", ".join(fqns[:4]) + (f", ... ({len(fqns)} groups)" if len(fqns) > 4 else "")
    return shown or "no group"


# -- the store -----------------------------------------------------------------------------------


def _collect(
    ballot: Ballot, keys: Mapping[int, str], what: str, limit_s: float, look: Callable[[], None]
) -> dict[int, str]:
    """What every rank left under its key, in rank order. Raises DivergedRanks (GS704) when
    `limit_s` passes. look: called again and again while ranks are missing."""
    began, told, pause_s = time.monotonic(), False, POLL_S[0]
    while not ballot.store.check(list(keys.values())):
        waited_s = time.monotonic() - began
        look()
        if waited_s > min(limit_s, SLOW_S) and (not told or waited_s > limit_s):
            missing = [rank for rank, key in keys.items() if not ballot.store.check([key])]
            text = f"rank {', '.join(map(str, missing))} did not come to {what} in {waited_s:.0f} s"
            if missing and waited_s > limit_s:
                raise DivergedRanks("GS704", text)
            logger.warning("rank %d waits: %s", ballot.rank, text)
            told = True
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, POLL_S[1])
    values = ballot.store.multi_get(list(keys.values()))
    return {rank: value.decode() for rank, value in zip(keys, values, strict=True)}
