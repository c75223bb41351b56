"""The six questions of a reader, in headless Chromium: what a page says of each, and that what it
says in two places agrees.

Why is forward waiting? What would 10 GiB more buy? Which layer is the peak? Did compile capture
everything? Why is it slower than predicted? What should I change?
"""

import re
from dataclasses import replace

import pytest
import viewing
from pictures import GIB, llama, planned
from viewing import PLANS, needs_browser

from graphshard.schedule.estimate import OptimizerKind, OptimizerStep, Rung
from graphshard.schedule.plan import LeftOut, PricedOn
from graphshard.view.text import bytes_text
from graphshard.view.units import time_text

pytestmark = needs_browser
browser, view = viewing.browser, viewing.view
WIDTHS = (1440, 1024, 390)
WORST = "waits that differ from step to step"


def texts(page, selector):
    found = page.locator(selector).all_inner_texts()
    return [re.sub(r"\s+", " ", text).strip() for text in found]


def rows(page, table):
    """The cells of a table, by what its row is called."""
    lines = page.locator(f"#{table} tbody tr")
    cells = lines.evaluate_all("all => all.map((e) => [...e.cells].map((each) => each.innerText))")
    return {name.strip(): rest for name, *rest in cells}


@pytest.fixture(scope="module")
def on_preset():
    """A plan priced on a machine that is known, within a budget that it takes whole."""
    plan = planned(llama(12, budget_bytes=12 * GIB), "12 blocks")
    return replace(plan, priced_on=PricedOn("h100-ib400", 8))


# -- why is forward waiting ----------------------------------------------------------------------


def test_the_sum_of_waits_is_told_beside_the_longest_single_one(view):
    plan = PLANS["llama"]
    page = view("llama")
    exposed = time_text(plan.estimate.exposed_us)
    assert f"exposed communication {exposed}" in texts(page, "#headline")[0]
    summed = texts(page, "#waited")[0]
    assert summed.startswith(f"{exposed} in all: ")
    assert summed.endswith("The longest single ones:")
    kinds = re.findall(r"([\d.]+ m?s) in \d+ waits? for (\S+ in \w+)", summed)
    assert len(kinds) > 1
    answer = texts(page, "#answer")[0]
    first = ", ".join(f"{time} for {kind}" for time, kind in kinds[:1])
    assert f"in all, compute waits {exposed}" in answer
    assert f"of it {first}" in answer


def test_a_plan_without_waits_says_so(view):
    plan = PLANS["llama"]
    quiet = tuple(
        replace(forecast, steps=tuple(replace(step, exposed_us=0.0) for step in forecast.steps))
        for forecast in plan.forecasts
    )
    plan = replace(plan, forecasts=quiet, measured=None)
    assert texts(view("no waits", plan=plan), "#waited")[0].startswith("In this plan compute waits")


# -- what would 10 GiB more buy ------------------------------------------------------------------


def test_more_memory_has_a_row_whether_it_was_planned_or_not(view, on_preset):
    estimate = on_preset.estimate
    own = Rung(estimate.budget_bytes + 10 * GIB, estimate.step_time_us, estimate.peak_bytes)
    more = replace(own, step_time_us=0.9 * own.step_time_us, peak_bytes=20 * GIB)
    for rung, words in ((own, "nothing worth it"), (more, "-10.0 %")):
        plan = replace(on_preset, estimate=replace(estimate, room=(rung,)))
        row = rows(view("rung", plan=plan), "else")["10.0 GiB more memory"]
        assert row == [time_text(rung.step_time_us), words, bytes_text(rung.peak_bytes)]
    page = view("not asked", plan=on_preset)
    assert re.fullmatch(r"at most [\d.]+ %", rows(page, "else")["more memory"][1])
    notes = texts(page, "section[aria-labelledby=h-else] .note")
    assert any("graphshard.explain(model)" in note for note in notes)


def test_what_is_left_of_the_limit_is_no_contradiction_to_more_memory(view):
    estimate = PLANS["llama"].estimate
    rest = bytes_text(estimate.budget_bytes - estimate.peak_bytes)
    answer = texts(view("llama"), "#answer")[0]
    assert (
        f"{bytes_text(estimate.peak_bytes)} would be enough: the other {rest} would bring" in answer
    )


# -- which layer is the peak ---------------------------------------------------------------------


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["llama", "merged", "random", "one lane"])
def test_the_peak_names_its_layer_inside_the_picture(view, name, width):
    page = view(name, width=width)
    said = page.locator("#memory .peak text")
    label = ", ".join(said.all_text_contents())
    assert re.fullmatch(r"peak [\d.]+ [KMG]?i?B, (forward|backward).*", label), label
    plot = page.locator("#memory .ground").bounding_box()
    for line in range(said.count()):
        box = said.nth(line).bounding_box()
        assert box["x"] >= plot["x"] - 1
        assert box["x"] + box["width"] <= plot["x"] + plot["width"] + 1
        assert box["y"] >= plot["y"] - 1


