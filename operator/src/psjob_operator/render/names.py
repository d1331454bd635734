"""Labels and annotations of what psjob makes."""

from __future__ import annotations

from typing import Any

from psjob_operator.contract import GROUP, KIND, VERSION
from psjob_operator.plan.actions import Beside
from psjob_operator.plan.config import ConfigSource
from psjob_operator.plan.snapshot import Role

LABEL_JOB = f"{GROUP}/job-name"
LABEL_RUN = f"{GROUP}/run"
LABEL_ROLE = f"{GROUP}/role"
"""`shard` or `worker`."""
LABEL_INDEX = f"{GROUP}/index"
LABEL_NUMBER = f"{GROUP}/number"
"""Attempt of a shard, start of a worker."""
LABEL_ATTEMPT = f"{GROUP}/attempt"
LABEL_START = f"{GROUP}/start"
LABEL_VIEW = f"{GROUP}/view"
LABEL_STAGE = f"{GROUP}/stage"
"""Of a worker: the name of its stage, where the model is cut in stages."""
LABEL_VOLUME_GROUP = f"{GROUP}/placement"
"""Of a shard: the number that those who share a volume have in common."""
ANNOTATION_CONTAINER = f"{GROUP}/container"
"""Of a pod: the container whose end is the process's end, whatever stands before it."""
ANNOTATION_WAITED = f"{GROUP}/waited-seconds"
"""Of a pod: for how long its start was held back (plan/restarts.py); absent means not at all."""
ANNOTATION_DEFAULT = "kubectl.kubernetes.io/default-container"
"""What `kubectl logs` and `kubectl exec` take where no container is named."""
LABEL_DIGEST = f"{GROUP}/digest"
"""Of the ConfigMap: names its content."""
HOSTNAME = "kubernetes.io/hostname"
"""Of a node: its name, by which pods are put on the same one or on others."""

Document = dict[str, Any]


def labels(job: ConfigSource, component: str) -> dict[str, str]:
    """Labels that every child has. Nothing of the job's own metadata is copied: tools would take the child for what it is not."""
    return {
        "app.kubernetes.io/name": "psjob",
        "app.kubernetes.io/instance": job.name,
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/managed-by": "psjob-operator",
        LABEL_JOB: job.name,
        LABEL_RUN: job.uid,
    }


def metadata(job: ConfigSource, name: str, own_labels: dict[str, str], owned: bool = True) -> Document:
    """ObjectMeta of a child; owned by the job unless it outlives it."""
    made: Document = {"name": name, "namespace": job.namespace, "labels": own_labels}
    if owned:
        made["ownerReferences"] = [
            {
                "apiVersion": f"{GROUP}/{VERSION}",
                "kind": KIND,
                "name": job.name,
                "uid": job.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ]
    return made


def run_of(job: ConfigSource) -> dict[str, str]:
    """Selector of this run's pods; those of an earlier job of the same name are left out."""
    return {LABEL_JOB: job.name, LABEL_RUN: job.uid}


def pods_of(job: ConfigSource, role: Role) -> dict[str, str]:
    """Selector of this run's shards or workers."""
    return {**run_of(job), LABEL_ROLE: role}


def beside(job: ConfigSource, other: Beside) -> Document:
    """Affinity of a pod that requires the node of this very process; one before or after it does not match."""
    number = {LABEL_INDEX: str(other.index), LABEL_NUMBER: str(other.number)}
    term = {"labelSelector": {"matchLabels": {**pods_of(job, other.role), **number}}, "topologyKey": HOSTNAME}
    return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
