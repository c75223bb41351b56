"""What README.md claims in numbers, from the results in bench/results, as items of a list.

python bench/claims.py
"""

from __future__ import annotations

import json
import textwrap
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
KEPT = ("", "_half", "_keep")  # what the script keeps gathered: none, half or all of its blocks


def emulated() -> str:
    """Raises ValueError where a plan takes more memory than what it is compared with."""
    rows = {(row["gbit"], row["mode"]): row for row in _rows("step_default.json")}
    gbits = sorted({gbit for gbit, _ in rows})
    pairs = [
        (rows[gbit, f"blocks_tuned{kept}"], rows[gbit, f"default{kept}"])
        for gbit in gbits
        for kept in KEPT
    ]
    if any(ours["peak_bytes"] >= theirs["peak_bytes"] for theirs, ours in pairs):
        raise ValueError("a plan takes more memory than FSDP2 with the same setting")
    gain = exp(fmean(log(theirs["step_us"] / ours["step_us"]) for theirs, ours in pairs))
    return (
        f"Without any option {gain:.2f} times as fast as FSDP2 tuned by hand with the same setting "
        f"(mean of {len(pairs)}), in less memory each time, on 8 emulated ranks."
    )


def published() -> str:
    rows = [row for row in _rows("published.json") if row["split"] == "held_out"]
    errors = [abs(row["predicted"]["tokens_per_s"] / row["tokens_per_s"] - 1) for row in rows]
    return (
        f"Of {len(rows)} published steps to which nothing was fitted, tokens per second are off by "
        f"{100 * fmean(errors):.1f} % in the mean."
    )


def _rows(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((RESULTS / name).read_text())["rows"]
    return rows


if __name__ == "__main__":
    for head, claim, link in (
        ("Faster on an emulated network.", emulated(), "[measurements](docs/measure.md)"),
        (
            "Predictions are predictions.",
            published(),
            "[all rows](docs/cost-model.md#against-published-figures)",
        ),
    ):
        print(textwrap.fill(f"- **{head}** {claim} ({link})", 118, subsequent_indent="  "))
