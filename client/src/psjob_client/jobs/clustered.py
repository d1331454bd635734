"""From a PSTrainingJob, its pods and its Events, as the API server has them, to what people see. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from psjob_client.jobs.told import coordinator_facts, shard_view, worker_view
from psjob_client.jobs.view import CheckpointView, EventView, JobView, ProgressView, SpanView, StageView
from psjob_client.local.status import numbers, part
from psjob_operator.api.status import JobStatus, unix
from psjob_operator.cluster.pods import parse
from psjob_operator.plan.observed_state import Process

KEPT = ("name", "namespace", "labels", "annotations")
APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
CONDITIONS = {"Complete": "Complete", "Failed": "Failed", "Suspended": "Suspended"}


def job_view(raw: Mapping[str, Any], context: str, pods: Sequence[Process] = (), told: Mapping[int, Mapping[str, Any]] | None = None,
             now: float | None = None) -> JobView:  # fmt: skip
    """A job. `told`: by shard, what its status port said just now, at `now`."""
    metadata, spec = part(raw, "metadata"), part(raw, "spec")
    status = _status(raw.get("status"))
    coordinator = part((told or {}).get(0), "coordinator")
    said = _why(status)
    training = part(spec, "training")
    mode = str(coordinator.get("mode") or (status.progress and status.progress.mode) or training.get("mode") or "sync")
    facts: dict[str, Any] = {
        "progress": _progress(status),
        "checkpoint": _checkpoint(status),
        "codecs": status.progress.codecs if status.progress else None,
        "transport": status.progress.transport if status.progress else None,
        "stages": tuple(StageView.model_validate(stage.model_dump()) for stage in status.stages or ()),
    }
    live = {name: value for name, value in coordinator_facts(coordinator, now).items() if value not in (None, ())}
    own = tuple(str(coordinator[key]) for key in ("checkpointProblem", "failure") if coordinator.get(key))
    namespace = str(metadata.get("namespace") or "")
    return JobView(
        id=str(metadata.get("name")),
        name=str(metadata.get("name")),
        where="cluster",
        place=f"{context}/{namespace}",
        namespace=namespace,
        run=status.run or str(metadata.get("uid") or "") or None,
        phase=status.phase or "Pending",
        reason=said[0],
        message=said[1],
        fresh=bool(coordinator),
        mode=mode,
        unit="round" if mode.startswith("local") else "step",
        created=unix(metadata.get("creationTimestamp")),
        started=unix(status.start_time),
        ended=unix(status.completion_time),
        shards=_shards(status, pods, told or {}),
        workers=_workers(status, pods, coordinator),
        shards_ready=status.shards_ready or "",
        workers_ready=status.workers_ready or "",
        restarts=status.restarts.total,
        causes=dict(status.restarts.causes),
        problems=(*own, *_problems(status)),
        manifest=manifest_of(raw),
        **{**facts, **live},
    )


def manifest_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The job as somebody would apply it: without status and what the API server adds."""
    kept = {name: value for name, value in part(raw, "metadata").items() if name in KEPT and value}
    annotations = {name: value for name, value in part(kept, "annotations").items() if name != APPLIED}
    kept = {name: value for name, value in kept.items() if name != "annotations"} | ({"annotations": annotations} if annotations else {})
    return {"apiVersion": raw.get("apiVersion"), "kind": raw.get("kind"), "metadata": kept, "spec": raw.get("spec")}


def processes(pods: Iterable[Mapping[str, Any]], uid: str) -> list[Process]:
    """Those of this very job, the oldest start first."""
    found = [view.process for pod in pods if (view := parse(pod)) is not None]
    return sorted((one for one in found if one.run in (uid, "")), key=lambda one: (one.role, one.index, one.number))


def events(raw: Iterable[Mapping[str, Any]]) -> tuple[EventView, ...]:
    """Kubernetes Events of either API, the oldest first."""
    found = []
    for one in raw:
        series, about = part(one, "series"), part(one, "involvedObject") or part(one, "regarding")
        at = (
            series.get("lastObservedTime")
            or one.get("lastTimestamp")
            or one.get("eventTime")
            or part(one, "metadata").get("creationTimestamp")
        )
        kind, name = str(about.get("kind") or ""), str(about.get("name") or "")
        found.append(
            EventView(
                time=unix(at) or 0.0,
                type="Warning" if one.get("type") == "Warning" else "Normal",
                reason=str(one.get("reason") or ""),
                message=" ".join(str(one.get("message") or one.get("note") or "").split()),
                about="" if kind == "PSTrainingJob" else f"{kind.lower()}/{name}" if kind != "Pod" else name,
                count=int(series.get("count") or one.get("count") or 1),
            )
        )
    return tuple(sorted(found, key=lambda event: event.time))


