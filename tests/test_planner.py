"""The first planner: hand-made outlines, and what holds for every outline."""

from dataclasses import replace
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphshard.planner.one_ahead import one_ahead
from graphshard.planner.outline import GroupUse, Outline, Ready
from graphshard.schedule.plan import Direction, StepKind

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
WORDS = {
    StepKind.GATHER_ISSUE: "issue",
    StepKind.GATHER_WAIT: "wait",
    StepKind.RELEASE: "release",
    StepKind.REDUCE_ISSUE: "reduce",
    StepKind.REDUCE_WAIT: "reduced",
}


def outline(direction, num_ops, *uses, ready=(), kept=()):
    """uses: (group, first, last); ready: (group, after)."""
    found = tuple(GroupUse(*use) for use in uses)
    return Outline(direction, num_ops, found, tuple(Ready(*r) for r in ready), frozenset(kept))


def words(given):
    """The schedule in the words of `plans.steps`: "wait 0" is a group, "compute 3" three ops."""
    parts = []
    for step in one_ahead(given).steps:
        if step.kind is StepKind.COMPUTE:
            parts.append(f"compute {step.stop - step.start}")
        else:
            parts.append(f"{WORDS[step.kind]} {step.group}{' kept' * step.kept}")
    return ", ".join(parts)


def test_the_next_group_is_gathered_after_the_wait_for_this_one():
    three = outline(FORWARD, 6, (0, 0, 1), (1, 2, 3), (2, 4, 5))
    assert words(three) == (
        "issue 0, wait 0, issue 1, compute 2, release 0, wait 1, issue 2, compute 2, "
        "release 1, wait 2, compute 2, release 2"
    )


def test_ops_before_the_first_use_overlap_with_the_first_gather():
    assert words(outline(FORWARD, 5, (0, 2, 3))) == (
        "issue 0, compute 2, wait 0, compute 2, release 0, compute 1"
    )


def test_a_root_that_is_used_at_both_ends_stays_gathered():
    root = outline(FORWARD, 6, (0, 0, 5), (1, 1, 2), (2, 3, 4))
    assert words(root) == (
        "issue 0, wait 0, issue 1, compute 1, wait 1, issue 2, compute 2, release 1, wait 2, "
        "compute 2, release 2, compute 1, release 0"
    )


def test_groups_with_the_same_first_op_go_in_order_of_their_numbers():
    both = outline(FORWARD, 1, (1, 0, 0), (0, 0, 0))
    assert words(both).startswith("issue 0, wait 0, issue 1, wait 1, compute 1, ")


def test_a_group_is_gathered_by_first_use_not_by_number():
    assert words(outline(BACKWARD, 2, (0, 1, 1), (1, 0, 0))) == (
        "issue 1, wait 1, issue 0, compute 1, release 1, wait 0, compute 1, release 0"
    )


def test_what_the_caller_gets_is_not_released():
    assert words(outline(FORWARD, 2, (0, 0, None))) == "issue 0, wait 0, compute 2"
    assert words(outline(FORWARD, 2, (0, 2, None))) == "issue 0, compute 2, wait 0"


def test_reductions_are_issued_when_ready_and_waited_for_at_the_end():
    ready = [(0, 3), (1, 1)]
    assert words(outline(BACKWARD, 4, (1, 0, 1), (0, 2, 3), ready=ready)) == (
        "issue 1, wait 1, issue 0, compute 2, release 1, reduce 1, wait 0, compute 2, "
        "release 0, reduce 0, reduced 1, reduced 0"
    )


def test_a_gradient_that_is_an_input_is_reduced_before_the_first_op():
    assert words(outline(BACKWARD, 2, ready=[(0, -1)])) == "reduce 0, compute 2, reduced 0"


def test_kept_groups_are_released_as_kept_in_forward():
    assert words(outline(FORWARD, 2, (0, 0, 0), (1, 1, 1), kept=[1])) == (
        "issue 0, wait 0, issue 1, compute 1, release 0, wait 1, compute 1, release 1 kept"
    )


def test_a_kept_first_group_leaves_the_wire_to_the_second():
    assert words(outline(BACKWARD, 3, (2, 0, 0), (1, 1, 1), (0, 2, 2), kept=[2])) == (
        "issue 2 kept, issue 1, wait 2 kept, compute 1, release 2, wait 1, issue 0, compute 1, "
        "release 1, wait 0, compute 1, release 0"
    )


@pytest.mark.parametrize(("num_ops", "expected"), [(0, ""), (3, "compute 3")])
def test_nothing_to_communicate(num_ops, expected):
    assert words(outline(FORWARD, num_ops)) == expected


