"""How many files of psjob a real run goes through on its three roads, and what docs/contributing/walk.md says of it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WALK = ROOT / "docs" / "contributing" / "walk.md"


@dataclass(frozen=True)
class Entry:
    """A process entered a function."""

    nanoseconds: int
    pid: int
    file: str
    function: str


def traced(trace: Path) -> dict[str, str]:
    """The environment of a process that is traced, with all that it starts."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parent / "roadtrace"), "PSJOBTRACE": str(trace)}


def entries(trace: Path) -> list[Entry]:
    """What was entered, in the order of time."""
    rows = [line.split() for line in trace.read_text().splitlines()]
    return sorted((Entry(int(at), int(pid), file, function) for at, pid, _, file, function in rows), key=lambda entry: entry.nanoseconds)


def files(trace: list[Entry], window: tuple[int, int]) -> set[str]:
    """The files that were entered between these two times."""
    return {entry.file for entry in trace if window[0] <= entry.nanoseconds <= window[1]}


def figure(road: str) -> int:
    """The number of files that the walk tells of a road."""
    found = re.search(rf"^\| {re.escape(road)} \| (\d+) \|", WALK.read_text(), re.MULTILINE)
    assert found, f"{WALK.name} has no row {road!r} with a number of files"
    return int(found[1])


def compare(road: str, found: set[str], margin: int = 0) -> None:
    """Raise AssertionError unless the figure of the walk is what was found. It may be larger by `margin`, since threads interleave."""
    told = figure(road)
    assert told - margin <= len(found) <= told, f"{road}: {len(found)} files, {WALK.name} says {told}: {sorted(found)}"
