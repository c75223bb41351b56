"""The files in `assets`, and templates made of them."""

from __future__ import annotations

from functools import cache
from importlib import resources

from jinja2 import Environment, StrictUndefined, Template


@cache
def asset(name: str) -> str:
    return (resources.files("graphshard.view") / "assets" / name).read_text(encoding="utf-8")


def template(name: str) -> Template:
    """What it is filled with is data, never markup; what is left out is an error."""
    env = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return env.from_string(asset(name))
