"""A shard's pod before what all pods get: the worker's image, guarded and probed, with the user's `ps.template` laid over it."""

from __future__ import annotations

import copy
from typing import Any

from psjob_operator.api.quantity import quantity
from psjob_operator.api.template import SERVING, asks_devices, container_of
from psjob_operator.contract import DATA_PORT, HEALTH_PATH, STARTED_PATH, STATUS_PORT
from psjob_operator.plan.config import CHECKPOINTS, ConfigSource
from psjob_operator.plan.objects import volume
from psjob_operator.render.interpreter import Interpreter, folder, interpreter, variables
from psjob_operator.render.merge import merge, tolerations
from psjob_operator.render.names import HOSTNAME, LABEL_VOLUME_GROUP, Document, pods_of
from psjob_operator.render.security import NOBODY, container_security, keep_restricted, pod_security

VOLUME = "psjob-checkpoints"
SCRATCH_VOLUME, SCRATCH = "psjob-scratch", "/tmp"  # noqa: S108 (the folder of a container)
"""What a library of the image may write to, where the image itself is read-only; psjob writes nothing there."""
INHERITED = ("priorityClassName", "preemptionPolicy", "schedulerName")
"""Fields of the workers' pods that say when they run and who else waits."""
GRACE_SECONDS = 60
"""Workers leave first, then the last cut is written."""
START_ATTEMPTS = 3600
"""Seconds until a shard has heard the coordinator; one that finds none gives up before, with an exit code of its own. A restore comes
after, and is watched by the liveness probe, which follows its progress: it may take as long as it needs."""
LOST_NODE_SECONDS = 30
REQUESTS: Document = {"cpu": "500m", "memory": "1Gi"}
"""What a shard asks for where nobody says."""


def shard_template(
    job: ConfigSource, volume_group: int | None, trained_name: str, user: int | None = NOBODY, asks_nothing: bool = False
) -> tuple[Document, Document]:
    """The template, and the container in it that serves. `volume_group`: of CreateProcess; `trained_name`: of the workers' container;
    `user`: of pod_security; `asks_nothing`: of Pods."""
    worker = job.spec.workers.template
    trained = container_of(worker, trained_name) or {}
    base: Document = {"metadata": {}, "spec": _spec(job, worker.get("spec") or {}, trained, volume_group, user)}
    over = copy.deepcopy(job.spec.ps.template or {})
    laid = container_of(over, SERVING)
    name = laid["name"] if laid and laid.get("name") else SERVING
    base["spec"]["containers"][0]["name"] = name
    # A template that speaks of the whole pod, and a LimitRange, say what a container may have.
    if not asks_nothing and not (over.get("spec") or {}).get("resources"):
        base["spec"]["containers"][0]["resources"] = {"requests": _asked(laid)}
    template: Document = merge(base, over)
    keep_restricted(template["spec"], interpreter(trained.get("command") or []).of_the_images_user)
    return template, next(container for container in template["spec"]["containers"] if container["name"] == name)


def _spec(job: ConfigSource, worker: Document, trained: Document, volume_group: int | None, user: int | None) -> Document:
    python = interpreter(trained.get("command") or [])
    spec: Document = {
        "containers": [_container(job, trained, python)],
        "securityContext": pod_security(worker, trained, user, python.of_the_images_user),
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "tolerations": [
            {"key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": LOST_NODE_SECONDS}
            for taint in ("not-ready", "unreachable")
        ],
        "volumes": [{"name": VOLUME, **_volume(job)}, {"name": SCRATCH_VOLUME, "emptyDir": {}}],
    }
    if worker.get("imagePullSecrets"):
        spec["imagePullSecrets"] = copy.deepcopy(worker["imagePullSecrets"])
    # Else the scheduler preempts a shard for others while its workers keep their nodes, or waits for one half of a gang.
    spec |= {name: worker[name] for name in INHERITED if worker.get(name) is not None}
    if worker.get("runtimeClassName") and not asks_devices(worker):
        spec["runtimeClassName"] = worker["runtimeClassName"]
    if job.spec.ps.placement == "colocated":  # it has no other node to go to
        spec["tolerations"] = tolerations(spec["tolerations"], copy.deepcopy(worker.get("tolerations") or []))
    if volume_group is not None:
        spec["affinity"] = _one_node(job, volume_group)
    elif job.spec.ps.placement == "packed":
        spec["affinity"] = _few_nodes(job)
    if job.spec.ps.placement == "spread":
        spec["topologySpreadConstraints"] = [_many_nodes(job)]
    return spec


def _asked(laid: Document | None) -> Document:
    """What a shard asks for where its template does not say: no more than the limit that the template sets."""
    limits = ((laid or {}).get("resources") or {}).get("limits") or {}
    return {name: limits[name] if _less(limits.get(name), amount) else amount for name, amount in REQUESTS.items()}


def _less(limit: Any, amount: str) -> bool:
    there, own = quantity(limit), quantity(amount)
    return there is not None and own is not None and there < own


def _container(job: ConfigSource, trained: Document, python: Interpreter) -> Document:
    container: Document = {
        "name": SERVING,
        "image": trained.get("image"),
        "command": [*python.words, "-m", "psjob.shard"],
        "env": variables(trained),
        "ports": [{"name": "data", "containerPort": DATA_PORT}, {"name": "status", "containerPort": STATUS_PORT}],
        "securityContext": container_security(trained, python, python.of_the_images_user),
        "volumeMounts": [{"name": VOLUME, "mountPath": CHECKPOINTS}, {"name": SCRATCH_VOLUME, "mountPath": SCRATCH}],
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
    if folder(trained):
        container["workingDir"] = folder(trained)
    return container


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
    given = job.spec.checkpoint.volume
    # Without checkpoints a user may choose where the folder lies that is lost with the pod.
    return dict(volume(job.name, job.spec) or (given.source() if given is not None else {"emptyDir": {}}))


def _one_node(job: ConfigSource, volume_group: int) -> Document:
    """Beside the other shards of its volume group; of a run that has no number yet (0) beside all of the run's."""
    number = {LABEL_VOLUME_GROUP: str(volume_group)} if volume_group else {}
    term = {"labelSelector": {"matchLabels": {**pods_of(job, "shard"), **number}}, "topologyKey": HOSTNAME}
    return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


def _few_nodes(job: ConfigSource) -> Document:
    """Beside other shards of the run, where there is room."""
    term = {"labelSelector": {"matchLabels": pods_of(job, "shard")}, "topologyKey": HOSTNAME}
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]}}


def _many_nodes(job: ConfigSource) -> Document:
    """About as many of the run's shards on each node; a pod that ends is not counted, nor kept from starting."""
    return {
        "maxSkew": 1,
        "topologyKey": HOSTNAME,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": pods_of(job, "shard")},
    }
