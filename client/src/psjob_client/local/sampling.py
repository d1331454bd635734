"""A run's numbers over time, in a file of bounded size: where it grows too long, every second line goes, and lines come half as often."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from psjob_client.local.probe import numbers, part, reports

MOST_LINES = 10_000
LEAST_SECONDS = 0.25
"""Between two lines, at first."""


class Samples:
    """Lines {"time": unix s, "step": int, "rate": steps/s or null, "metrics": {name: number}, "reported": [step of each]}."""

    def __init__(self, path: Path, most: int = MOST_LINES, least: float = LEAST_SECONDS) -> None:
        self._path, self._most, self._least = path, most, least
        self._at = 0.0
        self._said: tuple[int, Mapping[str, Any]] | None = None
        self._lines = 0

    def take(self, coordinator: Mapping[str, Any], now: float, *, last: bool = False) -> None:
        """Note what the coordinator said last, where it is news; the `last` time however soon after the one before."""
        if not coordinator or (now - self._at < self._least and not last):
            return
        said = int(numbers(coordinator, "step")), dict(part(coordinator, "metrics"))
        if said == self._said:
            return
        rate = coordinator.get("rate")
        metrics = {name: value for name, value in said[1].items() if isinstance(value, int | float) and math.isfinite(value)}
        given = reports(coordinator)
        line: dict[str, Any] = {
            "time": round(now, 3),
            "step": said[0],
            "rate": rate if isinstance(rate, int | float) else None,
            "metrics": metrics,
        }
        line |= {"reported": [given[name] for name in metrics]} if given else {}
        with contextlib.suppress(OSError):
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            self._at, self._said, self._lines = now, said, self._lines + 1
            if self._lines >= self._most:
                self._halve()

    def _halve(self) -> None:
        lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
        thinned = self._path.with_name(f".{self._path.name}.part")
        thinned.write_text("".join(lines[1::2]), encoding="utf-8")
        os.replace(thinned, self._path)
        self._lines, self._least = len(lines) // 2, self._least * 2
