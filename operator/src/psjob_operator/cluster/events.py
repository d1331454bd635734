"""Kubernetes Events, told after the status that holds the same news, and at most once."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from psjob_operator.cluster.client import ApiError, Client
from psjob_operator.cluster.kinds import EVENTS, JOBS
from psjob_operator.cluster.store import JobEntry
from psjob_operator.plan.actions import Event
from psjob_operator.printable import LINE_ENDS, printable

CONTROLLER = "psjob.dev/operator"
_NOTE = 1024
ROOM = 4096
"""Events that wait to be written; the oldest goes first where there are more."""
BUSY_SECONDS, LOOK_SECONDS = 0.5, 0.05
"""An Event waits so long at most while jobs wait for their turn, since what turns write is needed sooner; and looks again so often."""
_log = logging.getLogger(__name__)


class Teller:
    """Writes Events beside the turns, one after the other, and seldom while jobs wait: a job that waits for a pod does not wait for them.

    One that cannot be written, or for which there is no room, is lost, which hurts nobody: the status has the news.
    """

    def __init__(self, client: Client, instance: str, busy: Callable[[], bool]) -> None:
        self._client = client
        self._instance = instance
        self._busy = busy
        self._bodies: deque[tuple[str, dict[str, Any]]] = deque(maxlen=ROOM)
        self._changed = asyncio.Event()

    def tell(self, job: JobEntry, events: Sequence[Event], now: float) -> None:
        """Have them written soon.

        Their names are made from the job's resourceVersion, which the status write has just moved, so the same news cannot be told twice.
        """
        for number, event in enumerate(events):
            self._bodies.append((job.namespace, _body(job, event, number, self._instance, now)))
        self._changed.set()

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._bodies:
                await self._turns_first()
                await self._write(*self._bodies.popleft())

    async def _turns_first(self) -> None:
        end = time.monotonic() + BUSY_SECONDS
        while self._busy() and time.monotonic() < end:
            await asyncio.sleep(LOOK_SECONDS)

    async def _write(self, namespace: str, body: dict[str, Any]) -> None:
        try:
            await self._client.create(EVENTS, namespace, body)
        except ApiError as error:
            name = body["regarding"]["name"]
            _log.warning("the Event %s was not written: %s", body["reason"], error, extra={"job": f"{namespace}/{name}"})


def _body(job: JobEntry, event: Event, number: int, instance: str, now: float) -> dict[str, Any]:
    seed = f"{job.uid}/{job.resource_version}/{number}/{event.reason}"
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"namespace": job.namespace, "name": f"{job.name}.{hashlib.sha256(seed.encode()).hexdigest()[:16]}"},
        "regarding": {
            "apiVersion": f"{JOBS.group}/{JOBS.version}",
            "kind": JOBS.kind,
            "namespace": job.namespace,
            "name": job.name,
            "uid": job.uid,
        },
        "type": event.type,
        "reason": event.reason[:128],
        "note": printable(event.message, LINE_ENDS, _NOTE),
        "action": "Reconcile",
        "reportingController": CONTROLLER,
        "reportingInstance": instance[:128],
        "eventTime": datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
    }
