"""Events are written beside the turns: in order, each once, and seldom while jobs wait for their turn."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import pytest

from psjob_operator.cluster import apply
from psjob_operator.cluster.cache import JobEntry
from psjob_operator.cluster.client import Client
from psjob_operator.plan.actions import Event

JOB = JobEntry("space", "job", "uid-1", 1, "7", 0.0, False, {}, {}, {}, {})


class Written:
    """Takes what would be written, in order."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    async def create(self, kind: object, namespace: str, body: dict[str, Any]) -> None:
        self.notes.append(body["note"])


async def told(busy: bool, longest: float, seconds: float, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What of three Events told at once is written in that time, where each waits for turns at most `longest` seconds."""
    monkeypatch.setattr(apply, "BUSY_SECONDS", longest)
    written = Written()
    recorder = apply.EventRecorder(cast(Client, written), "me", lambda: busy)
    recorder.record(JOB, [Event("Normal", "Running", str(number)) for number in range(3)], 0.0)
    running = asyncio.create_task(recorder.run())
    end = time.monotonic() + seconds
    while len(written.notes) < 3 and time.monotonic() < end:
        await asyncio.sleep(0.01)
    running.cancel()
    return written.notes


def test_all_are_written_at_once_while_no_job_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asyncio.run(told(False, 3600, 30, monkeypatch)) == ["0", "1", "2"]


def test_while_jobs_wait_they_come_slowly_and_none_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asyncio.run(told(True, 3600, 0.1, monkeypatch)) == []
    assert asyncio.run(told(True, 0.2, 30, monkeypatch)) == ["0", "1", "2"]
