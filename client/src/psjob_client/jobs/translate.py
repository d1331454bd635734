"""From what is known of a job to what people see (view.py). Pure.

A run of this machine is known by the files in its folder (local/record.py), a job of a cluster by its object, pods and Events. Both
become a status, what the running shards told, and a mapping of seats; `_view` makes the one `JobView` of those. What shards tell
(contract.STATUS_KEYS) is read leniently: it is a stranger's JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from psjob_client.jobs.view import (
    DIFFER,
    DIVERGED,
    CheckpointView,
    Distribution,
    EventView,
    HistoryView,
    JobView,
    ProgressView,
    Series,
    ShardView,
    SpanView,
    StageView,
    TransferView,
    WorkerView,
)
from psjob_client.local.status import WARNINGS, is_number, numbers, part, reports, step_parts
from psjob_operator import contract
from psjob_operator.api.status import JobStatus, unix
from psjob_operator.plan.observed_state import Process

KILLED = "psjob run was ended from outside; `psjob resume {run}` continues from its last checkpoint"
KEPT = ("name", "namespace", "labels", "annotations")
APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
CONDITIONS = {"Complete": "Complete", "Failed": "Failed", "Suspended": "Suspended"}
FIRST = ("loss", "rate")
STEP_PARTS = "stepParts"
"""Series that every history has first."""
Line = TypeVar("Line")
Seats = Mapping[tuple[str, int], Mapping[str, Any]]
"""By (role, index): fields of ShardView or WorkerView that the newest process there has; a worker's are never without `state`."""


@dataclass(frozen=True)
class RunFiles:
    """The files of a run's folder, read; each empty where it is not there or damaged."""

    id: str
    place: str
    alive: bool
    """The process lives that runs it."""
    made: float
    """When the folder was last changed: for runs that left no better time."""
    run: Mapping[str, Any] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)
    status: Mapping[str, Any] = field(default_factory=dict)
    live: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    story: Sequence[Mapping[str, Any]] = ()


def run_view(files: RunFiles) -> JobView:
    """The whole of a run of this machine."""
    status, coordinator = JobStatus.read(files.status), part(files.live, "coordinator")
    result, reason, message = _run_result(files, status)
    over = {} if files.alive else {"ended": finite(files.run.get("ended")) or (files.made if not files.run else None)}
    return _view(
        status,
        coordinator,
        {int(one.get("index", -1)): one for one in files.live.get("shards") or () if isinstance(one, Mapping)},
        {key: _run_seat(key[0], seat, files.alive) for key, seat in seats(files.story).items()},
        time=finite(files.live.get("time")),
        absent="Running" if files.alive else "Ended",
        gone=not files.alive and result != "Complete",
        id=files.id,
        name=str(files.run.get("job") or files.config.get("job") or files.id),
        where="local",
        place=files.place,
        run=files.id,
        phase=result or status.phase or "Pending",
        end=None if result == "Suspended" else result,
        suspended=result == "Suspended",
        reason=reason,
        message=message,
        fresh=files.alive,
        mode=str(coordinator.get("mode") or files.config.get("mode") or "sync"),
        created=finite(files.run.get("created")) or files.made,
        shards_ready=(status.shards_ready or "") if files.alive else "",
        workers_ready=(status.workers_ready or "") if files.alive else "",
        problems=(*_own_problems(coordinator), *_worker_problems(status)) if files.alive else (),
        manifest=dict(files.job) or None,
        **over,
    )