def finished(pods: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """By pod, when its last container ended."""
    found: dict[str, float] = {}
    for pod in pods:
        for entry in part(pod, "status").get("containerStatuses") or ():
            at = unix(part(entry, "state", "terminated").get("finishedAt"))
            if at is not None:
                found[pod["metadata"]["name"]] = max(at, found.get(pod["metadata"]["name"], at))
    return found


def timeline(job: JobView, pods: Sequence[Process], raw: Mapping[str, Any], ends: Mapping[str, float]) -> tuple[SpanView, ...]:
    """The job's lane by its conditions, and a span a pod that is still there (by `ends`, if it ended); deleted pods are not seen."""
    spans = _phases(job, raw)
    for one in pods:
        lane = f"{one.role} {one.index}"
        begun, ended, ending, note = one.started or one.scheduled or one.created, None, "", one.name
        if one.exit is not None:
            ended, ending = ends.get(one.name) or job.ended or begun, "Succeeded" if one.exit.code == 0 else "Failed"
            note = f"{one.name}: ended with exit code {one.exit.code}"
        works = one.ready or one.exit is not None
        state = ("Serving" if one.role == "shard" else "Running") if works else "Starting"
        spans.append(SpanView(lane=lane, state=state, number=one.number, begin=begun, end=ended, ending=ending, note=note))
    return tuple(spans)


def _phases(job: JobView, raw: Mapping[str, Any]) -> list[SpanView]:
    if job.created is None:
        return []
    status = _status(raw.get("status"))
    edges: list[tuple[float, str]] = [(job.created, "Pending")]
    for one in status.conditions:
        at = unix(one.last_transition_time)
        if at is None:
            continue
        if one.type == "Ready" and one.status == "True":
            edges.append((at, "Running"))
        elif one.type in CONDITIONS and one.status == "True":
            edges.append((at, CONDITIONS[one.type]))
    edges.sort()
    if edges[-1][1] != job.phase and job.phase != "Pending":
        latest = max((unix(one.last_transition_time) or 0.0 for one in status.conditions), default=edges[-1][0])
        edges.append((max(latest, edges[-1][0]), job.phase))
    ends = [*(at for at, _ in edges[1:]), None]
    return [SpanView(lane="job", state=state, begin=at, end=end) for (at, state), end in zip(edges, ends, strict=True)]


def _shards(status: JobStatus, pods: Sequence[Process], told: Mapping[int, Mapping[str, Any]]) -> tuple[Any, ...]:
    found = []
    for shard in status.shards:
        view = shard_view(shard.index, shard.state, shard.attempt, told.get(shard.index))
        pod = next((one for one in pods if (one.role, one.index, one.number) == ("shard", shard.index, shard.attempt)), None)
        found.append(view.model_copy(update={"restarts": max(0, shard.attempt - 1), "name": shard.pod, **_pod(pod)}))
    return tuple(found)


def _workers(status: JobStatus, pods: Sequence[Process], coordinator: Mapping[str, Any]) -> tuple[Any, ...]:
    said = [one for one in coordinator.get("workers") or () if isinstance(one, Mapping)]
    told = {int(numbers(one, "rank")): one for one in said}
    first = max((int(numbers(one, "clock")) for one in said), default=0)
    newest = {one.index: one for one in pods if one.role == "worker"}
    problems = {problem.index: problem for problem in status.workers.problems}
    count = {index: sum(one.role == "worker" and one.index == index for one in pods) for index in newest}
    found = []
    for rank in sorted({*told, *newest, *problems}):
        pod, problem = newest.get(rank), problems.get(rank)
        view = worker_view(rank, _state(pod), pod.number if pod else 0, told.get(rank), first)
        change = {"restarts": max(0, count.get(rank, 1) - 1), "name": pod.name if pod else problem.pod if problem else None, **_pod(pod)}
        if problem is not None:
            change["problem"] = f"{problem.reason}: {problem.message}".rstrip(": ")
        found.append(view.model_copy(update=change))
    return tuple(found)


def _pod(pod: Process | None) -> dict[str, Any]:
    if pod is None:
        return {}
    why = pod.unschedulable or f"{pod.waiting_reason}: {pod.waiting_message}".strip(": ")
    if pod.exit is not None and pod.exit.code:
        why = f"ended with exit code {pod.exit.code} ({pod.exit.reason})"
    return {"name": pod.name, "node": pod.node or None, "started": pod.started, "problem": why or None}


def _state(pod: Process | None) -> str:
    if pod is None:
        return "Pending"
    return {"Unknown": "Lost"}.get(pod.phase, pod.phase)


def _progress(status: JobStatus) -> ProgressView:
    told = status.progress
    if told is None:
        return ProgressView()
    metrics = {} if told.loss is None else {"loss": told.loss}
    return ProgressView(step=told.step, rate=told.rate, eta=told.eta, loss=told.loss, metrics=metrics, time=unix(told.time))


def _checkpoint(status: JobStatus) -> CheckpointView | None:
    kept = status.checkpoint
    if kept is None:
        return None
    return CheckpointView(step=kept.step, time=unix(kept.time), bytes=kept.bytes, path=kept.path, observed_request=kept.observed_request)


def _why(status: JobStatus) -> tuple[str, str]:
    held = {one.type: one for one in status.conditions}
    for name in ("Failed", "Complete", "Stalled", "Ready"):
        one = held.get(name)
        if one is not None and (one.status == "True" or name == "Ready"):
            return one.reason, one.message
    return "", ""


def _problems(status: JobStatus) -> tuple[str, ...]:
    found = [f"worker {one.index}: {one.reason}: {one.message}".rstrip(": ") for one in status.workers.problems]
    kept = next((one for one in status.conditions if one.type == "CheckpointReady" and one.status == "False"), None)
    stalled = next((one for one in status.conditions if one.type == "Stalled" and one.status == "True"), None)
    found += [f"{one.reason}: {one.message}" for one in (stalled, kept) if one is not None and one.message]
    return tuple(found)


def _status(raw: Any) -> JobStatus:
    return JobStatus.read(raw if isinstance(raw, Mapping) else {})
