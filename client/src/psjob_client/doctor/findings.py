"""One line of the doctor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """What was looked at, the figure, the limit, and what to do."""

    level: Level
    about: str
    """Such as `/dev/shm`."""
    figure: str
    limit: str = ""
    """What it should be; empty where there is no number to it."""
    remedy: str = ""
    """Empty where it is ok."""


def ok(about: str, figure: str, limit: str = "") -> Finding:
    """Nothing to do."""
    return Finding("ok", about, figure, limit)


def warning(about: str, figure: str, limit: str, remedy: str) -> Finding:
    """A job may suffer from it."""
    return Finding("warning", about, figure, limit, remedy)


def problem(about: str, figure: str, limit: str, remedy: str) -> Finding:
    """A job fails or waits for it."""
    return Finding("problem", about, figure, limit, remedy)


def sick(findings: Iterable[Finding]) -> bool:
    """Is there a problem?"""
    return any(finding.level == "problem" for finding in findings)