def cluster_view(raw: Mapping[str, Any], context: str, pods: Sequence[Process] = (), told: Mapping[int, Mapping[str, Any]] | None = None,
                 now: float | None = None) -> JobView:  # fmt: skip
    """A job of a cluster. `told`: by shard, what its status port said just now, at `now`."""
    metadata, training = part(raw, "metadata"), part(raw, "spec", "training")
    status = _status(raw.get("status"))
    said, coordinator = status.progress, part((told or {}).get(0), "coordinator")
    reason, message = _why(status)
    namespace = str(metadata.get("namespace") or "")
    return _view(
        status,
        coordinator,
        told or {},
        _cluster_seats(status, pods, coordinator),
        time=now,
        absent="Pending",
        id=str(metadata.get("name")),
        name=str(metadata.get("name")),
        where="cluster",
        place=f"{context}/{namespace}",
        namespace=namespace,
        run=status.run or str(metadata.get("uid") or "") or None,
        phase=status.phase or "Pending",
        end=status.end,
        suspended=status.holds("Suspended"),
        reason=reason,
        message=message,
        fresh=bool(coordinator),
        mode=str(coordinator.get("mode") or (said and said.mode) or training.get("mode") or "sync"),
        created=unix(metadata.get("creationTimestamp")),
        ended=unix(status.completion_time),
        shards_ready=status.shards_ready or "",
        workers_ready=status.workers_ready or "",
        problems=(*_own_problems(coordinator), *_problems(status)),
        manifest=manifest_of(raw),
        progress=_progress(status),
        checkpoint=_checkpoint(status),
        codecs=said.codecs if said else None,
        transport=said.transport if said else None,
        stages=tuple(StageView.model_validate(stage.model_dump()) for stage in status.stages or ()),
    )


def _view(
    status: JobStatus, coordinator: Mapping[str, Any], told: Mapping[int, Mapping[str, Any]], seats: Seats, *, time: float | None,
    absent: str, gone: bool = False, mode: str, **facts: Any,
) -> JobView:  # fmt: skip
    """What the coordinator tells, at `time`, is newer than `facts`. `absent`: state of a worker without a process."""
    live = {name: value for name, value in coordinator_facts(coordinator, time).items() if value not in (None, ())}
    shards = []
    for shard in status.shards:
        view = shard_view(shard.index, "Ended" if gone else shard.state, shard.attempt, told.get(shard.index))
        shards.append(view.model_copy(update=dict(seats.get(("shard", shard.index), {}))))
    said = [one for one in coordinator.get("workers") or () if isinstance(one, Mapping)]
    by_rank = {int(numbers(one, "rank")): one for one in said if "rank" in one}
    first = max((int(numbers(one, "clock")) for one in said), default=0)
    workers = []
    for rank in sorted({rank for rank in (*by_rank, *(index for role, index in seats if role == "worker")) if rank >= 0}):
        seat = dict(seats.get(("worker", rank), {}))
        worker = worker_view(rank, seat.pop("state", absent), seat.pop("attempt", 0), by_rank.get(rank), first)
        workers.append(worker.model_copy(update=seat))
    return JobView(
        mode=mode,
        unit="round" if mode.startswith("local") else "step",
        started=unix(status.start_time),
        shards=tuple(shards),
        workers=tuple(workers),
        restarts=status.restarts.total,
        causes=dict(status.restarts.causes),
        **{**facts, **live},
    )


def run_events(story: Iterable[Mapping[str, Any]]) -> tuple[EventView, ...]:
    """What happened, in its order: the plan's words, phases, checkpoints, and processes that ended in error."""
    found = []
    for line in story:
        event = _event(line)
        if event is not None:
            found.append(EventView(time=float(line["time"]), **event))
    return tuple(found)


def run_timeline(story: Iterable[Mapping[str, Any]], until: float | None) -> tuple[SpanView, ...]:
    """Phases and processes; what continues ends at `until` where the run is over (None: it continues)."""
    lanes: dict[str, list[SpanView]] = {"job": []}
    running: dict[str, SpanView] = {}

    def end(span: SpanView, at: float, **more: str) -> None:
        row = lanes[span.lane]
        row[row.index(span)] = span.model_copy(update={"end": at, **more})

    for line in story:
        at, what = float(line["time"]), line.get("what")
        if what == "phase":
            if lanes["job"]:
                end(lanes["job"][-1], at)
            lanes["job"].append(SpanView(lane="job", state=str(line["phase"]), begin=at))
        elif what == "start":
            lane = f"{line['role']} {line['index']}"
            span = SpanView(lane=lane, state="Starting" if line["role"] == "shard" else "Running", number=int(line["number"]),
                            begin=float(line.get("at") or at), note=str(line["name"]))  # fmt: skip
            lanes.setdefault(lane, []).append(span)
            running[span.note] = span
        elif what == "serving" and (before := running.get(str(line["name"]))) is not None:
            end(before, at)
            running[before.note] = before.model_copy(update={"state": "Serving", "begin": at})
            lanes[before.lane].append(running[before.note])
        elif what == "end" and str(line["name"]) in running:
            ended = running.pop(str(line["name"]))
            end(ended, at, ending=_ending(line), note=f"{ended.note}: {_how(line)}")
    for row in lanes.values():
        for span in [span for span in row if span.end is None and until is not None]:
            if span.lane != "job":
                end(span, until or 0.0)
    return tuple(span for lane in sorted(lanes, key=_lane) for span in lanes[lane])


