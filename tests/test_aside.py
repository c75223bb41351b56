"""Work in forks: results in order, errors here, and nothing lost with a fork that dies."""

import multiprocessing
import os
import threading
import time
from functools import partial

import pytest

from graphshard.tune import aside
from graphshard.tune.aside import side_by_side


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(aside, "_num_cores", lambda: 2)
    monkeypatch.setattr(aside, "_may_fork", lambda: True)


@pytest.mark.parametrize(
    ("count", "here"),
    [(0, []), (1, [0]), (2, [0]), (3, [0]), (4, [0, 2]), (5, [0, 3]), (7, [0, 3, 6])],
)
def test_results_come_in_order_and_the_first_of_each_round_is_made_here(count, here):
    found = side_by_side([lambda n=n: (n, os.getpid()) for n in range(count)])
    assert [n for n, _ in found] == list(range(count))
    assert [n for n, pid in found if pid == os.getpid()] == here


def test_a_fork_has_what_was_made_before():
    made = {"a": 1}
    assert side_by_side([lambda: None, partial(made.get, "a")])[1] == 1


def test_what_one_raises_is_raised_here():
    def fails():
        raise ValueError("no such mesh")

    with pytest.raises(ValueError, match="no such mesh"):
        side_by_side([lambda: 1, fails])


@pytest.mark.parametrize("how", ["dies", "gives what cannot be pickled"])
def test_what_a_fork_cannot_give_is_made_here(how):
    here = os.getpid()

    def work():
        if os.getpid() == here:
            return "made here"
        if how == "dies":
            os._exit(1)
        return threading.Lock()

    assert side_by_side([lambda: 0, work]) == [0, "made here"]


def test_a_fork_that_nobody_waits_for_any_more_is_ended():
    def fails():
        raise KeyboardInterrupt

    others, began = set(multiprocessing.active_children()), time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        side_by_side([fails, partial(time.sleep, 60)])
    assert time.monotonic() - began < 30
    assert set(multiprocessing.active_children()) == others


def test_work_in_a_fork_goes_on_in_forks_of_its_own():
    def work(count):
        inner = side_by_side([os.getpid] * count)
        return os.getpid(), inner

    _, (outer, inner) = side_by_side([lambda: None, partial(work, 2)])
    assert inner[0] == outer != inner[1] != os.getpid()


def test_forks_of_a_fork_end_with_it(tmp_path):
    def sleeps():
        (tmp_path / "written").write_text(str(os.getpid()))
        (tmp_path / "written").rename(tmp_path / "pid")  # there is no moment when it is empty
        time.sleep(60)

    def fails_when_all_sleep():
        while not (tmp_path / "pid").exists():
            time.sleep(0.01)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        side_by_side(
            [fails_when_all_sleep, lambda: side_by_side([partial(time.sleep, 60), sleeps])]
        )
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_nothing_is_forked_beside_other_threads(monkeypatch):
    monkeypatch.undo()
    going = threading.Event()
    other = threading.Thread(target=going.wait)
    other.start()
    try:
        pids = side_by_side([os.getpid, os.getpid])
    finally:
        going.set()
        other.join()
    assert pids == [os.getpid()] * 2
