"""How urgent a look at a job is: what is begun is finished before more is begun, and a job that lost something comes before all. Pure.

Read from what is stored, in a step that does not grow with the job: it is asked for each event.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psjob_operator.api.status import TERMINAL
from psjob_operator.cluster.queue import Key
from psjob_operator.cluster.store import JobStore

RECOVERING, NEAR, BEGUN, NEW, LATER = range(5)
"""It lost a process; all its processes are up, which its status does not say; pods of it are still to be made; it was never seen; nothing
presses."""


def rank(store: JobStore, key: Key) -> int:
    """Of the job of this name, from RECOVERING to LATER."""
    job = store.job(key)
    if job is None or job.deleting or job.status.get("phase") in TERMINAL:
        return LATER
    if job.status.get("run") != job.uid:
        return NEW
    tally = store.tally(key)
    wanted = _number(job.brief.get("ps"), "shards") + _number(job.brief.get("workers"), "replicas")
    full, missing = tally.up >= wanted, tally.there - tally.ended < wanted
    match job.status.get("phase"):
        case "Running":
            return LATER if full else RECOVERING
        case "Recovering":
            return NEAR if full else RECOVERING if missing else LATER
        case "Pending":
            return NEAR if full else BEGUN if missing else LATER
    return LATER


def _number(part: Any, field: str) -> int:
    value = part.get(field) if isinstance(part, Mapping) else None
    return value if isinstance(value, int) else 0
