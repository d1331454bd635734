"""A pod as the planner sees it: from the API server's JSON to `plan.observed_state.Process`. Pure."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from psjob_operator.api.rules import EVERY_POD, MOST_SHARDS, MOST_WORKERS
from psjob_operator.api.status import unix
from psjob_operator.cluster import redact
from psjob_operator.contract import MOST_NUMBER
from psjob_operator.plan.observed_state import Exit, Phase, Process, Role
from psjob_operator.render.objects import ANNOTATION_CONTAINER, ANNOTATION_WAITED, LABEL_INDEX, LABEL_NUMBER, LABEL_PAIR, LABEL_ROLE
from psjob_operator.render.pod import SECRET_VOLUME

GONE_SECONDS = 5.0
"""A pod whose deletionTimestamp has passed by so much should have been removed by its kubelet: its node is looked at."""
MOST_CONDITIONS = 16
"""Conditions that are kept of a pod."""
_TAINTED = "DeletionByTaintManager"
_PHASES = frozenset({"Pending", "Running", "Succeeded", "Failed", "Unknown"})
_STARTING = frozenset({"", "ContainerCreating", "PodInitializing"})
_INDEXES = {"shard": MOST_SHARDS, "worker": MOST_WORKERS}


@dataclass(frozen=True)
class PodView:
    """What is kept of a pod."""

    process: Process
    ip: str = ""
    unheard: bool = False
    """The node controller, and not its kubelet, says that it is not ready: nothing was heard of its node."""
    holds: bool = False
    """Its process has ended, and its kubelet has not said so of the pod: for Kubernetes it runs, and keeps its volume where it is."""
    tainted: bool = False
    """It is being deleted because its node is not ready or out of reach."""

    def overdue_at(self) -> float | None:
        """When this pod, if it is still there, must be asked for its node; None while it is not being deleted."""
        process = self.process
        if process.deleting is None or not process.node:
            return None
        return process.deleting if self.tainted else process.deleting + GONE_SECONDS


def parse_pod(raw: Mapping[str, Any], tails: bool = True) -> PodView | None:
    """The view of a pod that carries our labels; None where they are not those of a process. `tails`: of redact.told.

    Anyone who makes pods can write labels. An index or a number that no job has is not of our making, and a status could not hold it.
    """
    metadata = raw["metadata"]
    labels = metadata.get("labels") or {}
    role = labels.get(LABEL_ROLE)
    if role not in _INDEXES:
        return None
    index, number = _numbered(labels.get(LABEL_INDEX), 0, _INDEXES[role] - 1), _numbered(labels.get(LABEL_NUMBER), 1, MOST_NUMBER)
    if index is None or number is None:
        return None
    spec, status = raw.get("spec") or {}, raw.get("status") or {}
    conditions = {condition["type"]: condition for condition in status.get("conditions") or []}
    annotations = metadata.get("annotations") or {}
    name = annotations.get(ANNOTATION_CONTAINER) or _trained(role, spec.get("containers") or [])
    trained = _status_of(name, status.get("containerStatuses"))
    state = trained.get("state") or {}
    ended = _exit(state.get("terminated"), tails)
    holds = ended is not None and status.get("phase") == "Running"
    reason, message = _waiting(spec, status, trained)
    process = Process(
        name=metadata["name"],
        uid=metadata["uid"],
        role=cast(Role, role),
        index=index,
        number=number,
        run=controller_uid(metadata),
        phase=_phase(status.get("phase"), ended),
        created=unix(metadata.get("creationTimestamp")) or 0.0,
        ready=_true(conditions, "Ready"),
        started=unix((state.get("running") or state.get("terminated") or {}).get("startedAt")),
        scheduled=unix(conditions["PodScheduled"].get("lastTransitionTime")) if _true(conditions, "PodScheduled") else None,
        deleting=unix(metadata.get("deletionTimestamp")),
        node=spec.get("nodeName") or "",
        node_lost=status.get("reason") == "NodeLost",
        exit=ended,
        lingering=holds and _others_run(status, name),
        pod_reason=_reason(status, conditions),
        pod_message=redact.sentence(str(status.get("message") or (conditions.get("DisruptionTarget") or {}).get("message") or "")),
        conditions=_own_conditions(conditions),
        unschedulable="" if spec.get("nodeName") else _unschedulable(conditions),  # a late word of the scheduler is not true of a bound pod
        sidecar_crash=_sidecar(spec, status, name),
        init_exit=_init_exit(spec, status, tails),
        waited=_seconds(annotations.get(ANNOTATION_WAITED)),
        pair=_numbered(labels.get(LABEL_PAIR), 1, MOST_NUMBER),
        keys=sys.intern(_secret(spec)),
        finalizers=tuple(redact.sentence(str(it)) for it in metadata.get("finalizers") or ()),
        waiting_reason=reason,
        waiting_message=redact.sentence(message),
    )
    tainted = (conditions.get("DisruptionTarget") or {}).get("reason") == _TAINTED
    return PodView(
        process=process,
        ip=status.get("podIP") or "",
        unheard=_unheard(process, conditions),
        holds=holds,
        tainted=tainted,
    )


def _numbered(text: str | None, least: int, most: int) -> int | None:
    """The number of a label as `render` writes it; None where it is not one of these."""
    if not text or len(text) > len(str(most)) or not (text.isascii() and text.isdecimal()):
        return None
    number = int(text)
    return number if least <= number <= most and text == str(number) else None


def controller_uid(metadata: Mapping[str, Any]) -> str:
    """Uid of the controlling owner, or nothing."""
    for reference in metadata.get("ownerReferences") or []:
        if reference.get("controller"):
            return str(reference.get("uid") or "")
    return ""


def _trained(role: str, containers: Iterable[Mapping[str, Any]]) -> str:
    """For a pod that does not name it: of its role's name, else the first."""
    names = [str(container.get("name")) for container in containers]
    return role if role in names or not names else names[0]


