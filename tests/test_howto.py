"""The pages of docs/howto, and the first one: their code runs, and prints what they show.

Those of frameworks run where these are installed: `tests/integrations/test_howto.py`.
"""

import re
from pathlib import Path

import pytest
from howto import ROOT, follow, headings, page_of

from bench.figures import compare

PAGES = [page_of(p) for p in sorted((ROOT / "docs/howto").glob("*.md")) if p.stem != "index"]
FIRST = page_of(ROOT / "docs/start/first-plan.md")
HERE = [FIRST, *(page for page in PAGES if not page.needs)]


@pytest.mark.dist
@pytest.mark.parametrize("page", HERE, ids=lambda page: page.path.stem)
def test_page(page, tmp_path):
    compare(page.path, follow(page, tmp_path))


def test_no_page_is_left_out():
    index = (ROOT / "docs/howto/index.md").read_text().split()
    assert [page.path.stem for page in PAGES if page.path.stem not in index] == []
    assert all(page.blocks for page in PAGES)


@pytest.mark.parametrize("page", [FIRST, *PAGES], ids=lambda page: page.path.stem)
def test_every_file_of_a_page_is_used(page):
    """What is typed after it names it, or a job of Slurm does."""
    for index, block in enumerate(page.blocks):
        if block.file is not None:
            typed = [later.text for later in page.blocks[index:] if later.kind == "shell"]
            jobs = [b.text for b in page.blocks if b.file and "srun" in b.text]
            used = "graphshard" if block.file == "graphshard.toml" else Path(block.file).stem
            assert any(re.search(rf"\b{used}\b", text) for text in [*typed, *jobs]), block.file


PAGE = """<!-- run: 1 rank -->
```python
print("steps", 3)
```

It prints{how}:

```text
{shown}
```

```shell
{typed}
```
"""


def written(folder: Path, how: str, shown: str, typed: str) -> Path:
    path = folder / "page.md"
    path.write_text(PAGE.format(how=how, shown=shown, typed=typed))
    (folder / "empty").mkdir()
    return path


@pytest.mark.dist
@pytest.mark.parametrize(
    ("how", "shown", "typed"),
    [("", "steps 3", "true"), ("", "steps 4", "true"), (", shortened", "steps 4", "true")],
)
def test_a_page_gets_the_screens_of_today(tmp_path, how, shown, typed):
    path = written(tmp_path, how, shown, typed)
    expected = PAGE.format(how=how, shown=shown if how else "steps 3", typed=typed)
    assert follow(page_of(path), tmp_path / "empty") == expected


@pytest.mark.dist
@pytest.mark.parametrize(
    ("shown", "typed", "fault"),
    [
        ("stops 3", "true", "line 9, printed was:\nsteps 3"),
        ("steps 3", "false", "line 13: false"),
    ],
)
def test_a_page_that_is_wrong_is_found(tmp_path, shown, typed, fault):
    path = written(tmp_path, ", shortened", shown, typed)
    with pytest.raises(AssertionError, match=fault):
        follow(page_of(path), tmp_path / "empty")


def test_a_block_that_nothing_runs_is_found(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("<!-- run: 1 rank -->\n```json\n{}\n```\n")
    (folder := tmp_path / "folder").mkdir()
    with pytest.raises(AssertionError, match="nothing runs 'json'"):
        follow(page_of(path), folder)


def test_numbers_may_differ():
    assert headings("peak 3.5 GiB  of 4\n  more") == headings("peak 2 GiB  of 5") == ["peak #"]
