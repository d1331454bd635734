"""From what a run has left in its folder (local/record.py) to what people see. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from psjob_client.jobs.told import coordinator_facts, shard_view, worker_view
from psjob_client.jobs.view import DIFFER, DIVERGED, CheckpointView, EventView, JobView, ShardView, SpanView, WorkerView
from psjob_client.local.status import numbers, part
from psjob_operator.api.status import TERMINAL, JobStatus, unix

KILLED = "psjob run was ended from outside; `psjob resume {run}` goes on from its last checkpoint"


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


def job_view(files: RunFiles) -> JobView:
    """The whole of a run."""
    status = _status(files.status)
    told = part(files.live, "coordinator")
    phase, reason, message = _phase(files, status)
    name = str(files.run.get("job") or files.config.get("job") or files.id)
    over = {} if files.alive else {"ended": _number(files.run.get("ended")) or (files.made if not files.run else None)}
    facts = coordinator_facts(told, time=_number(files.live.get("time")))
    restarts = status.restarts
    mode = str(told.get("mode") or files.config.get("mode") or "sync")
    return JobView(
        id=files.id,
        name=name,
        where="local",
        place=files.place,
        run=files.id,
        phase=phase,
        reason=reason,
        message=message,
        fresh=files.alive,
        mode=mode,
        unit="round" if mode.startswith("local") else "step",
        created=_number(files.run.get("created")) or files.made,
        started=unix(status.start_time),
        shards=_shards(files, status, phase),
        workers=_workers(files, phase),
        shards_ready=(status.shards_ready or "") if files.alive else "",
        workers_ready=(status.workers_ready or "") if files.alive else "",
        restarts=restarts.total,
        causes=dict(restarts.causes),
        manifest=dict(files.job) or None,
        problems=_problems(told, status) if files.alive else (),
        **over,
        **facts,
    )


def events(story: Iterable[Mapping[str, Any]]) -> tuple[EventView, ...]:
    """What happened, in its order: the plan's words, phases, checkpoints, and processes that ended in error."""
    found = []
    for line in story:
        event = _event(line)
        if event is not None:
            found.append(EventView(time=float(line["time"]), **event))
    return tuple(found)


def timeline(story: Iterable[Mapping[str, Any]], until: float | None) -> tuple[SpanView, ...]:
    """Phases and processes; what goes on ends at `until` where the run is over (None: it goes on)."""
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


def checkpoint_of(name: str, manifest: Mapping[str, Any], view: int, step: int, time: float, path: str) -> CheckpointView:
    """A committed checkpoint by its manifest."""
    files = [*(manifest.get("files") or ()), *dict(manifest.get("tables") or {}).values(), manifest.get("records"), manifest.get("buffers")]
    size = sum(int(file.get("bytes") or 0) for file in files if isinstance(file, Mapping))
    return CheckpointView(
        step=step, view=view, time=time, bytes=size or None, path=path, final=manifest.get("final") is True,
        observed_request=int(numbers(manifest, "request")) or None,
    )  # fmt: skip


def _phase(files: RunFiles, status: JobStatus) -> tuple[Any, str, str]:
    phase, result = status.phase or "Pending", files.run.get("result")
    if result in ("Complete", "Failed", "Suspended"):
        told = part(files.live, "coordinator")
        for key, reason in (("diverged", DIVERGED), ("drift", DIFFER)):
            if result == "Complete" and told.get(key):
                return result, reason, str(told[key])
        failure = str(files.run.get("failure") or "")
        reason, _, message = failure.partition(": ")
        return result, reason if message else "", message or failure
    if files.alive or phase in TERMINAL:
        said = next((one for one in status.conditions if one.type == ("Failed" if phase == "Failed" else "Ready")), None)
        return phase, said.reason if said else "", said.message if said else ""
    return "Failed", "Killed", KILLED.format(run=files.id)


def _shards(files: RunFiles, status: JobStatus, phase: str) -> tuple[ShardView, ...]:
    told = {int(one.get("index", -1)): one for one in files.live.get("shards") or () if isinstance(one, Mapping)}
    held = seats(files.story)
    found = []
    for shard in status.shards:
        seat = held.get(("shard", shard.index), {})
        state = shard.state if files.alive or phase == "Complete" else "Ended"
        view = shard_view(shard.index, state, shard.attempt, told.get(shard.index))
        found.append(view.model_copy(update=_process(seat)))
    return tuple(found)


def _workers(files: RunFiles, phase: str) -> tuple[WorkerView, ...]:
    said = [one for one in part(files.live, "coordinator").get("workers") or () if isinstance(one, Mapping)]
    told = {int(one.get("rank", -1)): one for one in said}
    first = max((int(_number(one.get("clock")) or 0) for one in said), default=0)
    held = seats(files.story)
    ranks = {index for role, index in held if role == "worker"} | set(told)
    found = []
    for rank in sorted(rank for rank in ranks if rank >= 0):
        seat = held.get(("worker", rank), {})
        state = _ending(seat["end"]) if seat.get("end") else "Running" if files.alive else "Ended"
        view = worker_view(rank, state, int(seat.get("number") or 0), told.get(rank), first)
        found.append(view.model_copy(update=_process(seat)))
    return tuple(found)


def _process(seat: Mapping[str, Any]) -> dict[str, Any]:
    if not seat:
        return {}
    end = seat.get("end")
    bad = end if end and end.get("code") not in (0, None) and not end.get("asked") else None
    return {
        "name": seat["name"],
        "restarts": int(seat["starts"]) - 1,
        "started": _number(seat.get("at")),
        "problem": f"{seat['name']} {_how(bad)}" if bad else None,
    }


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


def _problems(told: Mapping[str, Any], status: JobStatus) -> tuple[str, ...]:
    own = [str(told[key]) for key in ("checkpointProblem", "failure") if told.get(key)]
    return (*own, *(f"worker {problem.index}: {problem.reason}: {problem.message}" for problem in status.workers.problems))


def _status(raw: Mapping[str, Any]) -> JobStatus:
    return JobStatus.read(raw)


def _lane(lane: str) -> tuple[int, int]:
    role, _, index = lane.partition(" ")
    return ("job", "shard", "worker").index(role), int(index or 0)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
