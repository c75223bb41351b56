"""Faults at every kind of point: the ranks go on with FSDP2's bits, or each of them that is left
ends with one clear error, soon, and with nothing gathered.

CI draws 12 cases, the same ones each time. `GRAPHSHARD_FAULTS=300 GRAPHSHARD_FAULTS_SEED=n` draws
others, and `-s` prints a table of them.
"""

import os
import re
from collections import Counter

import pytest
from actions import SETTINGS
from draw import drawn
from processes import Ended, run
from worker import GROUP_S, Answer, Case, Fault, work

from graphshard.runtime.waiting import LATE_S

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

CASES = int(os.environ.get("GRAPHSHARD_FAULTS", "9"))
SEED = int(os.environ.get("GRAPHSHARD_FAULTS_SEED", "0"))
LIMIT_S = max(15.0, GROUP_S + 5.0)  # from the fault to the end of the last rank
CASE_S = 100.0

GOES_ON, ENDS = "goes on", "ends"


def outcome(case: Case) -> str:
    """GOES_ON or ENDS; raises AssertionError for anything else."""
    ended = run(case.world_size, work, case, limit_s=LIMIT_S, patience_s=CASE_S)
    lost = (case.fault.rank,) if case.fault.action in ("kill", "stop") else ()
    left = [one for one in ended if one.rank not in lost or one.answer is not None]
    for one in left:
        check(one, case)
    return GOES_ON if all(one.answer.equal for one in left) else ENDS


def is_harmless(case: Case) -> bool:
    """A checkpoint that cannot be written is the user's loss; what graphshard writes is not."""
    if case.fault.action == "full disk":
        return not case.saves
    return case.fault.action in ("", "pause", "slow")


def check(one: Ended, case: Case) -> None:
    where = f"rank {one.rank} of {case}"
    assert one.exitcode is not None, f"{where} did not end in {one.after_s:.1f} s:\n{one.stack}"
    answer: Answer | None = one.answer
    assert answer is not None, f"{where} died: exit code {one.exitcode}"
    assert one.after_s < LIMIT_S, f"{where} took {one.after_s:.1f} s"
    assert not answer.dirty, f"{where} left gathered: {answer.dirty}"
    if not answer.error:
        assert answer.equal, f"{where} came to other numbers"
        return
    assert not is_harmless(case), f"{where}:\n{answer.text}"
    assert answer.is_clear, f"{where}:\n{answer.text}"


# -- a rank is lost --------------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "count"), [(2, 0), (2, 2), (2, 4), (3, 4)])
def test_a_rank_that_is_killed_as_it_reduces(world_size: int, count: int) -> None:
    case = Case(world_size, Fault("kill", "reduce issue", count))
    ended = run(world_size, work, case, limit_s=LIMIT_S, patience_s=CASE_S)
    left = [one for one in ended if one.rank != 1]
    for one in left:
        check(one, case)
        assert "GS405: rank" in one.answer.error
    # Whichever met the dead rank first: the reduction of another group, or a later gather.
    named = r"(reduce-scatter|all-gather) of (layers\.\d|\(root\)).* in (backward of )?forward \d"
    assert any(re.search(named, one.answer.error) for one in left)


@pytest.mark.parametrize(("point", "world_size"), [("gather wait", 3), ("reduce wait", 2)])
def test_a_rank_that_stops_for_good(point: str, world_size: int) -> None:
    """The other ranks end at the time limit of their process group."""
    assert outcome(Case(world_size, Fault("stop", point, 5))) == ENDS


@pytest.mark.parametrize("action", ["kill", "stop", "raise"])
@pytest.mark.parametrize("point", ["all-reduce", "all-reduce wait"])
def test_a_rank_that_is_lost_while_replicas_add_up(point: str, action: str) -> None:
    """The others end, with nothing under way and nothing gathered."""
    assert outcome(Case(4, Fault(action, point, 3), replicas=2)) == ENDS


def test_a_hook_that_raises_on_one_rank() -> None:
    assert outcome(Case(2, Fault("raise", "hook", 5))) == ENDS


# -- a setting on one rank only --------------------------------------------------------------------


@pytest.mark.parametrize(("what", "world_size"), [*((s, 2) for s in SETTINGS), ("keep", 3)])
def test_a_setting_on_one_rank_only(what: str, world_size: int) -> None:
    """All ranks say which collective differs, before its bytes are taken for another's.

    In FSDP2's own order: the planner keeps groups by itself, so that keeping changes nothing.
    """
    case = Case(world_size, Fault(what, "step", 2), options={"schedule": "fsdp2"})
    ended = run(world_size, work, case, limit_s=LIMIT_S, patience_s=CASE_S)
    for one in ended:
        check(one, case)
        assert "GS702: the ranks issue different collectives" in one.answer.error
        assert f"rank {one.rank}: " in one.answer.error
        assert one.after_s < 2 * LATE_S + 4


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("what", ["unshard", "unshard async"])
def test_a_setting_that_all_ranks_had_once_on_one_rank_only(what: str, world_size: int) -> None:
    """Both orders are known, so nobody asks; neighbours see it afterwards."""
    case = Case(world_size, Fault(what, "step", 3), rehearsed=True)
    ended = run(world_size, work, case, limit_s=LIMIT_S, patience_s=CASE_S)
    for one in ended:
        check(one, case)
    assert any("GS702: the ranks issue different" in one.answer.error for one in ended)


def test_an_unshard_that_fsdp2_itself_waits_for_is_named() -> None:
    """It was known after these collectives, so nobody asked; and nobody comes."""
    case = Case(2, Fault("unshard", "step", 2, rank=0), rehearsed=True)
    ended = run(2, work, case, limit_s=LIMIT_S, patience_s=CASE_S)
    for one in ended:
        check(one, case)
    assert "GS405: rank 0: all-gather (unshard) of layers.1" in ended[0].answer.error


@pytest.mark.parametrize("what", ["keep", "unshard"])
def test_a_setting_on_all_ranks(what: str) -> None:
    assert outcome(Case(2, Fault(what, "step", 2, rank=-1))) == GOES_ON


# -- whatever happens ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(int(CASES * CASE_S))
def test_drawn() -> None:
    table: Counter[tuple[str, str, str]] = Counter()
    wrong = []
    for index, case in enumerate(drawn(SEED, CASES)):
        try:
            what = outcome(case)
        except AssertionError as error:
            what = "WRONG"
            wrong.append(f"case {index}: {error}")
            print(wrong[-1], flush=True)
        table[case.fault.action, case.fault.point, what] += 1
        print(f"{index:4} {what:8} {case}", flush=True)
    for (action, point, what), number in sorted(table.items()):
        print(f"{number:5} {action:10} {point:14} {what}")
    assert not wrong, "\n".join(wrong)
