"""The viewer in headless Chromium: offline, by keyboard, by pointer, read aloud, fast, on paper."""

import re
import statistics

import pytest
import viewing
from pictures import VIEWS, llama, planned
from viewing import drawn, needs_browser

from graphshard.view.html import render

GIB = 2**30
# A plan of each shape that the page draws in its own way.
SHAPES = ("llama", "merged", "split", "inference", "one lane", "no costs", "empty", "hostile")

pytestmark = needs_browser
browser, view = viewing.browser, viewing.view


def focused(page):
    """The accessible name of what has the focus."""
    return page.evaluate("document.activeElement.getAttribute('aria-label') ?? ''")


def focus_first(page, view):
    page.evaluate(f"document.querySelector('#{view} .mark').focus()")
    return focused(page)


def times(page):
    """First and last number on the axis, in milliseconds."""
    texts = page.locator("#axis svg text").all_text_contents()
    numbers = [float(t.split()[0]) for t in texts if re.fullmatch(r"[\d.]+ ms", t)]
    return numbers[0], numbers[-1]


def settles_at(page, tail):
    """Waits until the address ends like this: the next frame has been drawn then."""
    from playwright.sync_api import expect

    expect(page).to_have_url(re.compile(rf"\.html{tail}$"))


# -- what is there -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_opens_without_a_network_and_without_a_word(view, name):
    page = view(name)
    assert page.locator("#axis line").count() > 0
    page.mouse.move(700, 500)
    for key in ("e", "p", "0", "+", "-", "Escape"):
        page.keyboard.press(key)


def test_all_views_are_there(view):
    page = view("llama")
    assert page.locator("#headline dt").all_inner_texts()[:3] == [
        "step", "exposed communication", "peak memory",
    ]  # fmt: skip
    for name in VIEWS:
        box = page.locator(f"#{name}").bounding_box()
        assert box["width"] > 1000
        assert box["height"] > 60
        assert page.locator(f"#{name} .mark").count() > 0
    for name in ("why", "waits", "else", "misses"):
        assert page.locator(f"#{name}").is_visible()
    assert page.locator("#groups tr[data-group]").count() == 32
    assert page.locator("#lanes .wait").count() > 10
    assert page.locator("#residency .kept").count() > 10
    assert page.locator("#memory .area").count() == 10
    assert page.locator("#memory line.budget").count() == 1


def test_every_segment_has_a_role_and_a_name(view):
    page = view("llama")
    marks = page.locator(".mark")
    names = marks.evaluate_all("all => all.map((each) => each.getAttribute('aria-label'))")
    assert all(names)
    own = page.locator('#lanes [aria-label^="forward all-gather, layers.13,"]')
    assert own.count() == 1
    assert own.get_attribute("role") == "button"


# -- the keyboard --------------------------------------------------------------------------------


def test_the_arrow_keys_walk_along_and_between_lanes(view):
    page = view("llama")
    first = focus_first(page, "lanes")
    assert first.startswith("compute waits for the all-gather of layers.0, start 0 us")
    walk = []
    for key in ("ArrowRight", "ArrowDown", "ArrowRight", "ArrowUp", "ArrowLeft"):
        page.keyboard.press(key)
        walk.append(focused(page).partition(", start")[0].partition(", bytes")[0])
    assert walk[0].startswith("forward compute, layers.0")
    assert walk[1] == "forward all-gather, layers.1"
    assert walk[2] == "forward all-gather, layers.2"
    assert walk[3].startswith("forward compute, layers.1")
    assert walk[4].startswith("compute waits for the all-gather of layers.1")
    courses = []
    for _ in range(9):
        page.keyboard.press("ArrowDown")
        courses.append(focused(page).partition(":")[0])
    assert courses[2:8] == ["FSDP2, predicted"] * 3 + ["graphshard, measured"] * 3
    assert courses[8].startswith("layers.0, gathered")
    assert page.locator("#card").is_visible()


def test_tab_reaches_each_view_once(view):
    page = view("llama")
    stops = page.locator('.mark[tabindex="0"]')
    views = stops.evaluate_all("all => all.map((each) => each.closest('main svg[id]').id)")
    assert views == list(VIEWS)
    page.keyboard.press("p")
    assert page.locator('.mark[tabindex="0"]').count() == 3


