"""The best possible schedule of a small problem, by trying everything.

Nothing of the planner's search is used: for every set of choices, every order of issues and waits
that fits the budget is tried, step by step, with the rules of the simulator written down once
more. Two partial schedules that have done the same are compared; the one that is nowhere ahead
is dropped. A bound on what is still to come cuts off what cannot beat `best_us`.
"""

from dataclasses import replace
from itertools import chain, combinations, product

from graphshard.planner.choices import Choices, Cuts
from graphshard.planner.events import (
    given_gradients,
    micro_steps_of,
    start_allocations,
    total_bytes,
)
from graphshard.planner.memo import Memo
from graphshard.planner.stage import stage_of
from graphshard.schedule.plan import Direction


def subsets(items):
    items = tuple(items)
    return chain.from_iterable(combinations(items, n) for n in range(len(items) + 1))


def best_direction(stages, starts, weights, budget, limit_us):
    """Least time of one direction over its micro-steps, or None if none is below `limit_us`.

    stages: of every turn, alike but for costs. One order serves all turns.
    """
    search = _Search(stages, starts, weights, budget)
    frontier = {search.start: [search.start_label]}
    for place in range(search.num_fixed + 1):
        frontier = search.close(frontier, limit_us)
        if place < search.num_fixed:
            frontier = search.advance(frontier, limit_us)
    done = [
        search.total(label)
        for state, labels in frontier.items()
        if search.is_done(state)
        for label in labels
    ]
    return min(done, default=None)


class _Search:
    """State: (fixed events done, gathers issued, reductions issued, reductions awaited).

    Label: for each micro-step (clock, lanes' free times, finish of each job), as flat tuples.
    """

    def __init__(self, stages, starts, weights, budget):
        self.stages, self.weights, self.budget = stages, weights, budget
        one = stages[0]
        self.fixed = [[e for _, e in s.fixed] for s in stages]
        self.positions = [p for p, _ in one.fixed]
        self.num_fixed = len(one.fixed)
        self.gathers = [s.gathers for s in stages]
        self.reductions = [s.reductions for s in stages]
        self.wait_of = {id(j.wait): i for i, j in enumerate(one.gathers)}
        self.awaits = [self.wait_of.get(id(e)) for e in self.fixed[0]]
        ready = [job.at for job in one.reductions]
        # A reduction may be issued once the region before its position is done.
        self.ready = [sum(p < at - at % one.stride for p in self.positions) for at in ready]
        self.num_g, self.num_r = len(one.gathers), len(one.reductions)
        self.lanes = (
            max((j.issue.lane for s in stages for j in (*s.gathers, *s.reductions)), default=-1) + 1
        )
        self.start = (0, 0, 0, 0)
        self.start_label = tuple(
            (0.0,) * (1 + self.lanes + self.num_g + self.num_r) for _ in stages
        )
        self.held = {self.start: tuple(starts)}
        self.rest_us = []
        for events in self.fixed:
            rest, rows = 0.0, [0.0]
            for event in reversed(events):
                rest += event.us
                rows.append(rest)
            self.rest_us.append(rows[::-1])

    def close(self, frontier, limit_us):
        """Add everything that issues and waits make of `frontier`, between two fixed events."""
        open_states = list(frontier)
        while open_states:
            state = open_states.pop()
            for move in self.moves(state):
                after = self.apply(state, move)
                if after is None:
                    continue
                new, labels = after, [self.step(label, move) for label in frontier[state]]
                changed = self.merge(frontier, new, labels, limit_us)
                if changed:
                    open_states.append(new)
        return frontier

    def moves(self, state):
        _, gathers, issued, awaited = state
        for i in range(self.num_g):
            if not gathers >> i & 1:
                yield "gather", i
        for i in range(self.num_r):
            if not issued >> i & 1 and self.ready[i] <= state[0]:
                yield "reduce", i
            if issued >> i & 1 and not awaited >> i & 1:
                yield "wait", i

    def event(self, move, micro):
        kind, i = move
        if kind == "gather":
            return self.gathers[micro][i].issue
        if kind == "reduce":
            return self.reductions[micro][i].issue
        if kind == "wait":
            return self.reductions[micro][i].wait
        return self.fixed[micro][i]

    def apply(self, state, move):
        """The state after `move`, or None if memory or order forbid it."""
        place, gathers, issued, awaited = state
        kind, i = move
        if kind == "gather":
            new = (place, gathers | 1 << i, issued, awaited)
        elif kind == "reduce":
            new = (place, gathers, issued | 1 << i, awaited)
        elif kind == "wait":
            new = (place, gathers, issued, awaited | 1 << i)
        else:
            job = self.awaits[i]
            if job is not None and not gathers >> job & 1:
                return None
            new = (place + 1, gathers, issued, awaited)
        held = []
        for micro, before in enumerate(self.held[state]):
            event = self.event(move, micro)
            if before + event.alloc_bytes + event.brief_bytes > self.budget:
                return None
            held.append(before + event.alloc_bytes - event.free_bytes)
        self.held[new] = tuple(held)
        return new

    def step(self, label, move):
        return tuple(self.play_step(part, move, micro) for micro, part in enumerate(label))

    def play_step(self, part, move, micro):
        event, kind = self.event(move, micro), move[0]
        clock, values = part[0], list(part)
        slot = 1 + self.lanes + (move[1] if kind == "gather" else self.num_g + move[1])
        if event.lane >= 0:
            clock += event.us
            values[slot] = values[1 + event.lane] = (
                max(clock, values[1 + event.lane]) + event.comm_us
            )
            values[0] = clock
            return tuple(values)
        if event.job >= 0:
            if kind == "fixed":
                slot = 1 + self.lanes + self.awaits[move[1]]
            clock = max(clock, values[slot])
            values[slot] = 0.0  # over: no longer compared
        values[0] = clock + event.us
        return tuple(values)

    def advance(self, frontier, limit_us):
        reached = {}
        for state, labels in frontier.items():
            move = ("fixed", state[0])
            new = self.apply(state, move)
            if new is not None:
                self.merge(reached, new, [self.step(label, move) for label in labels], limit_us)
        return reached

    def merge(self, frontier, state, labels, limit_us):
        kept = frontier.setdefault(state, [])
        changed = False
        for label in labels:
            if self.bound(state, label) >= limit_us:
                continue
            if any(_no_worse(other, label) for other in kept):
                continue
            kept[:] = [other for other in kept if not _no_worse(label, other)]
            kept.append(label)
            changed = True
        if not kept:
            del frontier[state]
        return changed

    def bound(self, state, label):
        total = 0.0
        for micro, part in enumerate(label):
            rest = self.rest_us[micro][state[0]]
            total += self.weights[micro] * max(part[0] + rest, self.lane_bound(state, micro, part))
        return total

    def lane_bound(self, state, micro, part):
        free = list(part[1 : 1 + self.lanes])
        for i, job in enumerate(self.gathers[micro]):
            if not state[1] >> i & 1 and job.issue.lane >= 0:
                free[job.issue.lane] += job.issue.comm_us
        for i, job in enumerate(self.reductions[micro]):
            if not state[2] >> i & 1 and job.issue.lane >= 0:
                free[job.issue.lane] += job.issue.comm_us
        return max(free, default=0.0)

    def is_done(self, state):
        full = (1 << self.num_r) - 1
        return state == (self.num_fixed, (1 << self.num_g) - 1, full, full)

    def total(self, label):
        return sum(w * part[0] for w, part in zip(self.weights, label, strict=True))


