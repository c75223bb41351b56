"""The viewer's pages of four plans, in one picture each: three widths, light and dark.

    python bench/viewer.py [NAME ...]     # of demo, 8b, 70b, moe; all by default

Writes bench/results/viewer/NAME.png, at half size; needs Chromium.

Three plans are made by today's code. The fourth was measured in a run and is a file beside the
pictures, which `torchrun --nproc-per-node 2 bench/viewer_launch.py` writes.
"""

from __future__ import annotations

import base64
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # Python puts bench/ there, whose modules have common names

from bench.figures import Shell  # noqa: E402
from bench.pictures import PLANNED, page_of  # noqa: E402

FOLDER = ROOT / "bench/results/viewer"
MEASURED = FOLDER / "demo.plan.json"
COMMANDS = {
    "8b": PLANNED,
    "70b": "graphshard plan demo:llama3_70b --world 512 --hw h100-ib400",
    "moe": "graphshard plan demo:mixtral_8x7b --world 64 --hw h100-ib400",
}
WIDTHS, SCHEMES = (1440, 1024, 390), ("light", "dark")
FIGURE = '<figure><figcaption>{} px, {}</figcaption><img width="{}" src="{}"></figure>'
STYLE = "<style>body {{ background: gray; font: 14px sans-serif; display: grid; gap: 16px; "
STYLE += "grid-template-columns: {}; align-items: start }} figure {{ margin: 0 }}</style>"


def shot(browser: Any, file: Path, width: int, scheme: str) -> bytes:
    size = {"width": width, "height": 900}
    context = browser.new_context(viewport=size, color_scheme=scheme, offline=True)
    tab = context.new_page()
    tab.goto(file.as_uri())
    png: bytes = tab.screenshot(full_page=True)
    context.close()
    return png


def sheet(browser: Any, page: str, folder: Path) -> bytes:
    """All sizes and schemes of one page."""
    file = folder / "page.html"
    file.write_text(page, encoding="utf-8")
    figures = []
    for scheme in SCHEMES:
        for width in WIDTHS:
            content = base64.b64encode(shot(browser, file, width, scheme)).decode()
            source = f"data:image/png;base64,{content}"
            figures.append(FIGURE.format(width, scheme, width // 2, source))
    columns = " ".join(f"{width // 2}px" for width in WIDTHS)
    file.write_text(STYLE.format(columns) + "".join(figures), encoding="utf-8")
    return shot(browser, file, sum(WIDTHS) // 2 + 64, "light")


def main() -> int:
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as play:
        folder = Path(temporary)
        # The sandbox needs rights that root in a container has not.
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        shell = Shell(folder)
        for name in sys.argv[1:] or ["demo", *COMMANDS]:
            print(name, file=sys.stderr, flush=True)
            path = MEASURED
            if name in COMMANDS:
                path = folder / f"{name}.plan.json"
                shell.run(f"{COMMANDS[name]} -o {path}")
            (FOLDER / f"{name}.png").write_bytes(sheet(browser, page_of(path), folder))
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
