"""A shard's pod before what all pods get: the worker's image, guarded and probed, with the user's `ps.template` laid over it."""

from __future__ import annotations

import copy
import re
from typing import Any

from psjob_operator.api.template import SERVING, container_of
from psjob_operator.contract import DATA_PORT, HEALTH_PATH, STARTED_PATH, STATUS_PORT
from psjob_operator.plan import naming
from psjob_operator.plan.config import CHECKPOINTS, ConfigSource
from psjob_operator.plan.objects import makes_claim
from psjob_operator.plan.placement import shared
from psjob_operator.render.merge import merge
from psjob_operator.render.names import LABEL_PLACEMENT, Document, shards_of
from psjob_operator.render.security import container_security, pod_security

VOLUME = "psjob-checkpoints"
GRACE_SECONDS = 60
"""Workers leave first, then the last cut is written."""
START_ATTEMPTS = 3600
"""Seconds until a shard has heard the coordinator; one that finds none gives up before, with an exit code of its own. A restore comes
after, and is watched by the liveness probe, which follows its progress: it may take as long as it needs."""
LOST_NODE_SECONDS = 30


def shard_template(job: ConfigSource, placement: int | None, trained_name: str) -> tuple[Document, Document]:
    """The template, and the container in it that serves. `placement`: of CreateProcess; `trained_name`: of the workers' container."""
    worker = job.spec.workers.template
    trained = container_of(worker, trained_name) or {}
    base: Document = {"metadata": {}, "spec": _spec(job, worker.get("spec") or {}, trained, placement)}
    over = copy.deepcopy(job.spec.ps.template or {})
    laid = container_of(over, SERVING)
    name = laid["name"] if laid and laid.get("name") else SERVING
    base["spec"]["containers"][0]["name"] = name
    template: Document = merge(base, over)
    return template, next(container for container in template["spec"]["containers"] if container["name"] == name)


def _spec(job: ConfigSource, worker: Document, trained: Document, placement: int | None) -> Document:
    spec: Document = {
        "containers": [_container(job, trained)],
        "securityContext": pod_security(worker, trained),
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "tolerations": [
            {"key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": LOST_NODE_SECONDS}
            for taint in ("not-ready", "unreachable")
        ],
        "volumes": [{"name": VOLUME, **_volume(job)}],
    }
    if worker.get("imagePullSecrets"):
        spec["imagePullSecrets"] = copy.deepcopy(worker["imagePullSecrets"])
    if shared(job.spec):
        spec["affinity"] = _one_node(job, placement)
    return spec


def _container(job: ConfigSource, trained: Document) -> Document:
    container: Document = {
        "name": SERVING,
        "image": trained.get("image"),
        "command": [python(trained.get("command") or []), "-m", "psjob.shard"],
        "ports": [{"name": "data", "containerPort": DATA_PORT}, {"name": "status", "containerPort": STATUS_PORT}],
        "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}},
        "securityContext": container_security(trained),
        "volumeMounts": [{"name": VOLUME, "mountPath": CHECKPOINTS}],
        "startupProbe": {
            "httpGet": {"path": STARTED_PATH, "port": STATUS_PORT},
            "periodSeconds": 1,
            "timeoutSeconds": 1,
            "failureThreshold": START_ATTEMPTS,
            "terminationGracePeriodSeconds": 1,
        },
        "livenessProbe": _liveness(job.spec.ps.shard_timeout_seconds),
    }
    if trained.get("imagePullPolicy"):
        container["imagePullPolicy"] = trained["imagePullPolicy"]
    return container


def python(command: list[Any]) -> str:
    """The worker's own interpreter where its command begins with one."""
    first = str(command[0]) if command else ""
    return first if re.fullmatch(r"python[0-9.]*", first.rpartition("/")[2]) else "python3"


def _liveness(timeout: int) -> Document:
    """Kills a shard that has not answered for about `timeout` seconds; it is not asked to end, since it does not listen."""
    period = min(30, max(1, timeout // 3))
    return {
        "httpGet": {"path": HEALTH_PATH, "port": STATUS_PORT},
        "periodSeconds": period,
        "timeoutSeconds": min(period, 10),
        "failureThreshold": max(1, timeout // period),
        "terminationGracePeriodSeconds": 1,
    }


def _volume(job: ConfigSource) -> Document:
    if job.spec.checkpoint.volume is not None:
        return job.spec.checkpoint.volume.source()
    if makes_claim(job.spec):
        return {"persistentVolumeClaim": {"claimName": naming.claim(job.name)}}
    return {"emptyDir": {}}


def _one_node(job: ConfigSource, placement: int | None) -> Document:
    """Beside the other shards of its placement; of a run that has no number yet beside all of the run's."""
    number = {} if placement is None else {LABEL_PLACEMENT: str(placement)}
    term = {"labelSelector": {"matchLabels": {**shards_of(job), **number}}, "topologyKey": "kubernetes.io/hostname"}
    return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
