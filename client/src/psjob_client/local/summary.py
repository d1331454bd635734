"""What is left to say when a run has ended: `--summary` as JSON, and the metrics that the script reported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psjob_client.local.backend import Backend
from psjob_client.local.lateness import lateness
from psjob_client.local.probe import numbers, passes_again


def summary(backend: Backend, result: str, seconds: float) -> dict[str, Any]:
    """The whole of a run. Counters are those last heard of each attempt of each shard; what died unheard is not in them."""
    watch, status = backend.watch, backend.status
    told = watch.coordinator
    return {
        "result": result,
        "run": backend.folder.run,
        "steps": watch.step,
        "pushes": watch.total("pushes"),
        "applied": watch.total("applied"),
        "dropped": watch.total("dropped"),
        "duplicates_refused": watch.total("duplicatesRefused"),
        "updates_lost": watch.total("updatesLost"),
        "crashes": watch.total("crashes"),
        "passes_again": passes_again(told),
        "restarts": dict(status.restarts.causes) if status else {},
        "view": (status and status.view) or 0,
        "attempts": [shard.attempt for shard in status.shards] if status else [],
        "seconds": round(seconds, 3),
        "codecs": told.get("codecs"),
        "transport": told.get("transport"),
        **(lateness(watch.told.values()) or {"lag": None, "gap": None}),
        "warning": told.get("warning"),
        "non_finite": told.get("nonFinite"),
        "large_push": told.get("largePush"),
        "diverged": told.get("diverged"),
        "drift": told.get("drift"),
        "data_problem": told.get("dataProblem"),
        "buffers_differ": told.get("buffersDiffer"),
        "loss": told.get("loss"),
        "metrics": metrics(told),
        "weights_sha256": told.get("weightsSha256"),
        "checkpoints": max(len(watch.manifests), int(numbers(told, "committed"))),
        "checkpoint": told.get("checkpoint"),
        "workers": [worker for worker in told.get("workers") or () if isinstance(worker, dict)],
        "recoveries": [recovery.as_json() for recovery in watch.recoveries],
        "failure": failure(backend),
    }


def metrics(coordinator: Mapping[str, Any]) -> dict[str, float]:
    """Numbers that the script reported, in the order in which it first did."""
    told = coordinator.get("metrics")
    return {str(name): numbers(told, name) for name in told} if isinstance(told, Mapping) else {}


def metric_line(name: str, value: float) -> str:
    """`test accuracy 0.978`."""
    digits = f"{value:.3f}" if value == 0 or 0.001 <= abs(value) < 1000 else f"{value:.4g}"
    return f"{name.replace('_', ' ')} {digits}"


def failure(backend: Backend) -> str | None:
    """Why the job failed, in the plan's words or ours; None where it did not."""
    if backend.verdict:
        return backend.verdict
    for condition in backend.status.conditions if backend.status else ():
        if condition.type == "Failed" and condition.status == "True":
            return f"{condition.reason}: {condition.message}"
    return None
