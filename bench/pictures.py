"""The pictures of docs/, and whether they are of today.

In: the plan of PLANNED, made by today's code. Out: PNG files that headless Chromium drew of its
page (SCENES), and SVG files of the numbers in bench/results (DRAWINGS).

Chromium and its fonts differ between machines, so two drawings of one page are not equal. A PNG
therefore carries what it was drawn of, in a text chunk: a digest of the page and of the scene. It
is drawn again if that differs, and only then.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.figures import ROOT, Shell
from graphshard.schedule.plan import Plan
from graphshard.view.html import render

DOCS = ROOT / "docs"
# README.md and docs/viewer.md show this command.
PLANNED = (
    "graphshard plan demo:llama3_8b --world 64 --hw h100-ethernet100 --batch 1 --seq 4096 "
    "--budget 40GiB"
)
PLAN_FILE = "llama3_8b.plan.json"
KEYWORD = b"graphshard page"
SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True, slots=True)
class Scene:
    """keys: pressed when the page is open. is_printed: as on paper, with its margins."""

    width: int
    height: int
    scheme: str = "light"
    keys: tuple[str, ...] = ()
    is_printed: bool = False


WAIT = ("e", "e", "e", "Enter")  # the third of the exposed waits, pinned
SCENES = {
    "viewer-light.png": Scene(1280, 1400, keys=WAIT),
    "viewer-dark.png": Scene(1280, 1400, "dark", keys=WAIT),
    "viewer-narrow.png": Scene(390, 1400),
    "viewer-print.png": Scene(1123, 794, is_printed=True),
}


def digest(page: str, scene: Scene) -> str:
    told = json.dumps(asdict(scene)) + page
    return hashlib.sha256(told.encode()).hexdigest()


def labelled(png: bytes, text: str) -> bytes:
    """With a text chunk right behind its header."""
    data = b"tEXt" + KEYWORD + b"\0" + text.encode("latin-1")
    chunk = struct.pack(">I", len(data) - 4) + data + struct.pack(">I", zlib.crc32(data))
    behind = len(SIGNATURE) + 25  # the header: 13 bytes, and 12 around them
    return png[:behind] + chunk + png[behind:]


def label_of(png: bytes) -> str | None:
    for kind, data in _chunks(png):
        keyword, _, text = data.partition(b"\0")
        if kind == b"tEXt" and keyword == KEYWORD:
            return text.decode("latin-1")
    return None


def _chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    place = len(SIGNATURE)
    while place < len(png):
        (size,) = struct.unpack_from(">I", png, place)
        yield png[place + 4 : place + 8], png[place + 8 : place + 8 + size]
        place += size + 12


def stale(page: str, folder: Path = DOCS) -> list[str]:
    """The pictures that were not drawn of this page, or are not there."""
    found = []
    for name, scene in SCENES.items():
        path = folder / name
        if not path.is_file() or label_of(path.read_bytes()) != digest(page, scene):
            found.append(name)
    return found


def page_of(path: Path) -> str:
    return render(Plan.from_json(path.read_text()))


def draw(page: str, names: list[str], folder: Path) -> None:
    """Raises RuntimeError without Chromium."""
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    if chromium is None:
        raise RuntimeError("no chromium to draw with: apt-get install chromium fonts-dejavu-core")
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as play:
        file = Path(temporary) / "plan.html"
        file.write_text(page, encoding="utf-8")
        # The sandbox needs rights that root in a container has not.
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name in names:
            png = labelled(_drawn(browser, file, SCENES[name]), digest(page, SCENES[name]))
            (folder / name).write_bytes(png)
        browser.close()


def _drawn(browser: Any, file: Path, scene: Scene) -> bytes:
    size = {"width": scene.width, "height": scene.height}
    context = browser.new_context(viewport=size, color_scheme=scene.scheme, offline=True)
    tab = context.new_page()
    tab.goto(file.as_uri())
    if scene.is_printed:
        tab.emulate_media(media="print")
        tab.evaluate("document.body.style.padding = '8mm'")  # the margins of the paper
    for key in scene.keys:
        tab.keyboard.press(key)
    png: bytes = tab.screenshot()
    context.close()
    return png


# -- drawn from results ---------------------------------------------------------------------------


def fronts_svg() -> str:
    from bench.fronts import Cell, Front, picture

    def cells(row: list[Any]) -> list[Cell | None]:
        return [None if cell is None else Cell(**cell) for cell in row]

    return picture(
        [
            Front(
                found["model"],
                found["machine"],
                found["budgets_bytes"],
                {name: cells(row) for name, row in found["rows"].items()},
            )
            for found in _results("fronts.json")["fronts"]
        ]
    )


def memory_svg() -> str:
    from bench.memory import Spot, picture

    found = _results("memory.json")
    return picture([Spot(**spot) for spot in found["spots"]], found["title"])


def _results(name: str) -> Any:
    return json.loads((ROOT / "bench/results" / name).read_text())


DRAWINGS: dict[Path, Callable[[], str]] = {
    DOCS / "fronts.svg": fronts_svg,
    ROOT / "bench/results/memory.svg": memory_svg,
}


def write_pictures(say: Callable[[str], None]) -> None:
    """Those that are of yesterday."""
    for path, drawing in DRAWINGS.items():
        say(str(path.relative_to(ROOT)))
        path.write_text(drawing())
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        say(PLANNED)
        Shell(folder).run(PLANNED)
        page = page_of(folder / PLAN_FILE)
    old = stale(page)
    for name in old:
        say(f"draw docs/{name}")
    if old:
        draw(page, old, DOCS)