def test_the_root_group_is_explained(view):
    plan = PLANS["llama"]
    assert "(root)" not in texts(view("llama"), "#h-groups")[0]
    first, *others = plan.groups
    rooted = replace(plan, groups=(replace(first, fqn="(root)"), *others), measured=None)
    page = view("rooted", plan=rooted)
    assert "(root): the parameters of no inner fully_shard call" in texts(page, "#h-groups")[0]


# -- did compile capture everything --------------------------------------------------------------


@pytest.mark.parametrize(
    ("left_out", "words"),
    [
        ((), "Captured completely: one graph runs all 32 groups."),
        (
            (LeftOut("head", "it calls print"),),
            "Captured in part: this graph runs 32 of 33 groups.",
        ),
        (None, "This file does not say whether the model has groups outside of this graph."),
    ],
)
def test_the_title_says_whether_everything_was_captured(view, left_out, words):
    page = view("captured", plan=replace(PLANS["llama"], left_out=left_out))
    assert words in texts(page, "h1")[0]
    outside = texts(page, "#outside")
    assert outside == (["head eager FSDP2 runs them: it calls print"] if left_out else [])


# -- why slower than predicted -------------------------------------------------------------------


def test_a_plan_that_was_never_run_says_so(view):
    page = view("merged")
    assert page.locator("#unmeasured").is_visible()
    assert texts(page, "#unmeasured")[0].startswith("Not measured yet, so there is nothing")
    assert texts(page, "#answer")[0].endswith("Not measured yet: all figures are predicted.")
    assert page.locator("#misses").count() == 0
    measured = view("llama")
    assert measured.locator("#unmeasured").count() == 0
    assert "Not measured" not in texts(measured, "body")[0]


def varying():
    """Measured with waits that only some steps have, so that their medians are 0, and slower."""
    found = PLANS["llama"].measured
    quiet = tuple(replace(segment, exposed_us=0.0) for segment in found.forward)
    return replace(found, forward=quiet, step_time_us=1.1 * PLANS["llama"].estimate.step_time_us)


def test_measured_waits_are_one_number_above_and_in_the_table(view):
    found = varying()
    page = view("varying", plan=replace(PLANS["llama"], measured=found))
    parts = rows(page, "misses")
    assert f"measured {time_text(found.exposed_us)}" in texts(page, "#headline")[0]
    us = {"ms": 1e3, "us": 1.0, "s": 1e6}
    waits = [row[1].split() for name, row in parts.items() if "waits" in name]
    assert len(waits) == 3
    summed_us = sum(float(number) * us[unit] for number, unit in waits)
    assert summed_us == pytest.approx(found.exposed_us, rel=0.01)
    tip = page.get_by_role("button", name=WORST, exact=True)
    tip.focus()
    assert (
        "has the median 0" in page.locator(f"#{tip.get_attribute('aria-describedby')}").inner_text()
    )


def test_a_measured_step_is_compared_in_one_way(view):
    """The same share, with the same sign, in the sentence, the headline and the lanes."""
    plan = PLANS["llama"]
    step = OptimizerStep(OptimizerKind.ADAMW, False, 5e4)
    plan = replace(plan, measured=varying(), estimate=replace(plan.estimate, optimizer=step))
    page = view("varying", plan=plan)
    assert ", 10.0 % more than the " in texts(page, "#answer")[0]
    assert texts(page, "#headline .worse")[0] == "+10.0 %"
    notes = page.locator("#lanes .course").all_text_contents()
    assert any(": +10.0 % against the " in note for note in notes)
    assert not re.search(r"\d x (as fast|faster|slower)", page.locator("body").inner_text())


# -- what should I change ------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_batch_over_the_limit_has_a_sign_and_words(view, on_preset, scheme):
    page = view("over", plan=on_preset, scheme=scheme)
    row = page.locator("#else tbody tr").filter(has_text="twice the batch per rank")
    sign = row.locator(".worse").first
    assert sign.inner_text().startswith("\u25b2")
    plain = page.locator("#headline .value").first.evaluate("e => getComputedStyle(e).color")
    assert sign.evaluate("e => getComputedStyle(e).color") != plain
    peak = row.locator("td").last.inner_text().split()[-2:]
    notes = texts(page, "section[aria-labelledby=h-else] .note")
    over = next(note for note in notes if note.startswith("\u25b2"))
    assert f"takes {' '.join(peak)}, over today's budget of 12.0 GiB" in over
    assert "FSDP2's own schedule would take" in over


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_but_the_table_of_groups_is_wider_than_the_window(view, on_preset, width):
    page = view("over", plan=replace(on_preset, measured=None), width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page = view("varying", plan=replace(PLANS["llama"], measured=varying()), width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for table in ("why", "else", "misses"):
        wrapped = page.locator(f"#{table} tbody td:not(.chart)").evaluate_all(
            "all => all.filter((e) => e.innerText && e.getClientRects()[0].height > 45).length"
        )
        assert wrapped == 0, table
