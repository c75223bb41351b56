"""The directive `command-line`: a section per command of `graphshard`, from its argparse parser.

Help texts are plain text, with brackets, stars and columns that mean nothing to a markup: they are
shown as they stand. (sphinx-argparse reads them as reStructuredText.)
"""

import argparse
import os
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from graphshard.cli import _parser

# Of help screens, whatever the terminal of the build.
SCREEN = {"COLUMNS": "100", "NO_COLOR": "1"}


class CommandLine(SphinxDirective):
    """Takes no arguments and has no content."""

    def run(self) -> list[nodes.Node]:
        os.environ.update(SCREEN)
        parser = _parser()
        commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        return [_screen(parser), *(_section(*item) for item in commands.choices.items())]


def _section(name: str, parser: argparse.ArgumentParser) -> nodes.section:
    found = nodes.section(ids=[f"graphshard-{name}"], names=[f"graphshard {name}"])
    found += nodes.title(text=parser.prog)
    found += _screen(parser)
    return found


def _screen(parser: argparse.ArgumentParser) -> nodes.literal_block:
    text = parser.format_help()
    return nodes.literal_block(text, text, language="text")


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("command-line", CommandLine)
    return {"parallel_read_safe": True}
