"""The metrics of jobs, made when the page is asked for of the status that is stored and of what shard 0 last told. A job that goes takes
its series with it. Nothing that a pod says is believed unread.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family

from psjob_operator.api.quantity import seconds
from psjob_operator.api.spec import Checkpoint
from psjob_operator.api.status import unix
from psjob_operator.cluster import metrics as m
from psjob_operator.cluster.metrics import Metric
from psjob_operator.cluster.queue import Key

MOST_BUCKETS = 64
DEFAULT_INTERVAL = str(Checkpoint.model_fields["interval"].default)
ACTIVE = ("Running", "Recovering")
PHASES = ("Pending", "Running", "Recovering", "Suspended", "Complete", "Failed")


@dataclass(frozen=True)
class Seen:
    """A job as it is known now."""

    key: Key
    brief: Mapping[str, Any]
    """Of JobEntry."""
    status: Mapping[str, Any]
    told: Mapping[str, Any] | None = None
    """What shard 0 last said (contract.STATUS_KEYS); None where it could not be asked."""
    told_at: float | None = None


def families(jobs: Iterable[Seen], now: float) -> Iterator[Family]:
    """Every family that is about jobs, at unix time `now`."""
    page = _Page()
    counted: Counter[tuple[str, str]] = Counter()
    for job in sorted(jobs, key=lambda seen: seen.key):
        counted[job.key.namespace, _phase(job)] += 1
        _of_status(page, job, now)
        _of_told(page, job, now)
    for labels, count in sorted(counted.items()):
        page.set(m.JOBS, labels, count)
    return page.families()


class _Page:
    def __init__(self) -> None:
        kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
        shown = (m.JOBS, *m.OF_A_JOB, *m.TOLD_BY_SHARD_0)
        self._families = {metric.name: kinds[metric.kind](metric.name, metric.help, labels=metric.labels) for metric in shown}

    def set(self, metric: Metric, labels: tuple[str, ...], value: Any) -> None:
        """Add a sample; no number is none."""
        number = _number(value)
        if number is not None:
            self._families[metric.name].add_metric(labels, number)

    def histogram(self, metric: Metric, labels: tuple[str, ...], told: Any) -> None:
        """Add a histogram as a pod tells it: a number that is none is 0, and buckets never fall."""
        if not isinstance(told, Mapping) or not isinstance(told.get("buckets"), list):
            return
        count, held = _at_least_0(told.get("count")), 0.0
        buckets: dict[float, float] = {}
        for bucket in told["buckets"][:MOST_BUCKETS]:
            if isinstance(bucket, list) and len(bucket) == 2:
                held = min(max(held, _at_least_0(bucket[1])), count)
                buckets[_at_least_0(bucket[0])] = held
        edges = [(f"{edge:g}", buckets[edge]) for edge in sorted(buckets)]
        rising = [(edge, max(below for _, below in edges[: number + 1])) for number, (edge, _) in enumerate(edges)]
        self._families[metric.name].add_metric(labels, [*dict(rising).items(), ("+Inf", count)], _at_least_0(told.get("sum")))

    def families(self) -> Iterator[Family]:
        return iter(self._families.values())


def _of_status(page: _Page, job: Seen, now: float) -> None:
    labels, status, phase = tuple(job.key), job.status, _phase(job)
    workers, restarts, kept = _map(status, "workers"), _map(status, "restarts"), _map(status, "checkpoint")
    page.set(m.PHASE, (*labels, phase), 1)
    for ready, declared, text in (
        (m.SHARDS_READY, m.SHARDS, status.get("shardsReady")),
        (m.WORKERS_READY, m.WORKERS, status.get("workersReady")),
    ):
        there, _, wanted = text.partition("/") if isinstance(text, str) else ("", "", "")
        if there.isdecimal() and wanted.isdecimal():
            page.set(ready, labels, 0 if phase == "Failed" else int(there))
            page.set(declared, labels, int(wanted))
    for name, stage in _stages(status):
        there, _, _ = str(stage.get("workersReady")).partition("/")
        page.set(m.STAGE_WORKERS_READY, (*labels, name), int(there) if there.isdecimal() else None)
    for cause, count in _map(restarts, "causes").items():
        page.set(m.RESTARTS, (*labels, str(cause)), count)
    page.set(m.CONTENDED, labels, 1 if _says(status, "Contended") else None)
    page.set(m.FAILURES, labels, restarts.get("counted", 0 if workers else None))
    page.set(m.STEPS_LOST, labels, restarts.get("stepsLost"))
    page.set(m.UPDATES_LOST, labels, restarts.get("updatesLost"))
    page.set(m.LAST_RECOVERY, labels, _map(status, "lastRecovery").get("seconds"))
    page.set(m.INTERRUPTED, labels, _age(_map(status, "interruption").get("since"), now))
    page.set(m.CHECKPOINT_STEP, labels, kept.get("step"))
    page.set(m.CHECKPOINT_BYTES, labels, kept.get("bytes"))
    if phase in ACTIVE and not _map(job.brief, "checkpoint").get("disabled"):
        page.set(m.CHECKPOINT_AGE, labels, _age(_since(job, now), now))
        page.set(m.CHECKPOINT_INTERVAL, labels, _interval(job))
    page.set(m.FINISHED, labels, unix(_text(status.get("completionTime"))))


def _says(status: Mapping[str, Any], kind: str) -> bool:
    """A condition of this type is True."""
    told = status.get("conditions")
    found = (it for it in told if isinstance(it, Mapping)) if isinstance(told, list | tuple) else ()
    return any(it.get("type") == kind and it.get("status") == "True" for it in found)


def _since(job: Seen, now: float) -> float | None:
    """From when a checkpoint is waited for: the last one, or the job's start, which a resumption sets anew."""
    kept = _newest(job, now) or unix(_text(_map(job.status, "checkpoint").get("time")))
    times = [at for at in (kept, unix(_text(job.status.get("startTime")))) if at is not None]
    return max(times, default=None)


