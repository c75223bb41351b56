"""Argument lists of the command line, from seeds: each ends with a status and says why.

GRAPHSHARD_ARGUMENTS=2000 pytest -s tests/test_odd_arguments.py is the acceptance run.
"""

import json
import os
import random
import re
import sys
import time
import traceback

import pytest
from forecasts import planned
from planning import layers
from plans import two_layers
from profiles import PROFILE
from traces import trace_of

from graphshard.cli import main

ARGUMENTS = int(os.environ.get("GRAPHSHARD_ARGUMENTS", "100"))
FIRST = int(os.environ.get("GRAPHSHARD_FIRST_SEED", "0"))
LIMIT_S = 30
SAID = re.compile(r"^(usage: graphshard|graphshard: error: GS\d{3,4}: )", re.MULTILINE)

MODELS = """
def empty():
    return None

def fails(batch=1):
    raise ValueError("no model")

def exits(seq=1):
    raise SystemExit(3)
"""

FILES = ("plan", "costs", "profile.json", "trace", "models.py", "missing", "folder", "notes.txt")
WORDS = (
    "", " ", "-", "--", "-x", "--json", "0", "1", "8", "-1", "8,16", "8,,16", ",", "1e9", "9" * 20,
    "9" * 400, "9" * 5000, "nan", "inf", "0.5", "\u0663", "\u00b2", "1KiB", "70GiB", "1 TB",
    "auto", "fsdp2",
    "layers.0", "h100", "h100-ib400", "cpu", "-ib400", "H100-", "\x1b[31m", "[red]", "\ud800",
    "a\0b", "n" * 5000, "/dev/null", "/dev/zero", "/dev/full", "/proc/self/mem", "models.py:",
    ":empty", "models.py:empty", "models.py:fails", "models.py:exits", "models.py:__doc__",
    "models.py:none:empty", "x.py:f", "notes.txt:f", "*", "~", "%s", "{}", "@plan", "\n", "--world",
)  # fmt: skip
OPTIONS = {
    "show": ("--why", "--group", "--json"),
    "view": ("-o", "--measured", "--perfetto", "--merge", "--json"),
    "diff": ("--measured", "--json"),
    "plan": ("--world", "--hw", "--budget", "--batch", "--seq", "--per-node", "--reshard",
             "--micro-steps", "--compute", "-o", "--json"),
    "calibrate": ("-o", "--sizes", "--repetitions", "--json"),
    "doctor": ("--steps", "--limit-s", "--no-aot-eager", "--json"),
}  # fmt: skip
FLAGS = ("--why", "--json", "--no-aot-eager")


def drawn(draw):
    """A verb, mostly with what it needs, and some of its options with any word."""
    if draw.random() < 0.05:
        return [draw.choice(WORDS) for _ in range(draw.randrange(4))]
    verb = draw.choice(
        ("show", "view", "view", "diff", "diff", "plan", "plan", "calibrate", "doctor")
    )
    argv = [verb]
    for _ in range(draw.choice((0, 1, 1, 2, 3))):
        option = draw.choice(OPTIONS[verb])
        argv += [option] if option in FLAGS else [option, word(draw)]
    if verb == "plan" and draw.random() < 0.9:
        argv += [
            "--world",
            draw.choice(("2", word(draw))),
            "--hw",
            draw.choice(("h100", word(draw))),
        ]
    for _ in range({"show": 1, "view": 1, "diff": 2, "plan": 1}.get(verb, 0)):
        argv.insert(draw.randrange(1, len(argv) + 1), word(draw))
    if verb == "doctor":
        argv += ["--", draw.choice(("no-such-program", "/dev/null", "a\0b", ""))]
    return argv


def word(draw):
    return draw.choice(FILES) if draw.random() < 0.6 else draw.choice(WORDS)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    made = planned(layers(3, activations=100))
    (tmp_path / "plan").write_text(two_layers().to_json())
    (tmp_path / "costs").write_text(made.to_json())
    (tmp_path / "profile.json").write_text(PROFILE.to_json())
    (tmp_path / "trace").write_text(json.dumps(trace_of(made)))
    (tmp_path / "models.py").write_text(MODELS)
    (tmp_path / "notes.txt").write_text("notes")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def outcome(argv):
    """The exit status. argparse ends the process itself, with 2 for what it cannot read."""
    try:
        return main(argv)
    except SystemExit as done:
        return done.code if done.code in (0, 2) else f"SystemExit {done.code}"


def test_argument_lists(folder, capsys):
    kept = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    found = []
    for seed in range(FIRST, FIRST + ARGUMENTS):
        argv = drawn(random.Random(f"arguments {seed}"))
        start = time.monotonic()
        try:
            status = outcome(argv)
        except Exception:
            status = "".join(traceback.format_exc().splitlines(True)[-7:])
        out, err = capsys.readouterr()
        spent_s = time.monotonic() - start
        is_told = status == 0 or (
            status in (1, 2, 3, 4) and (SAID.search(err) or argv[0] == "doctor")
        )
        if not is_told or spent_s > LIMIT_S or "\x1b" in out + err:
            found.append(f"seed {seed}, {argv!r:.300}: {status}, {spent_s:.0f} s, {err!r:.300}")
        for name, content in kept.items():
            (folder / name).write_bytes(content)  # an output may be named like an input
    print(f"{ARGUMENTS} argument lists, {len(found)} without an answer")
    assert not found, "\n".join(found)
