"""Pods of a job, and the entry that the operator's cache keeps for it."""

from __future__ import annotations

from typing import Any

from psjob_operator.render.objects import LABEL_INDEX, LABEL_JOB, LABEL_NUMBER, LABEL_ROLE

AT = "2026-11-21T12:00:00Z"


def pod(name: str = "job-worker-3-r2", version: int = 1, uid: str = "u1", **status: Any) -> dict[str, Any]:
    labels = {LABEL_JOB: "job", LABEL_ROLE: "worker", LABEL_INDEX: "3", LABEL_NUMBER: "2"}
    owner = {"uid": "run", "controller": True, "kind": "PSTrainingJob", "name": "job", "apiVersion": "psjob.dev/v1alpha1"}
    metadata = {"name": name, "namespace": "n", "uid": uid, "resourceVersion": str(version), "creationTimestamp": AT, "labels": labels}
    return {
        "metadata": {**metadata, "ownerReferences": [owner]},
        "spec": {"nodeName": "node", "containers": [{"name": "worker"}, {"name": "logs"}], "initContainers": [{"name": "psjob-inject"}]},
        "status": {"phase": "Running", **status},
    }


def entry(name: str, **state: Any) -> dict[str, Any]:
    return {"name": name, "state": state}
