"""The pages of docs/howto that are about frameworks: their code runs, with the real frameworks, and
prints what they show."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from howto import ROOT, Page, follow, page_of

from bench.figures import compare

PAGES = [page_of(p) for p in sorted((ROOT / "docs/howto").glob("*.md")) if p.stem != "index"]
ON_CPU = Path(__file__).parent / "on_cpu.py"


@pytest.mark.parametrize("page", [p for p in PAGES if p.needs], ids=lambda page: page.path.stem)
def test_page(page: Page, tmp_path: Path) -> None:
    assert [name for name in page.needs if find_spec(name) is None] == []
    compare(page.path, follow(page, tmp_path, runner=f"{ON_CPU} "))
