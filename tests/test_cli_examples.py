"""What `--help` shows as examples can be typed."""

import logging
import shlex
import subprocess
import sys

import pytest

from graphshard.cli import _parser, main
from graphshard.cli.examples import EXAMPLES

VERBS = [verb for verb in EXAMPLES if verb]


def arguments(example):
    """What the command gets: what stands behind `graphshard`, or behind `-m graphshard`."""
    words = shlex.split(example)
    return words[words.index("graphshard") + 1 :]


@pytest.mark.parametrize("verb", EXAMPLES)
def test_each_example_parses(verb):
    assert EXAMPLES[verb]
    for example in EXAMPLES[verb]:
        args = _parser().parse_args(arguments(example))
        assert args.verb == verb or verb == ""


@pytest.mark.parametrize("verb", EXAMPLES)
def test_help_shows_them(verb, capsys):
    with pytest.raises(SystemExit):
        main([verb, "--help"] if verb else ["--help"])
    shown = capsys.readouterr().out.split("examples:\n")[1]
    assert [line.strip() for line in shown.splitlines()] == list(EXAMPLES[verb])


def test_a_wrong_example_would_be_found():
    with pytest.raises(SystemExit):
        _parser().parse_args(arguments("graphshard plan demo:llama3_8b --word 64"))


def test_python_runs_the_package():
    done = subprocess.run(
        [sys.executable, "-m", "graphshard", "machines", "--json"],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert '"h100"' in done.stdout


def test_what_concerns_nobody_who_plans_is_not_said(capsys):
    main(["machines"])
    logger = logging.getLogger("torch._higher_order_ops.wrap")
    said = [
        bool(logger.filter(logging.makeLogRecord({"msg": text})))
        for text in (
            "Detected that context_fn is passed to torch.utils.checkpoint",
            "anything else",
        )
    ]
    assert said == [False, True]
