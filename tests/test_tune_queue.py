"""Settings come in the order of their bounds, though most of them never get one.

Assumed: compute alone takes no longer than the bound. Drawn are steps with ties, compute that is
near its bound or far from it, and settings that do not fit.
"""

from math import log

from hypothesis import given
from hypothesis import strategies as st

from graphshard.tune.pricing import Bound
from graphshard.tune.queue import TOLERANCE, Queue

BUDGET_BYTES = 10


class Steps:
    """In the place of a pricer; a setting is a number. asked: for bounds."""

    def __init__(self, drawn):
        self.drawn, self.asked = drawn, []

    def compute_us(self, setting):
        return self.drawn[setting][0] * self.drawn[setting][1]

    def bound(self, setting):
        self.asked.append(setting)
        step_us, _, least_bytes = self.drawn[setting]
        return Bound(step_us, least_bytes)

    def tokens_per_s(self, setting, step_us):
        return 1e6 / step_us


steps_us = st.one_of(st.sampled_from([1.0, 1.004, 1.02, 2.0]), st.floats(0.5, 4.0))
shares = st.sampled_from([1.0, 0.999, 0.9, 0.5])
steps = st.lists(st.tuples(steps_us, shares, st.sampled_from([1, 10, 11])), max_size=12)


@given(steps, st.integers(0, 12))
def test_the_order_is_that_of_the_bounds(drawn, taken):
    pricer = Steps(drawn)
    queue = Queue(pricer, BUDGET_BYTES)
    for setting in range(len(drawn)):
        queue.add(setting)
    found = []
    while len(found) < taken and queue.next_is_bound():
        most = max(one.rate for one in queue.waiting)
        assert most == max(one.rate for one in queue.waiting if one.is_bound)  # what is left
        found.append(queue.pop().setting)
    fitting = [n for n, (_, _, least_bytes) in enumerate(drawn) if least_bytes <= BUDGET_BYTES]
    fitting.sort(key=lambda n: -round(log(pricer.tokens_per_s(n, drawn[n][0])) / TOLERANCE))
    assert found == fitting[:taken]
    assert len(set(pricer.asked)) == len(pricer.asked)