def test_e_goes_to_the_next_exposed_wait_and_p_to_the_peak(view):
    page = view("llama")
    waits = []
    for _ in range(3):
        page.keyboard.press("e")
        waits.append(focused(page))
    assert len(dict.fromkeys(waits)) == 3
    assert all(text.startswith("compute waits for the all-gather of layers.") for text in waits)
    page.keyboard.press("p")
    assert focused(page).startswith("peak 35.4 GiB, at ")
    rows = page.locator("#card dt").all_text_contents()
    categories = [row.partition(",")[0] for row in rows[1:]]
    assert categories[0] == "Activation"
    assert {"OptState", "Sharded Param", "Unsharded Param"} <= set(categories)


def test_zoom_keys_and_back(view):
    page = view("llama")
    before = times(page)
    page.keyboard.press("+")
    page.keyboard.press("+")
    settles_at(page, r"#z=.*")
    after = times(page)
    assert after[1] - after[0] < before[1] - before[0]
    page.keyboard.press("0")
    settles_at(page, "#?")
    assert times(page) == before


def test_focus_brings_a_segment_into_the_picture(view):
    page = view("llama", tail="#z=0,20000")
    page.keyboard.press("p")
    page.keyboard.press("ArrowUp")
    plot = page.locator("#residency .ground").bounding_box()
    mark = page.locator(":focus").bounding_box()
    assert plot["x"] - 25 <= mark["x"] <= plot["x"] + plot["width"]


# -- the pointer ---------------------------------------------------------------------------------


def test_hover_shows_a_card_and_a_click_pins_it(view):
    page = view("llama")
    page.locator("#lanes .gather").nth(4).hover()
    card = page.locator("#card")
    text = card.inner_text()
    assert text.startswith("forward all-gather, layers.4")
    for word in ("bytes", "dtype", "start", "duration", "exposed", "received at", "memory then"):
        assert f"{word}\n" in text
    page.locator("#lanes .gather").nth(4).click()
    page.mouse.move(5, 5)
    assert card.inner_text() == text
    assert page.locator('[aria-pressed="true"]').count() == 1
    page.keyboard.press("Escape")
    assert not card.is_visible()


def test_a_pin_and_the_zoom_survive_a_reload(view):
    page = view("llama")
    page.locator("#lanes .gather").nth(4).click()
    page.keyboard.press("+")
    page.fill("#filter", "layers.1")
    settles_at(page, "#z=.*&s=lanes.1.4&f=layers.1")
    before = times(page), page.locator("#card").inner_text(), page.evaluate("location.hash")
    page.reload()
    after = times(page), page.locator("#card").inner_text(), page.evaluate("location.hash")
    assert after == before
    assert page.locator("#found").inner_text() == "11 of 32"


def test_the_wheel_zooms_around_the_pointer_and_dragging_with_shift_pans(view):
    page = view("llama")
    box = page.locator("#lanes .ground").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 10)
    page.mouse.wheel(0, -400)
    settles_at(page, r"#z=.*")
    first = times(page)
    assert 0 < first[0] < 360 < first[1] < 740
    assert (first[0] + first[1]) / 2 == pytest.approx(372, abs=30)
    page.keyboard.down("Shift")
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2 - 200, box["y"] + 10, steps=5)
    page.mouse.up()
    page.keyboard.up("Shift")
    drawn(page)
    second = times(page)
    assert second[0] > first[0]
    assert page.locator('[aria-pressed="true"]').count() == 0


def test_one_cursor_for_all_pictures(view):
    page = view("llama")
    box = page.locator("#residency .ground").bounding_box()
    page.mouse.move(box["x"] + 300, box["y"] + 40)
    places = page.locator("main .cursor").evaluate_all(
        "all => all.map((each) => each.x1.baseVal.value)"
    )
    assert len(places) == 3
    assert max(places) - min(places) == 0
    assert places[0] == pytest.approx(300, abs=1)
    assert "GiB (Activation" in page.locator("#readout").inner_text()


# -- the table -----------------------------------------------------------------------------------


