"""A table of Markdown from results of bench/step.py: steps in ms, a row for each rate of the link.

    python bench/quoted.py RESULTS.json 'FSDP2=blocks_tuned,blocks_tuned_keep' 'graphshard=default'

Each further word is a column: its title, and the modes whose steps stand in its cells. The title of
the column gets the peaks of its modes, from the least to the most of all rates.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def table(rows: list[dict[str, Any]], columns: dict[str, list[str]]) -> str:
    found = {(row["gbit"], row["mode"]): row for row in rows}
    gbits = sorted({row["gbit"] for row in rows})

    def title(name: str, modes: list[str]) -> str:
        peaks = [[found[gbit, mode]["peak_bytes"] for gbit in gbits] for mode in modes]
        return f"{name} at {' / '.join(_span(peak) for peak in peaks)} MB"

    lines = [["link", *(title(name, modes) for name, modes in columns.items())]]
    lines.append(["---"] * len(lines[0]))
    for gbit in gbits:
        cells = (
            " / ".join(f"{found[gbit, mode]['step_us'] / 1e3:.0f}" for mode in modes)
            for modes in columns.values()
        )
        lines.append([f"{gbit:g} gbit", *(f"{cell} ms" for cell in cells)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _span(peaks_bytes: list[int]) -> str:
    low, high = (round(edge(peaks_bytes) / 1e6) for edge in (min, max))
    return f"{low}" if low == high else f"{low} to {high}"


def main() -> int:
    parser = argparse.ArgumentParser(description="A table of Markdown from a result of step.py.")
    parser.add_argument("results", metavar="RESULTS.json", type=Path)
    parser.add_argument("columns", metavar="TITLE=MODE,MODE", nargs="+")
    args = parser.parse_args()
    words = (column.partition("=") for column in args.columns)
    columns = {title: modes.split(",") for title, _, modes in words}
    sys.stdout.write(table(json.loads(args.results.read_text())["rows"], columns))
    return 0


if __name__ == "__main__":
    sys.exit(main())