def _interval(job: Seen) -> float:
    """Of spec.checkpoint.interval; of what cannot be read, the default."""
    try:
        return seconds(str(_map(job.brief, "checkpoint").get("interval", DEFAULT_INTERVAL)))
    except ValueError:
        return seconds(DEFAULT_INTERVAL)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _newest(job: Seen, now: float) -> float | None:
    """When the last checkpoint was committed, as shard 0 tells it: newer than the status, which is written once a minute."""
    age = _number(_map(_coordinator(job), "checkpoint").get("age"))
    return job.told_at - age if job.told_at is not None and age is not None and age >= 0 else None


def _of_told(page: _Page, job: Seen, now: float) -> None:
    labels, said = tuple(job.key), _coordinator(job)
    if not said:
        return
    page.set(m.STEP, labels, said.get("step"))
    page.set(m.LOSS, labels, said.get("loss"))
    page.set(m.PUSH_BYTES, labels, _natural(said.get("pushBytes")))
    page.set(m.PUSHES, labels, _natural(_map(job.told or {}, "counters").get("applied")))
    page.histogram(m.LAG, labels, said.get("lag"))
    page.histogram(m.GAP, labels, said.get("gap"))
    if _phase(job) not in ACTIVE:
        return  # a job that has ended or rests has no rate
    page.set(m.RATE, labels, said.get("rate"))
    told = said.get("workers")
    idle = [number for worker in told if (number := _idle(worker)) is not None] if isinstance(told, list) else []
    page.set(m.WAIT_SHARE, labels, sum(idle) / len(idle) if idle else None)
    declared = dict(_stages(job.status))
    for name, stage in _stages(said):
        if declared.pop(name, None) is not None:  # what is told of a stage that the job does not have is no series
            page.set(m.STAGE_STEP, (*labels, name), _natural(stage.get("step")))
            page.set(m.STAGE_IDLE, (*labels, name), _idle(stage))
            page.set(m.STAGE_DELAY, (*labels, name), _natural(stage.get("delay")))
            page.set(m.STAGE_MEMORY, (*labels, name), _natural(stage.get("peakBytes")))
    page.set(m.PROGRESS_AGE, labels, None if job.told_at is None else max(0.0, now - job.told_at))


def _stages(said: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """By name."""
    told = said.get("stages")
    found = [stage for stage in told if isinstance(stage, Mapping)] if isinstance(told, list) else []
    return [(stage["name"], stage) for stage in found if isinstance(stage.get("name"), str)]


def _coordinator(job: Seen) -> Mapping[str, Any]:
    return _map(job.told or {}, "coordinator")


def _phase(job: Seen) -> str:
    phase = job.status.get("phase")
    return phase if phase in PHASES else "Pending" if phase is None else "Unknown"


def _idle(of: Any) -> float | None:
    number = _number(of.get("idle")) if isinstance(of, Mapping) else None
    return None if number is None else min(1.0, max(0.0, number))


def _age(since: Any, now: float) -> float | None:
    at = unix(since) if isinstance(since, str) else since
    return None if at is None else max(0.0, now - at)


def _map(told: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = told.get(key)
    return found if isinstance(found, Mapping) else {}


def _number(value: Any) -> float | None:
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if known else None


def _natural(value: Any) -> float | None:
    number = _number(value)
    return None if number is None or number < 0 else number


def _at_least_0(value: Any) -> float:
    return max(0.0, _number(value) or 0.0)
