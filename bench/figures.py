"""Writes what pages quote - screens, tables, pictures - from the code and the results of today.

    python bench/figures.py [--recorded] [PAGE ...]      # what `make docs-figures` runs

A figure stands between two comments. The first one names the command, a line of a shell, whose
output is the figure:

    <!-- figure: graphshard plan demo:llama3_8b --world 64 --hw h100-ib400 -->
    ...
    <!-- end -->

The commands of a page run one after the other in one empty folder, so that one may read what
another wrote. A block keeps its fence; without one the output is Markdown. What a clock said of the
command itself is left out (`without_clocks`). Afterwards all figures are those of today, and the
pictures in docs/ (bench/pictures.py) too: a second run changes nothing. tests/test_figures.py fails
where a page or a picture is of yesterday.

`<!-- recorded: COMMAND -->` is what was measured, or what a search found that ends by the clock:
another run says something else, so it is written with --recorded alone. `<!-- tested: COMMAND -->`
is a table of what tests found: with GRAPHSHARD_WRITE_FIGURES=1 they write it (`compare`).
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # Python puts bench/ there, whose modules have common names
BLOCK = re.compile(r"<!-- (figure|recorded|tested): (.+?) -->\n(.*?)<!-- end -->", re.DOTALL)
FENCE = re.compile(r"(```\w*\n)(.*?)(```\n)", re.DOTALL)
# The column of seconds of the stages of `graphshard plan`, and the line of `tune` that has them.
STAGE = re.compile(r"(capture|passes|plan) ")
SECONDS = re.compile(r" \d+\.\d s(?=  |$)")
TOTAL = re.compile(r"\d+ s in all")
# The commands of a page, in an environment where graphshard is installed.
COMMANDS = {
    "graphshard": "-m graphshard",
    "torchrun": "-m torch.distributed.run --standalone",
    "python": "",
}


@dataclass(frozen=True, slots=True)
class Figure:
    """body: what stands in the page."""

    kind: str  # "figure", "recorded" or "tested"
    command: str
    body: str


def figures_of(page: str) -> list[Figure]:
    return [Figure(m[1], m[2], m[3]) for m in BLOCK.finditer(page)]


def quoted(figure: Figure, output: str) -> str:
    """The body that the command's output makes."""
    output = without_clocks(output)
    fence = FENCE.fullmatch(figure.body)
    return f"{fence[1]}{output.rstrip()}\n{fence[3]}" if fence else output


def without_clocks(output: str) -> str:
    """Seconds of stages are blank, and the line with their sum is not there."""
    lines = []
    for line in output.splitlines():
        if STAGE.match(line):
            line = SECONDS.sub(lambda match: " " * len(match[0]), line).rstrip()
        if not TOTAL.fullmatch(line):
            lines.append(f"{line}\n")
    return "".join(lines)


def filled(page: str, bodies: Mapping[str, str]) -> str:
    """The page with these bodies, by command."""

    def one(match: re.Match[str]) -> str:
        body = bodies.get(match[2], match[3])
        return f"<!-- {match[1]}: {match[2]} -->\n{body}<!-- end -->"

    return BLOCK.sub(one, page)


def compare(path: Path, page: str) -> None:
    """What a test made is what stands in the file; written there if the environment says so."""
    if os.environ.get("GRAPHSHARD_WRITE_FIGURES"):
        path.write_text(page)
    assert path.read_text() == page, f"{path.name} is of yesterday: GRAPHSHARD_WRITE_FIGURES=1"


class Shell:
    """Runs commands in a folder that looks like a checkout in which graphshard is installed."""

    def __init__(self, folder: Path, limit_s: float = 1200.0) -> None:
        self.folder, self.limit_s = folder, limit_s
        tools = folder / ".tools"
        tools.mkdir(parents=True)
        for name, command in COMMANDS.items():
            (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {command} "$@"\n')
            (tools / name).chmod(0o755)
        for name in ("bench", "examples"):
            (folder / name).symlink_to(ROOT / name)
        kept = {k: v for k, v in os.environ.items() if not k.startswith("GRAPHSHARD_")}
        self.environment = {
            **kept,
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "GRAPHSHARD_CACHE_DIR": str(folder / ".cache"),
        }

    def run(self, command: str) -> str:
        """What it prints to stdout. Raises CalledProcessError, with stderr."""
        done = subprocess.run(
            command, shell=True, cwd=self.folder, env=self.environment, capture_output=True,
            text=True, timeout=self.limit_s, check=False,
        )  # fmt: skip
        if done.returncode:
            raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
        return done.stdout


def bodies_of(
    page: str, shell: Shell, recorded: bool, say: Callable[[str], None]
) -> dict[str, str]:
    """What the figures of a page are today."""
    found: dict[str, str] = {}
    for figure in figures_of(page):
        if figure.kind == "figure" or (recorded and figure.kind == "recorded"):
            say(figure.command)
            found[figure.command] = quoted(figure, shell.run(figure.command))
    return found


def pages() -> list[Path]:
    """All that have a figure."""
    every = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path for path in every if BLOCK.search(path.read_text())]


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the figures of README.md and docs/ anew.")
    parser.add_argument("pages", metavar="PAGE", nargs="*", type=Path, help="default: all")
    parser.add_argument(
        "--recorded", action="store_true", help="run again what depends on the clock, too"
    )
    args = parser.parse_args()

    def say(text: str) -> None:
        print(f"  {text}", file=sys.stderr, flush=True)

    for path in args.pages or pages():
        before = path.read_text()
        print(path.resolve().relative_to(ROOT), file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            try:
                after = filled(before, bodies_of(before, Shell(Path(folder)), args.recorded, say))
            except subprocess.CalledProcessError as error:
                print(f"error: {error}\n{error.stderr}", file=sys.stderr)
                return 1
        if after != before:
            path.write_text(after)
            print("  changed", file=sys.stderr, flush=True)
    if not args.pages:
        from bench.pictures import write_pictures

        write_pictures(say)
    return 0


if __name__ == "__main__":
    sys.exit(main())