def _no_worse(one, other):
    return all(a <= b for p, q in zip(one, other, strict=True) for a, b in zip(p, q, strict=True))


def all_cuts(problem, *, gathers):
    allowed = problem.regroup_gathers if gathers else problem.regroup_reductions
    if not allowed:
        return [Cuts()]
    whole = [g.id for g in problem.groups]
    many = [g.id for g in problem.groups if len(g.parts) > 1]
    found = {}
    for joined, split in product(subsets(whole), subsets(many)):
        found[Cuts(joined, split)] = None
    return list(found)


def all_kept(problem):
    """Every set of groups that may be kept, and between micro-steps, and held by nodes."""
    free, bound, nodes = [], [], set()
    for g in problem.groups:
        if any(g.use_in(d) is None for d in Direction) or g.post_forward is not None:
            continue
        if g.reshard is None:
            free.append(g.id)
            nodes |= {g.id} if g.node is not None else set()
        elif not g.reshard:
            bound.append(g.id)
    for more in subsets(free):
        kept = tuple(sorted((*bound, *more)))
        for across in subsets(kept) if problem.micro_steps > 1 else [()]:
            for on_node in subsets(sorted(nodes - set(kept))):
                yield kept, across, on_node


def distinct_stages(memo, direction, base, cuts_list, weights):
    """One (stages) per really different cutting."""
    seen = {}
    for cuts in cuts_list:
        cut = Choices(base.kept, base.across, base.recompute, *cuts)
        choices = replace(cut, on_node=base.on_node)
        stages = [
            stage_of(memo, choices, direction, micro) for micro, _ in micro_steps_of(memo.problem)
        ]
        key = tuple(j.bucket for j in (*stages[0].gathers, *stages[0].reductions))
        seen.setdefault(key, stages)
    return list(seen.values())


def optimum(problem, budget, best_us):
    """The least step time within `budget`, or None if nothing is faster than `best_us`."""
    weights = [times for _, times in micro_steps_of(problem)]
    memo = Memo(problem)
    found = None
    for recompute in subsets(range(len(problem.recompute))):
        if not {problem.recompute[i].needs for i in recompute} <= {None, *recompute}:
            continue
        for kept, across, on_node in all_kept(problem):
            base = Choices(kept, across, recompute, on_node=on_node)
            us = _both(memo, budget, base, weights, best_us if found is None else found)
            if us is not None:
                found = us
    return found


def _both(memo, budget, base, weights, limit_us):
    problem = memo.problem
    starts = [
        total_bytes(start_allocations(problem, base, micro)) for micro, _ in micro_steps_of(problem)
    ]
    forward_cuts = [(c, Cuts(), Cuts()) for c in all_cuts(problem, gathers=True)]
    least_backward = sum(
        w
        * (
            sum(r.us for r in problem.backward)
            + sum(problem.recompute[i].extra_us for i in base.recompute)
        )
        for w in weights
    )
    forward = None
    handed = None
    for stages in distinct_stages(memo, Direction.FORWARD, base, forward_cuts, weights):
        if handed is None:
            handed = [
                start
                + sum(
                    e.alloc_bytes - e.free_bytes
                    for e in [*(e for _, e in s.fixed), *(j.issue for j in s.gathers)]
                )
                for s, start in zip(stages, starts, strict=True)
            ]
        limit = limit_us - least_backward if forward is None else forward
        us = best_direction(stages, starts, weights, budget, limit)
        forward = us if us is not None else forward
    if forward is None:
        return None
    given = total_bytes(given_gradients(problem))
    cuts = product(all_cuts(problem, gathers=True), all_cuts(problem, gathers=False))
    backward_cuts = [(Cuts(), b, r) for b, r in cuts]
    best = None
    for stages in distinct_stages(memo, Direction.BACKWARD, base, backward_cuts, weights):
        limit = limit_us - forward if best is None else best
        us = best_direction(stages, [h + given for h in handed], weights, budget, limit)
        best = us if us is not None else best
    return None if best is None else forward + best