def _secret(spec: Mapping[str, Any]) -> str:
    """The Secret of run keys; empty where it mounts none."""
    mounted = next((item.get("secret") for item in spec.get("volumes") or [] if item.get("name") == SECRET_VOLUME), None)
    return str(mounted.get("secretName") or "") if isinstance(mounted, Mapping) else ""


def _status_of(name: str, statuses: Iterable[Mapping[str, Any]] | None) -> Mapping[str, Any]:
    return next((status for status in statuses or [] if status.get("name") == name), {})


def _exit(terminated: Mapping[str, Any] | None, tails: bool) -> Exit | None:
    if terminated is None:
        return None
    message, log_tail = redact.last_log_words(str(terminated.get("message") or ""), tails)
    return Exit(
        code=int(terminated.get("exitCode", 0)),
        signal=int(terminated.get("signal") or 0),
        reason=str(terminated.get("reason") or ""),
        message=message,
        log_tail=log_tail,
        at=unix(terminated.get("finishedAt")),
    )


def _seconds(text: Any) -> int:
    return int(text) if isinstance(text, str) and text.isdecimal() and len(text) < 6 else 0


def _phase(phase: str | None, ended: Exit | None) -> Phase:
    """The trained container's end is the end, whatever sidecars do."""
    if ended is not None:
        return "Succeeded" if ended.code == 0 else "Failed"
    return cast(Phase, phase if phase in _PHASES else "Unknown")


def _unheard(process: Process, conditions: Mapping[str, Mapping[str, Any]]) -> bool:
    """A kubelet names a reason for what is not ready; the node controller only turns the condition."""
    ready = conditions.get("Ready") or {}
    return bool(process.node) and process.exit is None and ready.get("status") == "False" and not ready.get("reason")


def _own_conditions(conditions: Mapping[str, Mapping[str, Any]]) -> tuple[tuple[str, str], ...]:
    """Conditions that a failure rule can name."""
    own = sorted(set(conditions) - EVERY_POD)[:MOST_CONDITIONS]
    return tuple((sys.intern(str(name)[:317]), sys.intern(str(conditions[name].get("status"))[:7])) for name in own)


def _true(conditions: Mapping[str, Mapping[str, Any]], name: str) -> bool:
    return (conditions.get(name) or {}).get("status") == "True"


def _reason(status: Mapping[str, Any], conditions: Mapping[str, Mapping[str, Any]]) -> str:
    """The pod's own reason first: several causes share one reason of DisruptionTarget."""
    if status.get("reason"):
        return str(status["reason"])
    return str(conditions["DisruptionTarget"].get("reason") or "") if _true(conditions, "DisruptionTarget") else ""


def _unschedulable(conditions: Mapping[str, Mapping[str, Any]]) -> str:
    scheduled = conditions.get("PodScheduled") or {}
    if scheduled.get("status") != "False":
        return ""
    return str(scheduled.get("message") or scheduled.get("reason") or "not scheduled")


def _is_sidecar(container: Mapping[str, Any]) -> bool:
    return container.get("restartPolicy") == "Always"


def _others_run(status: Mapping[str, Any], trained: str) -> bool:
    """Whether a sidecar lives on; a kubelet tells of a container's end up to a second before the pod's phase follows."""
    others = [entry for entry in status.get("containerStatuses") or [] if entry.get("name") != trained]
    return any("terminated" not in (entry.get("state") or {}) for entry in others)


def _sidecars(spec: Mapping[str, Any]) -> set[str]:
    return {container["name"] for container in spec.get("initContainers") or [] if _is_sidecar(container)}


def _sidecar(spec: Mapping[str, Any], status: Mapping[str, Any], trained: str) -> str:
    native = _sidecars(spec)
    statuses = [entry for entry in status.get("initContainerStatuses") or [] if entry.get("name") in native]
    statuses += [entry for entry in status.get("containerStatuses") or [] if entry.get("name") != trained]
    for entry in statuses:
        waiting = (entry.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") == "CrashLoopBackOff":
            return f"{entry['name']}: CrashLoopBackOff"
    return ""


def _init_exit(spec: Mapping[str, Any], status: Mapping[str, Any], tails: bool) -> Exit | None:
    native = _sidecars(spec)
    for entry in status.get("initContainerStatuses") or []:
        ended = _exit((entry.get("state") or {}).get("terminated"), tails)
        if ended is not None and ended.code != 0 and entry.get("name") not in native:
            words = f"init container {entry.get('name')}: {ended.message}".rstrip(": ")
            return dataclasses.replace(ended, message=words[:2048])
    return None


def _waiting(spec: Mapping[str, Any], status: Mapping[str, Any], trained: Mapping[str, Any]) -> tuple[str, str]:
    for entry in [*(status.get("initContainerStatuses") or []), trained, *(status.get("containerStatuses") or [])]:
        waiting = (entry.get("state") or {}).get("waiting") or {}
        reason = str(waiting.get("reason") or "")
        if reason not in _STARTING and reason != "CrashLoopBackOff":
            return reason, f"container {entry.get('name')}: {waiting.get('message') or reason}"
    return "", ""
