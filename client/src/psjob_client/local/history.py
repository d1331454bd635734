"""`--history`: what a job told of itself while it ran, a JSON line at a time."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from psjob_client.local.backend import Backend
from psjob_client.local.lateness import histograms
from psjob_client.local.probe import numbers, part
from psjob_client.local.watch import Watch

EVERY = 0.1
"""Seconds between two looks at the coordinator."""


async def keep_history(backend: Backend, path: Path) -> None:
    """Write to `path` what the coordinator says whenever it is news, until cancelled; then its last words, with `waste`.

    Raises OSError where it cannot be written.
    """
    news = News()
    with path.open("w", encoding="utf-8") as file:

        def note(line: Mapping[str, Any] | None) -> None:
            if line:
                file.write(json.dumps(line) + "\n")
                file.flush()

        try:
            while True:
                coordinator = backend.current("shard", 0)
                told = coordinator and await backend.watch.look(coordinator, backend.sites.shards[0])
                note(news.of(told, time.time()) if told else None)
                await asyncio.sleep(EVERY)
        finally:
            note(news.line(backend.watch.coordinator, time.time()) | waste(backend.watch))


def waste(watch: Watch) -> dict[str, Any]:
    """{"lag": histogram, "gap": histogram, "idle": [number or null, …]}: of the pushes, over all shards, as contract.STATUS_KEYS has them;

    and by rank the part of the time in which the script waited.
    """
    workers = watch.coordinator.get("workers") or ()
    return {**histograms(watch.told.values()), "idle": [part({"worker": one}, "worker").get("idle") for one in workers]}


class News:
    """Leaves out what was said before. A line: {"time": unix s, "began": unix s or null, "step": int, "metrics": {name: number},

    "passed": [[step, unix s], …]}: when a worker was first seen in training, the lowest complete clock, the numbers that the script
    reported last, and the steps passed since the line before.
    """

    def __init__(self) -> None:
        self._last: tuple[int, Mapping[str, Any]] = (-1, {})
        self._passed = 0.0
        self._began: float | None = None

    def of(self, told: Mapping[str, Any], now: float) -> dict[str, Any] | None:
        """The line for an answer of shard 0's status port; None: nothing new."""
        coordinator = part(told, "coordinator")
        if self._began is None and any(
            part({"worker": one}, "worker").get("state") == "joined" for one in coordinator.get("workers") or ()
        ):
            self._began = now
        said = int(numbers(coordinator, "step")), part(coordinator, "metrics")
        if not coordinator or said == self._last:
            return None
        self._last = said
        return self.line(coordinator, now)

    def line(self, coordinator: Mapping[str, Any], now: float) -> dict[str, Any]:
        """Of what the coordinator says, news or not."""
        passed = [entry for entry in coordinator.get("passed") or () if entry[1] > self._passed]
        self._passed = passed[-1][1] if passed else self._passed
        metrics = dict(part(coordinator, "metrics"))
        return {"time": now, "began": self._began, "step": int(numbers(coordinator, "step")), "metrics": metrics, "passed": passed}
