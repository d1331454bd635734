"""Kubernetes Events, told after the status that holds the same news, and at most once."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from datetime import UTC, datetime

from psjob_operator.cluster.client import ApiError, Client
from psjob_operator.cluster.kinds import EVENTS, JOBS
from psjob_operator.cluster.store import JobEntry
from psjob_operator.plan.actions import Event

CONTROLLER = "psjob.dev/operator"
_NOTE = 1024
_log = logging.getLogger(__name__)


async def post(client: Client, job: JobEntry, events: Sequence[Event], instance: str, now: float) -> None:
    """Write them; one that cannot be written is lost, which hurts nobody: the status has the news.

    Its name is made from the job's resourceVersion, which the status write has just moved, so the same news cannot be told twice.
    """
    for number, event in enumerate(events):
        seed = f"{job.uid}/{job.resource_version}/{number}/{event.reason}"
        body = {
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
            "note": event.message[:_NOTE],
            "action": "Reconcile",
            "reportingController": CONTROLLER,
            "reportingInstance": instance[:128],
            "eventTime": datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        }
        try:
            await client.create(EVENTS, job.namespace, body)
        except ApiError as error:
            _log.warning("the Event %s was not written: %s", event.reason, error, extra={"job": f"{job.namespace}/{job.name}"})
