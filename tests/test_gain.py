"""What `explain` says of a plan's gain, in the units that people read."""

from dataclasses import replace

from forecasts import as_predicted, planned
from planning import layers
from plans import ESTIMATE

from graphshard.schedule.estimate import Figures, Spent
from graphshard.view.gain import Gained, gain_lines

GIB = 2**30
OURS, FSDP2 = Figures(512e3, 60e3, 3 * GIB), Figures(661e3, 200e3, 2 * GIB)
OWN = Gained("graph 0/0", replace(ESTIMATE, ours=OURS, fsdp2=FSDP2, budget_bytes=4 * GIB))


def said(gained: Gained) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in gain_lines(gained))


def test_it_leads_with_step_exposed_peak_limit_and_gain() -> None:
    assert list(gain_lines(OWN))[:4] == [
        "step         512 ms predicted; FSDP2 661 ms (-22.5 %)",
        "exposed      60.0 ms; FSDP2 200 ms (-70.0 %)",
        "peak         3.0 GiB; FSDP2 2.0 GiB (+1.0 GiB)",
        "limit        4.0 GiB; a budget that was set",
    ]
    assert said(OWN)["gain"].startswith("22.5 % less time than FSDP2; at most ")
    assert list(said(OWN)) == ["step", "exposed", "peak", "limit", "gain", "enough"]


def test_a_gap_is_told_in_one_way() -> None:
    """The same share beside the step and in the gain; of what is left, a share of the step."""

    def gain(ours_us: float, bound_us: float = 0.0) -> tuple[str, str]:
        ours = replace(OURS, step_time_us=ours_us)
        found = said(
            replace(OWN, estimate=replace(OWN.estimate, ours=ours, lower_bound_us=bound_us))
        )
        return found["step"], found["gain"]

    step, text = gain(528.8e3, 423.04e3)
    assert "(-20.0 %)" in step
    assert text == "20.0 % less time than FSDP2; at most 20.0 % left to gain"
    assert gain(727.1e3)[1].startswith("10.0 % more time than FSDP2; ")
    assert gain(661e3, 661e3)[1] == "as much time as FSDP2; at most 0.0 % left to gain"


def test_no_budget_is_told_of_where_nobody_set_one() -> None:
    own = replace(OWN, estimate=replace(OWN.estimate, budget_bytes=2 * GIB))
    assert said(own)["limit"] == "2.0 GiB; FSDP2's own peak"


def test_measured() -> None:
    plan = planned(layers(3))
    found = as_predicted(plan)
    own = Gained("a", plan.estimate, found)
    assert said(own)["measured"].startswith(f"{found.step_time_us / 1e3:.2f} ms; exposed ")
    assert "measured" not in said(OWN)


def test_what_more_memory_gains() -> None:
    def more(us: float) -> str:
        return said(replace(OWN, more_bytes=GIB, more_us=us))["more"]

    assert more(500e3) == "1.0 GiB more would gain 12.0 ms a step (2.3 %)"
    assert more(511.9e3) == more(513e3) == "1.0 GiB more would gain nothing"


def test_what_is_enough() -> None:
    spent = replace(OWN.estimate, all_spent=Spent(510e3, int(3.5 * GIB)))
    text = said(replace(OWN, estimate=spent))["enough"]
    assert text == "3.0 GiB; the other 1.0 GiB would bring 0.4 %"
    assert said(OWN)["enough"] == "3.0 GiB; the other 1.0 GiB would bring nothing"
    full = replace(OWN.estimate, budget_bytes=3 * GIB)
    assert "enough" not in said(replace(OWN, estimate=full))
