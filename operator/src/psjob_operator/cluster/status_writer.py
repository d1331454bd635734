"""The one writer of a job's status, and of the Kubernetes Events that tell the same news.

The status is a merge patch of what differs, compare-and-swap on the resourceVersion. Events come after it, and at most once.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from psjob_operator.api.status import JobStatus
from psjob_operator.cluster.cache import JobEntry
from psjob_operator.cluster.client import EVENTS, JOBS, ApiError, Client
from psjob_operator.plan.actions import Event
from psjob_operator.printable import LINE_ENDS, printable

_NEWS = frozenset({"phase", "observedGeneration", "restarts", "interruption", "lastRecovery", "startTime", "completionTime"})
_KEYS = {"conditions": (("type",), "status"), "shards": (("index", "replica"), "attempt")}
"""Lists whose entries are told apart by the first fields; what a newer operator adds to one holds while the last stays, too."""
_MOMENTS = ("checkpoint", "progress", "interruption", "lastRecovery")
"""What is replaced whole when it changes: parts of another moment do not belong to it."""


CONTROLLER = "psjob.dev/operator"
_NOTE = 1024
ROOM = 4096
"""Events that wait to be written; the oldest goes first where there are more."""
BUSY_SECONDS, LOOK_SECONDS = 0.5, 0.05
"""An Event waits so long at most while jobs wait for their turn, since what turns write is needed sooner; and looks again so often."""
_log = logging.getLogger(__name__)


async def write_status(client: Client, job: JobEntry, change: Mapping[str, Any]) -> dict[str, Any]:
    """Store `change` (of `difference`) if the job is still as `job` says; answers the object as stored.

    Raises ApiError: 409 where it has changed, 404 where it has gone, 422 where a rule of the schema refuses it.
    """
    body = {"metadata": {"resourceVersion": job.resource_version, "uid": job.uid}, "status": change}
    return await client.patch_status(JOBS, job.namespace, job.name, body)


def difference(stored: Mapping[str, Any], wanted: JobStatus) -> dict[str, Any]:
    """The merge patch from the stored status to the wanted one; empty where nothing differs.

    What only a newer operator knows, or what cannot be read, is left as it is.
    """
    read = JobStatus.read(stored)
    if stored and read == wanted:
        return {}
    known = read.to_manifest()
    if read.run not in (None, wanted.run):
        # The run before has nothing to say of this one but its numbers.
        return merge_patch({key: value for key, value in stored.items() if key in known}, wanted.to_manifest())
    return merge_patch(stored, _kept(stored, known, wanted.to_manifest()))


def _kept(stored: Mapping[str, Any], known: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """`wanted` with what of `stored` is not `known`, that is, what was not understood of it."""
    made = dict(wanted)
    for key, value in stored.items():
        if key not in wanted:
            if key not in known:
                made[key] = value
        elif key in _MOMENTS:
            made[key] = value if known.get(key) == wanted[key] else wanted[key]
        elif key in _KEYS and isinstance(value, list):
            made[key] = _entries(value, known.get(key) or [], wanted[key], *_KEYS[key])
        elif isinstance(value, Mapping) and isinstance(wanted[key], Mapping):
            made[key] = _kept(value, known.get(key) or {}, wanted[key])
    return made


def _entries(stored: list[Any], known: list[Any], wanted: list[Any], names: tuple[str, ...], same: str) -> list[Any]:
    """The same for a list: entries that were not understood stand behind the others."""
    before = {key: entry for entry in stored if isinstance(entry, Mapping) and (key := _key(entry, names)) is not None}
    understood = {_key(entry, names): entry for entry in known}
    made = []
    for entry in wanted:
        key = _key(entry, names)
        old = before.pop(key, {}) if key is not None else {}
        alike = key in understood and old.get(same) == entry[same]
        made.append(_kept(old, understood[key], entry) if alike else entry)
    return [*made, *(entry for key, entry in before.items() if key not in understood)]


def _key(entry: Mapping[str, Any], names: tuple[str, ...]) -> tuple[Any, ...] | None:
    """What tells an entry from the others; None where it lacks a part of that."""
    found = tuple(entry.get(name) for name in names)
    return found if all(isinstance(value, str | int) for value in found) else None


def tells_news(stored: Mapping[str, Any], change: Mapping[str, Any]) -> bool:
    """Does a change tell more than details: another phase, another number, a condition that came, went or turned?

    Another reason for what is waited for is a detail: most such reasons (a pod not yet scheduled, a claim not yet bound) are
    over before anyone could read them.
    """
    if _NEWS & change.keys() or "term" in (change.get("internal") or {}):
        return True
    return "conditions" in change and _said(stored.get("conditions")) != _said(change["conditions"])


def _said(conditions: Any) -> list[tuple[Any, Any]]:
    return [(entry.get("type"), entry.get("status")) for entry in conditions or ()]


def merge_patch(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """RFC 7386: what to send so that `old` becomes `new`."""
    patch: dict[str, Any] = {}
    for key in old.keys() - new.keys():
        patch[key] = None
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            inner = merge_patch(before, value)
            if inner:
                patch[key] = inner
        elif key not in old or before != value:
            patch[key] = value
    return patch


class EventRecorder:
    """Writes Events beside the turns, one after the other, and seldom while jobs wait: a job that waits for a pod does not wait for them.

    One that cannot be written, or for which there is no room, is lost, which hurts nobody: the status has the news.
    """

    def __init__(self, client: Client, instance: str, busy: Callable[[], bool]) -> None:
        self._client = client
        self._instance = instance
        self._busy = busy
        self._bodies: deque[tuple[str, dict[str, Any]]] = deque(maxlen=ROOM)
        self._changed = asyncio.Event()

    def record(self, job: JobEntry, events: Sequence[Event], now: float) -> None:
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
