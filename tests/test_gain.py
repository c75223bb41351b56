"""What `explain` says of a plan's gain, in the units that people read."""

from dataclasses import replace

from graphshard.view.gain import Gained, gain_lines

OWN = Gained("graph 0/0", 512e3, 661e3, 3 * 2**30, 4 * 2**30)


def test_predicted() -> None:
    step, room = gain_lines(OWN)
    assert step == (
        "512 ms in graph 0/0, 1.29 x as fast as FSDP2's own schedule, 661 ms (predicted)"
    )
    assert room == "3.0 GiB of 4.0 GiB in graph 0/0"


def test_measured() -> None:
    step, _ = gain_lines(replace(OWN, measured_us=530e3))
    assert step.endswith("661 ms (predicted; measured 530 ms)")


def test_what_more_memory_gains() -> None:
    def said(us: float) -> str:
        return gain_lines(replace(OWN, more_bytes=2**30, more_us=us))[1].split("; ")[1]

    assert said(500e3) == "1.0 GiB more would gain 12.0 ms a step (2.3 %)"
    assert said(511.9e3) == said(513e3) == "1.0 GiB more would gain nothing"