# -- what holds for every outline ----------------------------------------------------------


@st.composite
def outlines(draw):
    num_ops = draw(st.integers(0, 12))
    uses = []
    for group in draw(st.permutations(range(draw(st.integers(0, 6))))):
        first = draw(st.integers(0, num_ops))
        lasts = st.integers(first, num_ops - 1) if first < num_ops else st.none()
        uses.append((group, first, draw(st.one_of(st.none(), lasts))))
    groups = st.integers(0, 7)
    ready = draw(st.dictionaries(groups, st.integers(-1, num_ops - 1), max_size=6))
    kept = draw(st.sets(groups))
    direction = draw(st.sampled_from(Direction))
    return outline(direction, num_ops, *uses, ready=ready.items(), kept=kept)


def for_every_outline(check):
    # No deadline: other processes share the machine.
    return settings(deadline=None, max_examples=150)(given(outlines())(check))


def at(given, kind):
    """Group -> compute ops done when its step of `kind` is reached. One step a group."""
    done, found = 0, {}
    for step in one_ahead(given).steps:
        if step.kind is StepKind.COMPUTE:
            done = step.stop
        elif step.kind is kind:
            assert step.group not in found
            found[step.group] = done
    return found


@for_every_outline
def test_every_op_is_computed_once_and_in_order(given):
    ranges = [(s.start, s.stop) for s in one_ahead(given).of_kind(StepKind.COMPUTE)]
    assert [op for start, stop in ranges for op in range(start, stop)] == list(range(given.num_ops))
    assert all(start < stop for start, stop in ranges)


@for_every_outline
def test_a_group_is_issued_once_then_waited_for_at_its_first_use(given):
    assert at(given, StepKind.GATHER_WAIT) == {u.group: u.first for u in given.uses}
    order = [(s.kind, s.group) for s in one_ahead(given).steps]
    for use in given.uses:
        issue, wait = ((kind, use.group) for kind in (StepKind.GATHER_ISSUE, StepKind.GATHER_WAIT))
        assert order.count(issue) == 1
        assert order.index(issue) < order.index(wait)


@for_every_outline
def test_a_group_is_released_right_after_its_last_use(given):
    released = {u.group: u.last + 1 for u in given.uses if u.last is not None}
    assert at(given, StepKind.RELEASE) == released


@for_every_outline
def test_one_collective_is_in_flight_at_most(given):
    flying = set()
    for step in one_ahead(given).of_kind(StepKind.GATHER_ISSUE, StepKind.GATHER_WAIT):
        if step.kind is StepKind.GATHER_WAIT:
            flying.discard(step.group)
        elif not step.kept:
            flying.add(step.group)
        assert len(flying) <= 1


@for_every_outline
def test_the_next_gather_is_in_flight_while_a_group_computes(given):
    issued, waited = [], 0
    for step in one_ahead(given).steps:
        if step.kind is StepKind.GATHER_ISSUE:
            issued.append(step.group)
        elif step.kind is StepKind.GATHER_WAIT:
            waited += 1
        elif step.kind is StepKind.COMPUTE and waited > 1:
            assert len(issued) == min(waited + 1, len(given.uses))


@for_every_outline
def test_a_reduction_is_issued_after_its_op_and_waited_for_at_the_end(given):
    assert at(given, StepKind.REDUCE_ISSUE) == {r.group: r.after + 1 for r in given.reductions}
    waits = at(given, StepKind.REDUCE_WAIT)
    assert waits == {r.group: given.num_ops for r in given.reductions}
    tail = one_ahead(given).steps[len(one_ahead(given).steps) - len(waits) :]
    assert all(s.kind is StepKind.REDUCE_WAIT for s in tail)


@for_every_outline
def test_kept_says_that_no_collective_runs(given):
    for step in one_ahead(given).steps:
        gathers = step.kind in (StepKind.GATHER_ISSUE, StepKind.GATHER_WAIT)
        expected = gathers if given.direction is BACKWARD else step.kind is StepKind.RELEASE
        assert step.kept == (expected and step.group in given.kept)


@for_every_outline
def test_the_order_in_which_an_outline_lists_things_does_not_matter(given):
    again = replace(given, uses=given.uses[::-1], reductions=given.reductions[::-1])
    assert canonical(given) == canonical(again)


def canonical(given):
    """The schedule; releases at one point come in any order."""
    parts = groupby(one_ahead(given).steps, key=lambda s: s.kind is StepKind.RELEASE)
    return [sorted(p, key=lambda s: s.group) if released else list(p) for released, p in parts]
