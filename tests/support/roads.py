"""By which files a real run comes to the stops of its roads, and what docs/contributing/walk.md says of it.

A road's stops are the functions that the numbered steps of its section name. Its files are those of the calls that lead to a stop, as far
as they were made on the road. Helpers that return before the next stop are not on it, nor is what a thread was in before the road began.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WALK = ROOT / "docs" / "contributing" / "walk.md"
STOP = re.compile(r"\[`([\w.]+)`\]\(\.\./\.\./\w+/src/([\w/]+\.py)\)")


@dataclass(frozen=True)
class Arrival:
    """A thread came to a stop, by these files; with each the time at which its function was entered."""

    nanoseconds: int
    stop: str
    calls: tuple[tuple[str, int], ...]


def stops(section: str) -> frozenset[str]:
    """The functions that the numbered steps of a section of the walk name, as `file:function`."""
    _, found, rest = WALK.read_text().partition(f"\n## {section}\n")
    assert found, f"{WALK.name} has no section {section!r}"
    steps = re.findall(r"^\d+\. .*(?:\n {3}.*)*", rest.partition("\n## ")[0], re.MULTILINE)
    named = STOP.findall("\n".join(steps))
    return frozenset(f"{file}:{function}" for function, file in named if not is_class(function))


def is_class(name: str) -> bool:
    return name[0].isupper() and "." not in name


def traced(trace: Path, section: str) -> dict[str, str]:
    """The environment of a process that is traced, with all that it starts."""
    tracer = Path(__file__).parent / "roadtrace"
    return {**os.environ, "PYTHONPATH": str(tracer), "PSJOBTRACE": str(trace), "PSJOBTRACE_STOPS": " ".join(sorted(stops(section)))}


def arrivals(trace: Path) -> list[Arrival]:
    found = []
    for line in trace.read_text().splitlines():
        at, stop, *calls = line.split()
        pairs = (call.split("@") for call in calls)
        found.append(Arrival(int(at), stop, tuple((file, int(entered)) for file, entered in pairs)))
    return found


def compare(road: str, section: str, trace: Path, windows: Sequence[tuple[int, int]]) -> None:
    """Raise AssertionError unless each stop was reached in one of these times, by as many files as the walk tells of the road."""
    told = re.search(rf"^\| {re.escape(road)} \| (\d+) \|", WALK.read_text(), re.MULTILINE)
    assert told, f"{WALK.name} has no row {road!r} with a number of files"
    reached, files = set(), set()
    found = arrivals(trace)
    for began, end in windows:
        for arrival in found:
            if began <= arrival.nanoseconds <= end:
                reached.add(arrival.stop)
                files |= {file for file, entered in arrival.calls if entered >= began}
    assert stops(section) - reached == set(), f"{road}: no run came to these"
    assert len(files) == int(told[1]), f"{road}: {WALK.name} says {told[1]}, found {len(files)}: {sorted(files)}"
