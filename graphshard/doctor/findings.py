"""What the doctor says: findings with a code, a reason with numbers and a fix. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """WARNING: works, but slower or larger than it need be. FAULT: wrong, lost, or fails."""

    OK = "ok"
    WARNING = "warning"
    FAULT = "fault"


@dataclass(frozen=True, slots=True)
class Finding:
    """code: has an entry in docs/errors.md. what: one sentence with names and numbers."""

    level: Level
    code: str
    what: str
    fix: str


def fault(code: str, what: str, fix: str) -> Finding:
    return Finding(Level.FAULT, code, what, fix)


def warning(code: str, what: str, fix: str) -> Finding:
    return Finding(Level.WARNING, code, what, fix)


def worst(findings: tuple[Finding, ...]) -> Level:
    levels = [finding.level for finding in findings]
    return next((level for level in (Level.FAULT, Level.WARNING) if level in levels), Level.OK)


def some(names: list[str], most: int = 3) -> str:
    """ "a, b, c and 5 more"."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
