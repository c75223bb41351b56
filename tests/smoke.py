"""Benchmarks that run in a test: tiny, in this process, with launches that have torch already."""

import sys
from types import ModuleType

import pytest
import warm

from bench import rounds


def smoke(monkeypatch: pytest.MonkeyPatch, module: ModuleType, *args: str) -> None:
    """`python bench/MODULE.py ARGS`, which has to end well."""
    monkeypatch.setattr(rounds, "python", warm.python)
    monkeypatch.setattr(sys, "argv", [module.__name__, *args])
    assert module.main() == 0
