"""The one writer of a job's status: a merge patch of what differs, compare-and-swap on the resourceVersion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psjob_operator.api.status import JobStatus
from psjob_operator.cluster.client import Client
from psjob_operator.cluster.kinds import JOBS
from psjob_operator.cluster.store import JobEntry

_NEWS = frozenset({"phase", "observedGeneration", "view", "restarts", "interruption", "lastRecovery", "startTime", "completionTime"})
_KNOWN = frozenset(field.alias or name for name, field in JobStatus.model_fields.items())


async def write(client: Client, job: JobEntry, change: Mapping[str, Any]) -> dict[str, Any]:
    """Store `change` (of `difference`) if the job is still as `job` says; answers the object as stored.

    Raises ApiError: 409 where it has changed, 404 where it has gone, 422 where a rule of the schema refuses it.
    """
    body = {"metadata": {"resourceVersion": job.resource_version, "uid": job.uid}, "status": change}
    return await client.patch_status(JOBS, job.namespace, job.name, body)


def difference(stored: Mapping[str, Any], wanted: JobStatus) -> dict[str, Any]:
    """The merge patch from the stored status to the wanted one; empty where nothing differs.

    Fields that only a newer operator knows are left as they are.
    """
    known = {key: value for key, value in stored.items() if key in _KNOWN}
    if known and JobStatus.model_validate(known) == wanted:
        return {}
    return merge_patch(known, wanted.to_manifest())


def news(stored: Mapping[str, Any], change: Mapping[str, Any]) -> bool:
    """Does a change tell more than details: another phase, another number, a condition that came, went or turned?

    Another reason for what is waited for is a detail: most such reasons (a pod not yet scheduled, a claim not yet bound) are
    over before anyone could read them.
    """
    if _NEWS & change.keys():
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
