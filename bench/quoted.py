"""A table of Markdown from results of bench/step.py: medians of steps, in ms.

    python bench/quoted.py bench/results/step_default.json --column graphshard=default,default_keep
    python bench/quoted.py '4 ranks=four.json' '16 ranks=sixteen.json' --column FSDP2=blocks_tuned

One file: a row for each rate of the link, and the peaks of each mode in the title of its column,
from the least to the most of all rates. Several, named, with one rate each: a row for each file; a
mode that it lacks has no number. A column is a title and the modes whose steps stand in its cells.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Columns = Mapping[str, Sequence[str]]
Rows = Sequence[Mapping[str, Any]]


def of_rates(rows: Rows, columns: Columns) -> str:
    gbits = sorted({row["gbit"] for row in rows})
    titles = [f"{title} at {_peaks(rows, modes)} MB" for title, modes in columns.items()]
    lines = {f"{gbit:g} gbit": [row for row in rows if row["gbit"] == gbit] for gbit in gbits}
    return _table(["link", *titles], lines, columns)


def of_files(files: Mapping[str, Rows], columns: Columns) -> str:
    return _table(["", *columns], files, columns)


def _table(titles: Sequence[str], lines: Mapping[str, Rows], columns: Columns) -> str:
    table = [titles, ["---"] * len(titles)]
    table += [
        [name, *(_cell(rows, modes) for modes in columns.values())] for name, rows in lines.items()
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in table)


def _cell(rows: Rows, modes: Sequence[str]) -> str:
    steps = {row["mode"]: f"{row['step_us'] / 1e3:.0f}" for row in rows}
    found = [steps[mode] for mode in modes if mode in steps]
    return f"{' / '.join(found)} ms" if found else ""


def _peaks(rows: Rows, modes: Sequence[str]) -> str:
    peaks = [[row["peak_bytes"] for row in rows if row["mode"] == mode] for mode in modes]
    edges = ((f"{min(peak) / 1e6:.0f}", f"{max(peak) / 1e6:.0f}") for peak in peaks)
    return " / ".join(" to ".join(dict.fromkeys(pair)) for pair in edges)


def main() -> int:
    parser = argparse.ArgumentParser(description="A table of Markdown from results of step.py.")
    parser.add_argument("results", metavar="[TITLE=]FILE", nargs="+")
    parser.add_argument("--column", metavar="TITLE=MODE,...", action="append", required=True)
    args = parser.parse_args()
    columns = {title: modes.split(",") for title, _, modes in _pairs(args.column)}
    named = {title: _rows(path) for title, _, path in _pairs(args.results) if path}
    text = of_files(named, columns) if named else of_rates(_rows(args.results[0]), columns)
    sys.stdout.write(text)
    return 0


def _pairs(words: Sequence[str]) -> list[tuple[str, str, str]]:
    return [word.partition("=") for word in words]


def _rows(path: str) -> Rows:
    rows: Rows = json.loads(Path(path).read_text())["rows"]
    return rows


if __name__ == "__main__":
    sys.exit(main())
