"""What shards tell on their status ports (contract.STATUS_KEYS), as views. Read leniently: it is a stranger's JSON. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psjob_client.jobs.view import CheckpointView, Lateness, ProgressView, ShardView, StageView, TransferView, WorkerView
from psjob_client.local.status import WARNINGS, is_number, numbers, part


def coordinator_facts(told: Mapping[str, Any], time: float | None) -> dict[str, Any]:
    """Fields of JobView that the coordinator knows; `time`: when it said so."""
    if not told:
        return {}
    lag, gap = lateness(part(told, "lag")), lateness(part(told, "gap"))
    return {
        "progress": progress(told, time),
        "checkpoint": checkpoint(part(told, "checkpoint")),
        "transfer": transfer(part(told, "checkpointProgress")),
        "codecs": _text(told.get("codecs")),
        "transport": _text(told.get("transport")),
        "lag": lag,
        "gap": gap,
        "stages": stages(told),
        "warnings": tuple(str(told[name]) for name in WARNINGS if told.get(name)),
        "weights_sha256": _text(told.get("weightsSha256")),
    }


def progress(told: Mapping[str, Any], time: float | None) -> ProgressView:
    """How far training is."""
    metrics = part(told, "metrics")
    return ProgressView(
        step=int(numbers(told, "step")),
        total=int(numbers(told, "totalSteps")) or None,
        rate=finite(told.get("rate")),
        eta=finite(told.get("eta")),
        loss=finite(told.get("loss")),
        metrics={str(name): value for name, one in metrics.items() if (value := finite(one)) is not None},
        waiting=_text(told.get("waiting")),
        time=time,
    )


def checkpoint(told: Mapping[str, Any]) -> CheckpointView | None:
    """The last committed one."""
    if not told:
        return None
    return CheckpointView(
        step=int(numbers(told, "step")),
        view=int(numbers(told, "view")),
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
        transfer=transfer(part(told, "transfer")),
        lag=lateness(part(told, "lag")),
        gap=lateness(part(told, "gap")),
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


def stages(told: Mapping[str, Any]) -> tuple[StageView, ...]:
    """How each stage stands; none of a job without stages."""
    said = told.get("stages")
    return tuple(
        StageView(
            name=str(one.get("name")),
            workers_ready=f"{int(numbers(one, 'ready'))}/{int(numbers(one, 'desired'))}",
            step=_count(one, "step"),
            delay=finite(one.get("delay")),
            idle=finite(one.get("idle")),
            memory_bytes=int(numbers(one, "rssBytes")) or None,
            peak_memory_bytes=int(numbers(one, "peakBytes")) or None,
            peak_device_bytes=int(numbers(one, "devicePeakBytes")) or None,
            waiting=_text(one.get("waiting")),
        )
        for one in (said if isinstance(said, list | tuple) else ())
        if isinstance(one, Mapping)
    )


def lateness(told: Mapping[str, Any]) -> Lateness | None:
    """A histogram of the contract; None where there is none."""
    count = int(numbers(told, "count"))
    if not count:
        return None
    buckets = tuple((float(edge), float(held)) for edge, held in told.get("buckets") or () if finite(edge) is not None)
    return Lateness(count=count, mean=numbers(told, "sum") / count, max=numbers(told, "max"), buckets=buckets)


def transfer(told: Mapping[str, Any]) -> TransferView | None:
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