def test_the_table_sorts_and_filters(view):
    page = view("llama", tail="#o=0")
    names = page.locator("#groups tr[data-group]:visible th")
    page.get_by_role("button", name="gathered for").click()
    assert page.locator("thead th[aria-sort=descending]").inner_text().startswith("gathered for")
    values = page.locator("#groups tr[data-group]:visible td:nth-child(7)").all_text_contents()
    sizes = [float(text.split()[0]) for text in values]
    assert sizes == sorted(sizes, reverse=True)
    page.get_by_role("button", name="group", exact=True).click()
    assert names.all_text_contents()[9:11] == ["layers.9", "layers.10"]
    page.keyboard.press("/")
    page.keyboard.type("layers.3")
    assert names.all_text_contents() == ["layers.3", "layers.30", "layers.31"]
    groups = page.locator("#residency .mark:not(.out)").evaluate_all(
        "all => all.map((each) => each.getAttribute('aria-label').split(',')[0])"
    )
    assert list(dict.fromkeys(groups)) == ["layers.3", "layers.30", "layers.31"]
    page.keyboard.press("Escape")
    assert names.count() == 32
    assert page.locator("#groups tr[data-bunch]:visible").count() == 1


def test_what_is_of_the_same_groups_is_marked(view):
    page = view("merged")
    shared = page.locator("#lanes .gather").first
    shared.hover()
    assert shared.get_attribute("aria-label").startswith("forward all-gather, layers.0 + layers.1")
    lines = page.locator("tr.same th").all_text_contents()
    assert lines == ["layers.0", "layers.1"]
    assert page.locator("#residency .same").count() >= 2


def test_a_group_of_the_table_leads_to_its_bar(view):
    page = view("llama")
    page.locator("#groups tr[data-bunch] button").first.click()
    page.locator("#groups tr[data-group] button").nth(7).click()
    assert focused(page).startswith("layers.7, gathered")
    assert page.locator("#card").is_visible()


# -- for everybody -------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("name", "width"), [("llama", 1280), ("llama", 390), ("no costs", 1280)])
def test_axe_finds_no_serious_fault(view, scheme, name, width):
    from axe_playwright_python.sync_playwright import Axe

    page = view(name, width=width, scheme=scheme)
    page.keyboard.press("p")
    found = Axe().run(page).response["violations"]
    serious = [v for v in found if v["impact"] in ("serious", "critical")]
    assert serious == [], [(v["id"], v["nodes"][0]["html"][:200]) for v in serious]


def test_no_text_is_smaller_than_12_pixels(view):
    page = view("llama")
    small = page.evaluate(
        """[...document.querySelectorAll("body *")]
        .filter((each) => each.checkVisibility() && each.textContent.trim())
        .filter((each) => parseFloat(getComputedStyle(each).fontSize) < 12)
        .map((each) => each.outerHTML)"""
    )
    assert small == []


def test_a_narrow_window_scrolls_the_table_only(view):
    page = view("llama", width=390, height=800)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.locator("#lanes .ground").bounding_box()["width"] > 240


def test_prints_on_a4_landscape(view):
    page = view("llama")
    page.evaluate(
        """window.addEventListener("beforeprint", () => {
        document.title = document.getElementById("lanes").getAttribute("viewBox"); })"""
    )
    pdf = page.pdf(prefer_css_page_size=True, print_background=True)
    boxes = re.findall(rb"/MediaBox \[0 0 ([\d.]+) ([\d.]+)\]", pdf)
    assert 2 <= len(boxes) <= 5
    assert page.title().startswith("0 0 1060 ")
    for width, height in boxes:
        assert float(width) == pytest.approx(842, abs=1.5)
        assert float(height) == pytest.approx(595, abs=1.5)


# -- large ---------------------------------------------------------------------------------------


def test_130_groups_open_in_a_second(browser, tmp_path):
    """From the navigation to the first frame after everything is drawn; median of three."""
    path = tmp_path / "large.html"
    plan = planned(llama(130, budget_bytes=150 * GIB), "130 groups")
    path.write_text(render(plan), encoding="utf-8")
    assert path.stat().st_size < 1.5e6
    took_ms, marks = [], 0
    for _ in range(3):
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(path.as_uri())
        took_ms.append(
            page.evaluate(
                """new Promise((done) => requestAnimationFrame(() =>
                requestAnimationFrame(() => done(performance.now()))))"""
            )
        )
        marks = page.locator(".mark").count()
        page.close()
    assert marks > 1500
    print(f"{marks} segments, {path.stat().st_size:,} bytes, {took_ms} ms")
    assert statistics.median(took_ms) < 1000
