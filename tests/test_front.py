"""Pictures of time against memory: what is drawn where, and that words are data."""

import re
import xml.etree.ElementTree as ET

import pytest

from graphshard.view.front import HEIGHT, LEFT, WIDTH, Panel, Series, Spot, front_svg

GIB = 2**30
PLAN = Series("plan", (Spot(80 * GIB, 1.7e6), Spot(40 * GIB, 2.0e6), Spot(60 * GIB, 1.8e6)))
BY_HAND = Series("by hand", (Spot(70 * GIB, 1.9e6),))
SVG = "{http://www.w3.org/2000/svg}"


def drawn(*panels, columns=1):
    return ET.fromstring(front_svg(panels, columns))


def places(root):
    """Of the marks in a picture's first panel, series by series, the legend's left out."""
    circles = root.find(f"{SVG}g").iter(f"{SVG}circle")
    return [(float(c.get("cx")), float(c.get("cy")), c.get("fill")) for c in circles]


def test_less_memory_is_left_and_less_time_is_low():
    marks = [mark for mark in places(drawn(Panel("net", (PLAN, BY_HAND)))) if mark[0] > LEFT + 10]
    by_hand, plan = marks[:1], marks[1:]  # the first series is on top
    assert [x for x, _, _ in plan] == sorted(x for x, _, _ in plan)
    assert [y for _, y, _ in plan] == sorted(y for _, y, _ in plan)
    assert plan[1][0] < by_hand[0][0] < plan[2][0]
    assert plan[0][1] < by_hand[0][1] < plan[1][1]
    assert len({colour for *_, colour in (*plan, *by_hand)}) == 2


def test_a_line_joins_the_spots_of_a_series_and_a_single_one_is_a_mark():
    root = drawn(Panel("net", (PLAN, BY_HAND)))
    (line,) = root.iter(f"{SVG}polyline")
    assert len(line.get("points").split()) == 3


def test_axes_have_round_numbers_in_units():
    text = [t.text for t in drawn(Panel("net", (PLAN,))).iter(f"{SVG}text")]
    assert {"40 GiB", "60 GiB", "80 GiB", "1.7 s", "2 s"} <= set(text)
    small = Panel("net", (Series("plan", (Spot(3 * 2**20, 1300.0), Spot(5 * 2**20, 1900.0))),))
    text = [t.text for t in drawn(small).iter(f"{SVG}text")]
    assert any(re.fullmatch(r"[\d.]+ MiB", t) for t in text)
    assert any(re.fullmatch(r"[\d.]+ ms", t) for t in text)


def test_panels_stand_in_columns():
    panels = [Panel(f"net {n}", (PLAN, BY_HAND)) for n in range(3)]
    root = drawn(*panels, columns=2)
    moved = [group.get("transform") for group in root.findall(f"{SVG}g")]
    height = HEIGHT + 2 * 16
    assert moved == ["translate(0,0)", f"translate({WIDTH},0)", f"translate(0,{height})"]
    assert root.get("viewBox") == f"0 0 {2 * WIDTH} {2 * height}"


def test_one_spot_alone_is_drawn():
    assert places(drawn(Panel("net", (BY_HAND,))))


def test_names_are_data():
    text = front_svg([Panel("<b>&", (Series('"><script>', BY_HAND.spots),))])
    assert "<script" not in text
    assert ET.fromstring(text) is not None


def test_nothing_to_draw_is_an_error():
    with pytest.raises(ValueError, match="net: nothing to draw"):
        front_svg([Panel("net", (Series("plan", ()),))])
