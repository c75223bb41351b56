"""Opens pages of plans in headless Chromium: fixtures for the files that test the viewer."""

import shutil

import pytest
from pictures import every_plan

from graphshard.view.html import render

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
PLANS = every_plan()
needs_browser = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium"),
]


def drawn(page):
    """Waits until what was asked for last has been drawn: the page draws in the next frame."""
    page.evaluate("new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))")


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        # The sandbox needs rights that root in a container has not.
        found = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def view(browser, tmp_path):
    """`view("llama")` opens the page of a plan, without a network; afterwards it has to have been
    silent and to have loaded nothing but itself. plan: this one, instead of that of the name."""
    contexts, said, loaded = [], [], []

    def opened(name, width=1280, height=900, scheme="light", tail="", plan=None):
        path = tmp_path / f"{name.replace(' ', '_')}.html"
        path.write_text(render(plan or PLANS[name]), encoding="utf-8")
        size = {"width": width, "height": height}
        context = browser.new_context(viewport=size, color_scheme=scheme, offline=True)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: loaded.append(request.url))
        page.goto(f"{path.as_uri()}{tail}")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert said == []
    assert all(url.startswith(f"file://{tmp_path}") for url in loaded), loaded
