"""One direction of a step as rows of a mixed integer program: order, memory and clocks.

Binaries say of each issue and each wait for a reduction (a *mover*) which events it comes before.
A total order of all events results, in which collectives of one lane may pass each other. Memory
is counted at each event that takes some; clocks follow the order.

Fixed events are the waits for gathers and the regions, with the releases after them: nothing comes
between the two, since a release takes no time and only gives back. Gap p is before fixed event p.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, combinations, permutations

from linear import NO, YES, Linear, is_yes

from graphshard.schedule.plan import Direction


@dataclass(slots=True, eq=False)
class Mover:
    """An issue, or the wait for a reduction.

    real: 0 where nothing runs (a gather of what is kept). before: for each fixed event, and at
    last for the end, whether this comes before it and is real. us: on compute. rises: bytes while
    it runs; grows: bytes that it leaves. done_us: compute is through with it. lane, sent_us: of
    its collective. first: the first gap where it may be.
    """

    what: str
    group: int
    us: float
    rises: int
    grows: int
    real: Linear
    lane: int = -1
    comm_us: float = 0.0
    first: int = 0
    before: list[Linear] = field(default_factory=list)
    done_us: Linear = NO
    sent_us: Linear = NO


def _total(expressions):
    return sum(expressions, NO)


# -- activations ---------------------------------------------------------------------------------


def _alive(problem, direction):
    """Activations inside each region, and before, between and after them; nothing again yet."""
    inside = [r.activation_bytes for r in problem.regions(direction)]
    handed = min(problem.forward[-1].activation_bytes, problem.backward[0].activation_bytes)
    forward = direction is Direction.FORWARD
    first, last = (0, handed) if forward else (handed, 0)
    return inside, [first, *map(min, inside, inside[1:]), last]


def _spared(problem, direction, gap):
    """Options that, if taken, wait to be computed again before region `gap`."""
    options = enumerate(problem.recompute)
    if direction is Direction.FORWARD:
        return [i for i, o in options if o.after < gap]
    return [i for i, o in options if o.before >= gap]


def least_alive(problem, direction):
    inside, between = _alive(problem, direction)
    later = direction is Direction.BACKWARD
    for index, alive in [*enumerate(between), *((i + later, b) for i, b in enumerate(inside))]:
        spared = _spared(problem, direction, index)
        yield alive - sum(problem.recompute[i].saved_bytes for i in spared)


class OneDirection:
    """One direction: its events, their order, what they hold and when they are done."""

    def __init__(self, program, problem, direction, again, kept, budget_bytes, limit_us):
        self.program, self.problem, self.direction = program, problem, direction
        self.again, self.kept = again, kept
        self.budget_bytes, self.limit_us = budget_bytes, limit_us
        self.forward = direction is Direction.FORWARD
        self.fixed = self._fixed()
        self.end = len(self.fixed)
        self.slots = [self._slot(event) for event in self.fixed] + [self.region_count]
        self.wait_at = {n: p for p, (what, n) in enumerate(self.fixed) if what == "wait"}
        self.movers = self._movers()
        self._places()
        self._order()
        self._memory()
        self._clocks()

    # -- events ----------------------------------------------------------------------------------

    @property
    def region_count(self):
        return len(self.problem.regions(self.direction))

    def use(self, group):
        part = group.parts[0]
        return part.forward if self.forward else part.backward

    def _fixed(self):
        events = [("region", index) for index in range(self.region_count)]
        events += [("wait", group.id) for group in self.problem.groups]
        return sorted(events, key=lambda e: (self._slot(e), e[0] == "region", e[1]))

    def _slot(self, event):
        """The region that an event comes before, or is."""
        what, number = event
        return number if what == "region" else self.use(self.problem.groups[number]).first

    def _movers(self):
        movers = []
        for group in self.problem.groups:
            gather = group.parts[0].gather
            size, real = group.gathered_bytes, YES if self.forward else 1 - self.kept[group.id]
            lane, us = group.gather_lane, gather.before_us
            movers.append(Mover("gather", group.id, us, size, size, real, lane, gather.us))
            if not self.forward:
                movers += self._reduction(group)
        return movers

    def _reduction(self, group):
        gradient = group.parts[0].gradient
        reduce, fresh, output = gradient.reduce, gradient.bytes, gradient.output_bytes
        packed = 0 if reduce.in_place else gradient.input_bytes
        late = fresh if reduce.in_place else packed  # what the wait gives back
        dropped = output if self.problem.has_gradients else 0
        grows = packed + output - (0 if reduce.in_place else fresh)
        first = self.fixed.index(("region", gradient.ready)) + 1
        issue = (reduce.before_us, packed + output, grows, YES, group.reduce_lane, reduce.us, first)
        wait = (reduce.after_us, 0, -late - dropped, YES, -1, 0.0, first)
        return [Mover("reduce", group.id, *issue), Mover("await", group.id, *wait)]

    # -- order -----------------------------------------------------------------------------------

    def _places(self):
        for mover in self.movers:
            last = self.wait_at[mover.group] if mover.what == "gather" else self.end
            mover.before = [
                NO if p < mover.first else mover.real if p >= last else self.program.binary()
                for p in range(self.end + 1)
            ]
            for one, later in zip(mover.before, mover.before[1:], strict=False):
                self.program.positive(later - one)

    def _order(self):
        """earlier[a, b]: a comes before b, and both are real."""
        self.earlier = {}
        for one, other in combinations(self.movers, 2):
            self.earlier[one, other], self.earlier[other, one] = self._either(one, other)
        for one, other in permutations(self.movers, 2):
            missing = 1 - other.real
            for p in range(self.end):
                apart = one.before[p] - other.before[p] - missing
                self.program.positive(self.earlier[one, other] - apart)
        for a, b, c in combinations(self.movers, 3):
            for circle in (((a, b), (b, c), (c, a)), ((a, c), (c, b), (b, a))):
                self.program.positive(2 - _total(self.earlier[pair] for pair in circle))

    def _either(self, one, other):
        if one.group == other.group and (one.what, other.what) == ("reduce", "await"):
            return YES, NO
        ahead = self.program.binary()
        if one.real is YES and other.real is YES:
            return ahead, 1 - ahead
        behind = self.program.binary()
        self.program.positive(one.real - ahead - behind)
        self.program.positive(other.real - ahead - behind)
        self.program.positive(ahead + behind - (one.real + other.real - 1))
        return ahead, behind

    def in_gap(self, mover, gap):
        return mover.before[gap] - (mover.before[gap - 1] if gap else NO)

    def order(self, values):
        """All events in the order of a solution."""
        ranked = [(p, len(self.movers), event) for p, event in enumerate(self.fixed)]
        for mover in self.movers:
            if is_yes(mover.real, values):
                gap = next(p for p, b in enumerate(mover.before) if is_yes(b, values))
                ahead = sum(is_yes(self.earlier[m, mover], values) for m in self._others(mover))
                ranked.append((gap, ahead, (mover.what, mover.group)))
        return tuple(event for *_, event in sorted(ranked, key=lambda row: row[:2]))

    def _others(self, *but):
        return [m for m in self.movers if m not in but]

    # -- memory ----------------------------------------------------------------------------------

    def _memory(self):
        for gap, event in enumerate(self.fixed):
            held = self._base(gap) + _total(
                m.before[gap] * m.grows for m in self.movers if not self._over(m, gap)
            )
            self.program.positive(self.budget_bytes - held - self._rises(event))
        for mover in (m for m in self.movers if m.rises):
            for gap in range(mover.first, self.end + 1):
                held = self._base(gap) + _total(
                    self.earlier[m, mover] * m.grows
                    for m in self._others(mover)
                    if not self._over(m, gap)
                )
                room = self.budget_bytes - held - mover.rises
                self.program.implied(self.in_gap(mover, gap), room)

    def _over(self, mover, gap):
        """What this gather brought is no longer counted as its own: it was waited for."""
        return mover.what == "gather" and self.wait_at[mover.group] < gap

    def _base(self, gap):
        """Bytes in `gap` without what movers hold."""
        slot = self.slots[gap]
        _, between = _alive(self.problem, self.direction)
        held = NO + sum(a.bytes for a in self.problem.resident) + between[slot]
        held -= self._again(slot)
        for group in self.problem.groups:
            held += self._gathered(group, gap) * group.gathered_bytes
            if not self.forward and group.parts[0].gradient.first < slot:
                held += group.parts[0].gradient.bytes
        return held

    def _again(self, slot):
        spared = _spared(self.problem, self.direction, slot)
        return _total(self.again[i] * self.problem.recompute[i].saved_bytes for i in spared)

    def _gathered(self, group, gap):
        """Whether parameters are there in `gap`, apart from a gather in flight."""
        if self.use(group).last < self.slots[gap]:
            return self.kept[group.id] if self.forward else NO
        if self.wait_at[group.id] < gap:
            return YES
        return NO if self.forward else self.kept[group.id]

    def _rises(self, event):
        """What a fixed event needs on top of what is held before it."""
        what, number = event
        if what == "wait":
            group = self.problem.groups[number]
            copied = 0 if group.parts[0].gather.in_place else group.gathered_bytes
            return copied * self._runs(group)
        inside, between = _alive(self.problem, self.direction)
        region = self.problem.regions(self.direction)[number]
        more = NO + inside[number] - between[number] + region.temporary_bytes
        if not self.forward:
            more += self._again(number) - self._again(number + 1)
            grads = (g.parts[0].gradient for g in self.problem.groups)
            more += sum(g.bytes for g in grads if g.first == number)
        return more

    def _runs(self, group):
        return YES if self.forward else 1 - self.kept[group.id]

    # -- clocks ----------------------------------------------------------------------------------

    def _clocks(self):
        self._compute()
        for mover in self.movers:
            self._clock_of(mover)
        for one, other in permutations([m for m in self.movers if m.lane >= 0], 2):
            if one.lane == other.lane:
                behind = other.sent_us - one.sent_us - one.comm_us
                self.program.implied(self.earlier[one, other], behind)
        for issue in self.movers:
            if issue.what == "gather":
                at = self.wait_at[issue.group]
                arrived = issue.sent_us + issue.comm_us * issue.real
                self.program.positive(self.done_us[at] - arrived - self._us(self.fixed[at]))
        for wait in (m for m in self.movers if m.what == "await"):
            self._await(wait)
        self._lane_loads()

    def _us(self, event):
        """On compute, what is computed again included."""
        what, number = event
        if what == "wait":
            group = self.problem.groups[number]
            return group.parts[0].gather.after_us * self._runs(group)
        us = NO + self.problem.regions(self.direction)[number].us
        if not self.forward:
            options = zip(self.again, self.problem.recompute, strict=True)
            us += _total(x * o.extra_us for x, o in options if o.before == number)
        return us

    def _compute(self):
        """done_us: when compute is through with each fixed event; end_us: with everything."""
        regions = self.problem.regions(self.direction)
        least = [regions[n].us if what == "region" else 0.0 for what, n in self.fixed]
        sums = [*accumulate(least)]
        ends = [(us, self.limit_us - sums[-1] + us) for us in sums]
        self.done_us = [self.program.variable(*both) for both in ends]
        self.end_us = self.program.variable(sums[-1], self.limit_us)
        before = NO
        for gap, done in enumerate([*self.done_us, self.end_us]):
            own = self._us(self.fixed[gap]) if gap < self.end else NO
            movers = _total(self.in_gap(m, gap) * m.us for m in self.movers)
            self.program.positive(done - before - own - movers)
            before = done

    def _clock_of(self, mover):
        """A mover is done after every event before it, and after the movers between the two."""
        others = self._others(mover)
        mover.done_us = self.program.variable(0.0, self.limit_us)
        all_us = _total(self.earlier[m, mover] * m.us for m in others) + mover.us * mover.real
        self.program.positive(mover.done_us - all_us)
        for gap, done in enumerate(self.done_us):
            after = mover.real - mover.before[gap]
            since = all_us - _total(m.before[gap] * m.us for m in others)
            self.program.implied(after, mover.done_us - done - since)
        if mover.lane >= 0:
            mover.sent_us = self.program.variable(0.0, self.limit_us)
            self.program.positive(mover.sent_us - mover.done_us)

    def _await(self, wait):
        """The wait for a reduction holds compute, and what comes after it."""
        issue = next(m for m in self.movers if (m.what, m.group) == ("reduce", wait.group))
        self.program.positive(wait.done_us - issue.sent_us - issue.comm_us - wait.us)
        for gap, done in enumerate([*self.done_us, self.end_us]):
            own = self._us(self.fixed[gap]) if gap < self.end else NO
            between = _total(
                (m.before[gap] - self.earlier[m, wait]) * m.us for m in self._others(wait)
            )
            self.program.implied(wait.before[gap], done - wait.done_us - own - between)
        for mover in self._others(wait):
            between = _total(
                (self.earlier[m, mover] - self.earlier[m, wait]) * m.us
                for m in self._others(wait, mover)
            )
            after = mover.done_us - wait.done_us - between - mover.us
            self.program.implied(self.earlier[wait, mover], after)

    def _lane_loads(self):
        """Implied by the rows above, but of great help to the solver: a lane does what has to be
        done by a wait one after the other, and so it does the reductions that are left."""
        issues = [m for m in self.movers if m.lane >= 0]
        for lane in {m.lane for m in issues}:
            gathers = [m for m in issues if m.lane == lane and m.what == "gather"]
            reductions = [m for m in issues if m.lane == lane and m.what == "reduce"]
            for gap, done in enumerate(self.done_us):
                due = [m for m in gathers if self.wait_at[m.group] <= gap]
                self.program.positive(done - _total(m.real * m.comm_us for m in due))
                left = [m for m in reductions if m.first > gap]
                self.program.positive(self.end_us - done - sum(m.comm_us for m in left))