def seats(story: Iterable[Mapping[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
    """By (role, index): the last process of the seat, its end if it has ended, and how many there were."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    by_name: dict[str, dict[str, Any]] = {}
    for line in story:
        if line.get("what") == "start":
            key = str(line["role"]), int(line["index"])
            seat = {**line, "starts": found.get(key, {}).get("starts", 0) + 1, "end": None}
            found[key] = by_name[str(line["name"])] = seat
        elif line.get("what") == "end" and line["name"] in by_name:
            by_name[line["name"]]["end"] = line
    return found


def checkpoint_of(name: str, manifest: Mapping[str, Any], term: int, step: int, time: float, path: str) -> CheckpointView:
    """A committed checkpoint by its manifest."""
    files = [*(manifest.get("files") or ()), *dict(manifest.get("tables") or {}).values(), manifest.get("records"), manifest.get("buffers")]
    size = sum(int(file.get("bytes") or 0) for file in files if isinstance(file, Mapping))
    return CheckpointView(
        step=step, term=term, time=time, bytes=size or None, path=path, final=manifest.get("final") is True,
        observed_request=int(numbers(manifest, "request")) or None,
    )  # fmt: skip


def _run_result(files: RunFiles, status: JobStatus) -> tuple[Any, str, str]:
    """Complete, Failed or Suspended (None: it continues), the reason and the sentence."""
    result = files.run.get("result")
    if result in ("Complete", "Failed", "Suspended"):
        told = part(files.live, "coordinator")
        for key, reason in (("diverged", DIVERGED), ("drift", DIFFER)):
            if result == "Complete" and told.get(key):
                return result, reason, str(told[key])
        failure = str(files.run.get("failure") or "")
        reason, _, message = failure.partition(": ")
        return result, reason if message else "", message or failure
    if files.alive or status.end is not None:
        said = status.condition("Failed" if status.end == "Failed" else "Ready")
        return status.end, said.reason if said else "", said.message if said else ""
    return "Failed", "Killed", KILLED.format(run=files.id)


def _run_seat(role: str, seat: Mapping[str, Any], alive: bool) -> dict[str, Any]:
    end = seat["end"]
    bad = end if end and end.get("code") not in (0, None) and not end.get("asked") else None
    facts = {
        "name": seat["name"],
        "restarts": int(seat["starts"]) - 1,
        "started": finite(seat.get("at")),
        "problem": f"{seat['name']} {_how(bad)}" if bad else None,
    }
    if role == "shard":
        return facts
    return {**facts, "state": _ending(end) if end else "Running" if alive else "Ended", "attempt": int(seat.get("number") or 0)}


def _event(line: Mapping[str, Any]) -> dict[str, Any] | None:
    match line.get("what"):
        case "event":
            return {"type": line.get("type", "Normal"), "reason": line.get("reason", ""), "message": line.get("message", "")}
        case "phase" if line["phase"] in ("Suspended", "Failed"):
            # The plan has words of its own for the others.
            return {
                "type": "Warning" if line["phase"] == "Failed" else "Normal",
                "reason": str(line["phase"]),
                "message": f"the job is {line['phase']}",
            }
        case "checkpoint":
            return {"reason": "CheckpointCommitted", "message": str(line.get("message", ""))}
        case "start" if int(line.get("number") or 1) > 1 and line.get("role") == "shard":
            return {"reason": "Started", "message": f"{line['name']} was started", "about": str(line["name"])}
        case "end" if line.get("code") not in (0, None) and not line.get("asked"):
            return {"type": "Warning", "reason": "Ended", "message": f"{line['name']} {_how(line)}", "about": str(line["name"])}
    return None


def _how(end: Mapping[str, Any]) -> str:
    if end.get("problem"):
        return str(end["problem"])
    if end.get("signal"):
        return f"was ended by signal {end['signal']}"
    return f"ended with exit code {end.get('code')}"


def _ending(end: Mapping[str, Any]) -> str:
    return "Succeeded" if end.get("code") == 0 else "Stopped" if end.get("asked") else "Failed"


def _lane(lane: str) -> tuple[int, int]:
    role, _, index = lane.partition(" ")
    return ("job", "shard", "worker").index(role), int(index or 0)


def manifest_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The job as somebody would apply it: without status and what the API server adds."""
    kept = {name: value for name, value in part(raw, "metadata").items() if name in KEPT and value}
    annotations = {name: value for name, value in part(kept, "annotations").items() if name != APPLIED}
    kept = {name: value for name, value in kept.items() if name != "annotations"} | ({"annotations": annotations} if annotations else {})
    return {"apiVersion": raw.get("apiVersion"), "kind": raw.get("kind"), "metadata": kept, "spec": raw.get("spec")}


def cluster_events(raw: Iterable[Mapping[str, Any]]) -> tuple[EventView, ...]:
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


def pod_ends(pods: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """By pod, when its last container ended."""
    found: dict[str, float] = {}
    for pod in pods:
        for entry in part(pod, "status").get("containerStatuses") or ():
            at = unix(part(entry, "state", "terminated").get("finishedAt"))
            if at is not None:
                found[pod["metadata"]["name"]] = max(at, found.get(pod["metadata"]["name"], at))
    return found


def cluster_timeline(job: JobView, pods: Sequence[Process], raw: Mapping[str, Any], ends: Mapping[str, float]) -> tuple[SpanView, ...]:
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


def _cluster_seats(status: JobStatus, pods: Sequence[Process], coordinator: Mapping[str, Any]) -> Seats:
    """Shards that the status names, and workers that have a pod or a problem."""
    seats: dict[tuple[str, int], dict[str, Any]] = {}
    for shard in status.shards:
        pod = next((one for one in pods if (one.role, one.index, one.number) == ("shard", shard.index, shard.attempt)), None)
        seats["shard", shard.index] = {"restarts": max(0, shard.attempt - 1), "name": shard.pod, **_pod(pod)}
    for pod in pods:
        if pod.role == "worker":
            restarts = seats.get(("worker", pod.index), {"restarts": -1})["restarts"] + 1
            state = "Lost" if pod.phase == "Unknown" else pod.phase
            seats["worker", pod.index] = {"state": state, "attempt": pod.number, "restarts": restarts, **_pod(pod)}
    for problem in status.workers.problems:
        seat = seats.setdefault(("worker", problem.index), {"state": "Pending", "name": problem.pod})
        seat["problem"] = f"{problem.reason}: {problem.message}".rstrip(": ")
    return seats


def _pod(pod: Process | None) -> dict[str, Any]:
    if pod is None:
        return {}
    why = pod.unschedulable or f"{pod.waiting_reason}: {pod.waiting_message}".strip(": ")
    if pod.exit is not None and pod.exit.code:
        why = f"ended with exit code {pod.exit.code} ({pod.exit.reason})"
    return {"name": pod.name, "node": pod.node or None, "started": pod.started, "problem": why or None}


def _progress(status: JobStatus) -> ProgressView:
    told = status.progress
    if told is None:
        return ProgressView()
    metrics = {} if told.loss is None else {"loss": told.loss}
    return ProgressView(
        step=told.step, rate=told.steps_per_second, eta=told.eta_seconds, loss=told.loss, metrics=metrics, time=unix(told.time)
    )


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


def _own_problems(coordinator: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(coordinator[key]) for key in ("checkpointProblem", "failure") if coordinator.get(key))


def _worker_problems(status: JobStatus) -> tuple[str, ...]:
    return tuple(f"worker {one.index}: {one.reason}: {one.message}".rstrip(": ") for one in status.workers.problems)


def _problems(status: JobStatus) -> tuple[str, ...]:
    kept = next((one for one in status.conditions if one.type == "CheckpointReady" and one.status == "False"), None)
    stalled = next((one for one in status.conditions if one.type == "Stalled" and one.status == "True"), None)
    return (*_worker_problems(status), *(f"{one.reason}: {one.message}" for one in (stalled, kept) if one is not None and one.message))


def _status(raw: Any) -> JobStatus:
    return JobStatus.read(raw if isinstance(raw, Mapping) else {})


def coordinator_facts(told: Mapping[str, Any], time: float | None) -> dict[str, Any]:
    """Fields of JobView that the coordinator knows; `time`: when it said so."""
    if not told:
        return {}
    return {
        "progress": progress_view(told, time),
        "checkpoint": checkpoint_view(part(told, "checkpoint")),
        "transfer": transfer_view(part(told, "checkpointProgress")),
        "codecs": _text(told.get("codecs")),
        "transport": _text(told.get("transport")),
        "staleness": distribution_view(part(told, "staleness")),
        "gap": distribution_view(part(told, "gap")),
        "stages": stage_views(told),
        "warnings": tuple(str(told[name]) for name in WARNINGS if told.get(name)),
        "weights_sha256": _text(told.get("weightsSha256")),
    }


def progress_view(told: Mapping[str, Any], time: float | None) -> ProgressView:
    """How far training is."""
    metrics = part(told, "metrics")
    return ProgressView(
        step=int(numbers(told, "step")),
        total=int(numbers(told, "totalSteps")) or None,
        rate=finite(told.get("rate")),
        eta=finite(told.get("eta")),
        loss=finite(told.get("loss")),
        metrics={str(name): value for name, one in metrics.items() if (value := finite(one)) is not None},
        step_parts=step_parts(told),
        step_advice=_text(told.get("stepAdvice")),
        waiting=_text(told.get("waiting")),
        time=time,
    )


def checkpoint_view(told: Mapping[str, Any]) -> CheckpointView | None:
    """The last committed one."""
    if not told:
        return None
    return CheckpointView(
        step=int(numbers(told, "step")),
        term=int(numbers(told, "term")),
        time=finite(told.get("time")),
        bytes=int(numbers(told, "bytes")) or None,
        path=_text(told.get("path")),
        final=told.get("final") is True,
        observed_request=int(numbers(told, "observedRequest")) or None,
    )


def shard_view(index: int, state: str, attempt: int, told: Mapping[str, Any] | None) -> ShardView:
    """A shard of which the plan knows `state` and `attempt`, with what it told of itself, if it was that attempt."""
    if told is None or int(numbers(told, "attempt")) not in (0, attempt):
        return ShardView(index=index, state=state, attempt=attempt)
    counters = part(told, "counters")
    return ShardView(
        index=index,
        state=state,
        attempt=attempt,
        pushes=_count(counters, "pushes"),
        applied=_count(counters, "applied"),
        dropped=_count(counters, "dropped"),
        updates_lost=_count(counters, "updatesLost"),
        crashes=_count(counters, "crashes"),
        memory_bytes=int(numbers(told, "memory", "rssBytes")) or None,
        transfer=transfer_view(part(told, "transfer")),
        staleness=distribution_view(part(told, "staleness")),
        gap=distribution_view(part(told, "gap")),
        problem=_text(told.get("problem")),
    )


def worker_view(rank: int, state: str, start: int, told: Mapping[str, Any] | None, first: int) -> WorkerView:
    """A worker of which the plan knows `state` and `start`; `first` is the highest step of all."""
    if told is None:
        return WorkerView(index=rank, state=state, attempt=start)
    clock = int(numbers(told, "clock"))
    joined = told.get("state")
    if state == "Running":
        state = {"absent": "Waiting", "lost": "Lost"}.get(str(joined), state)
    return WorkerView(
        index=rank, state=state, attempt=start or int(numbers(told, "start")), clock=clock, behind=max(0, first - clock),
        idle=finite(told.get("idle")), rewinds=int(numbers(told, "rewinds")),
        passes_again=int(numbers(told, "passesAgain")),
    )  # fmt: skip


def stage_views(told: Mapping[str, Any]) -> tuple[StageView, ...]:
    """How each stage stands; none of a job without stages."""
    said = told.get("stages")
    return tuple(
        StageView(
            name=str(one.get("name")),
            workers_ready=f"{int(numbers(one, 'ready'))}/{int(numbers(one, 'desired'))}",
            step=_count(one, "step"),
            staleness=finite(one.get("delay")),
            idle_fraction=finite(one.get("idle")),
            memory_bytes=int(numbers(one, "rssBytes")) or None,
            peak_memory_bytes=int(numbers(one, "peakBytes")) or None,
            peak_device_bytes=int(numbers(one, "devicePeakBytes")) or None,
            waiting=_text(one.get("waiting")),
        )
        for one in (said if isinstance(said, list | tuple) else ())
        if isinstance(one, Mapping)
    )


def distribution_view(told: Mapping[str, Any]) -> Distribution | None:
    """A histogram of the contract; None where there is none."""
    count = int(numbers(told, "count"))
    if not count:
        return None
    buckets = tuple((float(edge), float(held)) for edge, held in told.get("buckets") or () if finite(edge) is not None)
    return Distribution(count=count, mean=numbers(told, "sum") / count, max=numbers(told, "max"), buckets=buckets)


def transfer_view(told: Mapping[str, Any]) -> TransferView | None:
    """Bytes on their way."""
    if not told:
        return None
    return TransferView(doing=str(told.get("doing") or ""), done=int(numbers(told, "done")), total=int(numbers(told, "total")))


def finite(value: Any) -> float | None:
    """The number, if it is a finite one."""
    return float(value) if is_number(value) else None


def _count(counters: Mapping[str, Any], name: str) -> int | None:
    return int(numbers(counters, name)) if name in counters else None


def _text(value: Any) -> str | None:
    return str(value) if value else None


def thinned(lines: Sequence[Line], most: int | None) -> Sequence[Line]:
    """At most `most` of them, evenly chosen, the last among them; None: all."""
    stride = 1 if most is None else max(1, -(-len(lines) // most))
    return lines if stride == 1 else lines[(len(lines) - 1) % stride :: stride]


def _parts(line: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds of a step by part, each a series `stepParts.NAME`."""
    told = line.get("stepParts")
    names = [f"{STEP_PARTS}.{name}" for name in contract.STEP_PARTS]
    return dict(zip(names, told, strict=True)) if isinstance(told, list) and len(told) == len(names) else {}


def history_view(lines: Iterable[Mapping[str, Any]], *, complete: bool = True) -> HistoryView:
    """One series a name, a point for each report, at the step that it was made at; `rate` and the parts of a step have a point a line.

    A line holds each number that was given last. Lines without `reported` do not say when: there each step with a line is a point.
    """
    curves: dict[str, tuple[list[float], list[int], list[float]]] = {name: ([], [], []) for name in FIRST}
    for line in lines:
        at, step = finite(line.get("time")), finite(line.get("step"))
        if at is None or step is None:
            continue
        reported = reports(line)
        told = {"rate": line.get("rate"), **_parts(line)}
        for name, raw in (*told.items(), *part(line, "metrics").items()):
            value = finite(raw)
            if value is None:
                continue
            times, steps, values = curves.setdefault(str(name), ([], [], []))
            given = int(step) if name in told else reported.get(name, int(step))
            if name not in told and steps and steps[-1] == given and (name not in reported or values[-1] == value):
                continue
            times.append(at)
            steps.append(given)
            values.append(value)
    found = [Series(name=name, times=tuple(t), steps=tuple(s), values=tuple(v)) for name, (t, s, v) in curves.items() if v]
    return HistoryView(series=tuple(found), complete=complete)
