"""The operator's metrics: the one table of them, what this process counts of itself (Meter), and the series of jobs.

Names, types and labels are public: Prometheus reads them, docs/metrics.md lists them, rules and dashboard name them. A label's values are
bounded: by the API server's resources, by words of this operator, by the jobs that exist. Never a pod, a message or a number goes into a
label. The series of a job are made when the page is asked for, of the stored status and of what shard 0 last told. They go with the job.
Nothing that a pod says is believed unread.
"""

from __future__ import annotations

import asyncio
import collections
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, get_args

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

import psjob_operator
from psjob_operator.api.spec import Checkpoint
from psjob_operator.api.status import TERMINAL, unix
from psjob_operator.cluster.client import CORE_EVENTS, EVENTS, LEASES, NODES, SECRETS, WATCHED, JobKey
from psjob_operator.contract import STEP_PARTS

Kind = Literal["counter", "gauge", "histogram"]
JOB = ("namespace", "job")


@dataclass(frozen=True)
class Metric:
    """One metric; a counter's name ends in `_total`."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper edges of a histogram of ours; empty where shard 0 brings its own."""


TURN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
REQUEST_SECONDS = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0)
RECOVERY_SECONDS = (1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 300.0, 600.0, 1800.0)

INFO = Metric("psjob_operator_info", "gauge", "1; the label tells the operator's version.", ("version",))
READY = Metric(
    "psjob_operator_ready",
    "gauge",
    "1 once the CRD is served and every watched kind was listed and may be read in one namespace at least, else 0.",
)
REFUSED = Metric(
    "psjob_operator_namespace_refused",
    "gauge",
    "1 for each watched namespace in which the API server does not let the operator read something: nothing is done there. Empty: all.",
    ("namespace",),
)
LEADER = Metric("psjob_operator_leader", "gauge", "1 while this operator acts on jobs, 0 while it stands by.")
QUEUE_JOBS = Metric("psjob_operator_queue_jobs", "gauge", "Jobs that wait for their turn.")
QUEUE_OLDEST = Metric("psjob_operator_queue_oldest_seconds", "gauge", "How long the job that waits longest has waited; 0 where none waits.")
TURNS_RUNNING = Metric("psjob_operator_turns_running", "gauge", "Turns under way: jobs that are looked at now.")
BACKOFF_JOBS = Metric("psjob_operator_backoff_jobs", "gauge", "Jobs whose last turn failed and is tried again after a growing pause.")
TURNS = Metric(
    "psjob_operator_turns_total",
    "counter",
    "Turns by result: ok, api (the API server refused or gave no answer), error (a fault of the operator).",
    ("result",),
)
TURN = Metric("psjob_operator_turn_seconds", "histogram", "Seconds of a turn.", (), TURN_SECONDS)
REQUESTS = Metric(
    "psjob_operator_api_requests_total",
    "counter",
    "Requests to the API server; the code is that of HTTP, or none where no answer came. Watches are counted when they are opened.",
    ("verb", "resource", "code"),
)
REQUEST = Metric(
    "psjob_operator_api_request_seconds", "histogram", "Seconds of a request, watches left out.", ("verb", "resource"), REQUEST_SECONDS
)
ERRORS = Metric(
    "psjob_operator_api_errors_total",
    "counter",
    "Requests that were refused or not answered, by code and by the API server's reason (Timeout and Connection are the operator's own).",
    ("code", "reason"),
)
RELISTS = Metric(
    "psjob_operator_relists_total", "counter", "Lists before a new watch: the first one, and one whenever a watch was lost.", ("resource",)
)
WATCH_EVENTS = Metric("psjob_operator_watch_events_total", "counter", "Objects that lists and watches brought.", ("resource",))
OBJECTS = Metric("psjob_operator_objects", "gauge", "Objects that the operator knows.", ("resource",))
PULLS = Metric(
    "psjob_operator_progress_pulls_total",
    "counter",
    "Questions to shard 0 of a job, by result: ok, missed (out of reach, or not proven).",
    ("result",),
)
RECOVERY = Metric(
    "psjob_recovery_seconds",
    "histogram",
    "Seconds from when the loss of a process was seen to the first step after it, of all jobs.",
    ("cause",),
    RECOVERY_SECONDS,
)
JOBS = Metric("psjob_jobs", "gauge", "Jobs.", ("namespace", "phase"))

PHASE = Metric("psjob_job_phase", "gauge", "1 for the phase that the job is in; the others have no series.", (*JOB, "phase"))
SHARDS = Metric("psjob_job_shards", "gauge", "Shards declared.", JOB)
SHARDS_READY = Metric("psjob_job_shards_ready", "gauge", "Shards that serve; 0 of a job that has failed.", JOB)
WORKERS = Metric("psjob_job_workers", "gauge", "Workers declared.", JOB)
WORKERS_READY = Metric("psjob_job_workers_ready", "gauge", "Workers that run, or have succeeded; 0 of a job that has failed.", JOB)
RESTARTS = Metric("psjob_job_restarts_total", "counter", "Starts beyond the first, by cause.", (*JOB, "cause"))
CONTENDED = Metric(
    "psjob_job_contended", "gauge", "1 while another operator, or another controller, keeps changing an object of the job.", JOB
)
FAILURES = Metric("psjob_job_failures_counted", "gauge", "Failures that count against backoffLimit now.", JOB)
INTERRUPTED = Metric(
    "psjob_job_interrupted_seconds", "gauge", "How long training has made no step since a loss; absent while it continues.", JOB
)
LAST_RECOVERY = Metric("psjob_job_last_recovery_seconds", "gauge", "Seconds that the last recovery took.", JOB)
STEPS_LOST = Metric("psjob_job_steps_lost_total", "counter", "Steps done again after going back to a checkpoint.", JOB)
UPDATES_LOST = Metric("psjob_job_updates_lost_total", "counter", "Updates lost with lost shards (async, bounded).", JOB)
CHECKPOINT_AGE = Metric(
    "psjob_job_checkpoint_age_seconds",
    "gauge",
    "Age of the last committed checkpoint of a job that is Running or Recovering; without one, time since the job began.",
    JOB,
)
CHECKPOINT_INTERVAL = Metric("psjob_job_checkpoint_interval_seconds", "gauge", "Time between two checkpoints, as the job asks for it.", JOB)
FINISHED = Metric("psjob_job_completion_time_seconds", "gauge", "Unix time at which the job was complete or failed.", JOB)
CHECKPOINT_STEP = Metric("psjob_job_checkpoint_step", "gauge", "Step of the last committed checkpoint.", JOB)
CHECKPOINT_BYTES = Metric("psjob_job_checkpoint_bytes", "gauge", "Size of its files together.", JOB)
STAGE_WORKERS_READY = Metric("psjob_job_stage_workers_ready", "gauge", "Workers of a stage that run, or have succeeded.", (*JOB, "stage"))
STAGE_STEP = Metric("psjob_job_stage_step", "gauge", "Lowest complete step of a stage's workers.", (*JOB, "stage"))
STAGE_IDLE = Metric(
    "psjob_job_stage_idle_share",
    "gauge",
    "Part of the time of the last 32 steps in which a stage's workers waited for activations, gradients or shards, 0 to 1: their mean.",
    (*JOB, "stage"),
)
STAGE_STALENESS = Metric(
    "psjob_job_stage_staleness_updates",
    "gauge",
    "Updates between the weights that a stage's gradients were computed on and those they are applied to; 0 where steps are flushes.",
    (*JOB, "stage"),
)
STAGE_MEMORY = Metric(
    "psjob_job_stage_peak_memory_bytes",
    "gauge",
    "The most RAM that one worker of a stage has held since its process began.",
    (*JOB, "stage"),
)
STEP = Metric("psjob_job_step", "gauge", "Lowest complete step of all workers. It goes back where a recovery undoes steps.", JOB)
RATE = Metric("psjob_job_steps_per_second", "gauge", "Steps a second, pauses such as a restart left out.", JOB)
LOSS = Metric("psjob_job_loss", "gauge", "Last loss that the script reported.", JOB)
WAIT_SHARE = Metric(
    "psjob_job_wait_share",
    "gauge",
    "Part of the time in which scripts waited for shards and other workers, 0 to 1: the mean of all workers.",
    JOB,
)
STEP_PART = Metric(
    "psjob_job_step_part_seconds",
    "gauge",
    "Seconds of a worker's step that go to a part of it, of the last minute mostly: the mean of all workers. Together they are the step.",
    (*JOB, "part"),
)
PUSH_BYTES = Metric("psjob_job_push_bytes_total", "counter", "Bytes of pushes as they travelled, to all shards.", JOB)
PUSHES = Metric("psjob_job_pushes_total", "counter", "Pushes that counted on shard 0: one per worker and step.", JOB)
PROGRESS_AGE = Metric(
    "psjob_job_progress_age_seconds", "gauge", "Age of what shard 0 last told: of the other series that come from it.", JOB
)
STALENESS = Metric(
    "psjob_push_staleness",
    "histogram",
    "Updates between the weights that a gradient was computed on and those it is applied to, of all shards.",
    JOB,
)
GAP = Metric(
    "psjob_push_gap", "histogram", "Root mean square of what the weights have moved between, estimated on samples of all shards'.", JOB
)

OF_OPERATOR = (
    INFO, READY, REFUSED, LEADER, QUEUE_JOBS, QUEUE_OLDEST, TURNS_RUNNING, BACKOFF_JOBS, TURNS, TURN, REQUESTS, REQUEST, ERRORS, RELISTS,
    WATCH_EVENTS, OBJECTS, PULLS,
)  # fmt: skip
OF_ALL_JOBS = (JOBS, RECOVERY)
OF_A_JOB = (
    PHASE, SHARDS, SHARDS_READY, WORKERS, WORKERS_READY, RESTARTS, CONTENDED, FAILURES, INTERRUPTED, LAST_RECOVERY, STEPS_LOST,
    UPDATES_LOST, CHECKPOINT_AGE, CHECKPOINT_INTERVAL, CHECKPOINT_STEP, CHECKPOINT_BYTES, FINISHED, STAGE_WORKERS_READY,
)  # fmt: skip
TOLD_BY_SHARD_0 = (
    STEP, RATE, LOSS, WAIT_SHARE, STEP_PART, PUSH_BYTES, PUSHES, PROGRESS_AGE, STALENESS, GAP, STAGE_STEP, STAGE_IDLE, STAGE_STALENESS,
    STAGE_MEMORY,
)  # fmt: skip
METRICS = (*OF_OPERATOR, *OF_ALL_JOBS, *OF_A_JOB, *TOLD_BY_SHARD_0)


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
KNOWN = frozenset(kind.plural for kind in (*WATCHED, NODES, EVENTS, CORE_EVENTS, LEASES, SECRETS))
REASONS = frozenset((
    "Unauthorized", "Forbidden", "NotFound", "AlreadyExists", "Conflict", "Gone", "Invalid", "ServerTimeout", "StoreReadError",
    "TooManyRequests", "BadRequest", "MethodNotAllowed", "NotAcceptable", "RequestEntityTooLarge", "UnsupportedMediaType",
    "InternalError", "Expired", "ServiceUnavailable", "Timeout", "Connection",
))  # fmt: skip
"""Words of the API server, and ours. A webhook may say any other: those are Other."""
TurnResult = Literal["ok", "api", "error"]
_Made = TypeVar("_Made", Counter, Gauge)


class QueueSize(Protocol):
    """What the page asks of a queue."""

    def waiting(self) -> int: ...
    def running(self) -> int: ...
    def backing_off(self) -> int: ...
    def oldest(self) -> float: ...


@dataclass(frozen=True)
class Sources:
    """Where the page looks when it is asked for."""

    queue: QueueSize
    objects: Callable[[], Mapping[str, int]]
    """How many objects of each kind are known."""
    jobs: Callable[[], list[JobReading]]
    ready: Callable[[], bool]
    refused: Callable[[], Iterable[str]] = tuple
    """Namespaces of which something may not be read; an empty name stands for all."""


class Meter:
    """Counts begin at 0 with this process."""

    def __init__(self) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._turns, self._turn = self._counter(TURNS), self._histogram(TURN)
        self._requests, self._request = self._counter(REQUESTS), self._histogram(REQUEST)
        self._errors, self._relists = self._counter(ERRORS), self._counter(RELISTS)
        self._heard, self._pulls = self._counter(WATCH_EVENTS), self._counter(PULLS)
        self._recovery = self._histogram(RECOVERY)
        self._leader, self._ready = self._gauge(LEADER), self._gauge(READY)
        self._waiting, self._oldest = self._gauge(QUEUE_JOBS), self._gauge(QUEUE_OLDEST)
        self._running, self._backoff = self._gauge(TURNS_RUNNING), self._gauge(BACKOFF_JOBS)
        self._refused = self._gauge(REFUSED)
        self._objects = self._gauge(OBJECTS)
        self._gauge(INFO).labels(psjob_operator.__version__).set(1)
        prometheus_client.ProcessCollector(registry=self.registry)
        for result in get_args(TurnResult):
            self._turns.labels(result)  # from 0 on: the first fault is an increase
        self.leads(True)

    # -- told by others ----------------------------------------------------------------------------

    def leads(self, leading: bool) -> None:
        """Whether this operator acts on jobs, and tells of them; without other replicas it does from the beginning."""
        self._leading = leading
        self._leader.set(leading)

    def turn(self, result: TurnResult, seconds: float) -> None:
        """A turn of a job is over."""
        self._turns.labels(result).inc()
        self._turn.observe(seconds)

    def answered(self, verb: str, path: str, code: int, seconds: float) -> None:
        """The API server answered a request."""
        resource = resource_of(path)
        self._requests.labels(verb, resource, str(code)).inc()
        self._request.labels(verb, resource).observe(seconds)

    def unanswered(self, verb: str, path: str, seconds: float) -> None:
        """No answer came to a request."""
        resource = resource_of(path)
        self._requests.labels(verb, resource, "none").inc()
        self._request.labels(verb, resource).observe(seconds)

    def failed(self, code: int, reason: str) -> None:
        """A request came to an error, code 0 where no answer came."""
        self._errors.labels(str(code) if code else "none", reason if reason in REASONS else "Other").inc()

    def watched(self, verb: str, resource: str, code: int) -> None:
        """The library that watches has listed, or opened a watch."""
        self._requests.labels(verb, resource, str(code)).inc()

    def relisted(self, resource: str) -> None:
        """A watch begins after a list, rather than after another watch."""
        self._relists.labels(resource).inc()

    def heard(self, resource: str) -> None:
        """A list or watch brought an object."""
        self._heard.labels(resource).inc()

    def pulled(self, answered: bool) -> None:
        """Shard 0 of a job was asked."""
        self._pulls.labels("ok" if answered else "missed").inc()

    def recovered(self, cause: str, seconds: float) -> None:
        """A job made its first step after a loss."""
        self._recovery.labels(cause).observe(seconds)

    # -- the page ----------------------------------------------------------------------------------

    async def page(self, sources: Sources, now: float) -> bytes:
        """The page at unix time `now`. What is looked at in the loop is little; a thread writes it, since a thousand jobs take a while."""
        queue = sources.queue
        self._waiting.set(queue.waiting())
        self._oldest.set(queue.oldest())
        self._running.set(queue.running())
        self._backoff.set(queue.backing_off())
        self._ready.set(sources.ready())
        self._refused.clear()
        for namespace in sources.refused():
            self._refused.labels(namespace).set(1)
        for resource, count in sources.objects().items():
            self._objects.labels(resource).set(count)
        jobs = sources.jobs() if self._leading else []
        return await asyncio.to_thread(metrics_text, self.registry, jobs, now)

    def _counter(self, metric: Metric) -> Counter:
        return _made(Counter, metric, self.registry)

    def _gauge(self, metric: Metric) -> Gauge:
        return _made(Gauge, metric, self.registry)

    def _histogram(self, metric: Metric) -> Histogram:
        return Histogram(metric.name, metric.help, metric.labels, registry=self.registry, buckets=metric.buckets)


def _made(kind: type[_Made], metric: Metric, registry: CollectorRegistry) -> _Made:
    return kind(metric.name, metric.help, metric.labels, registry=registry)


@dataclass(frozen=True)
class _Scrape(Collector):
    own: CollectorRegistry
    jobs: Iterable[Family]

    def collect(self) -> Iterator[Family]:
        yield from self.own.collect()
        yield from self.jobs


def metrics_text(own: CollectorRegistry, jobs: list[JobReading], now: float) -> bytes:
    """The whole page as text."""
    return prometheus_client.generate_latest(_Scrape(own, job_families(jobs, now)))


def resource_of(path: str) -> str:
    """The resource of an API path, with its subresource: `pods`, `pstrainingjobs/status`; `other` for what is no object of ours."""
    parts = path.strip("/").split("/")
    parts = parts[2:] if parts[0] == "api" else parts[3:] if parts[0] == "apis" else []
    if parts[:1] == ["namespaces"]:
        parts = parts[2:]
    if not parts or parts[0] not in KNOWN:
        return "other"
    return f"{parts[0]}/status" if parts[2:] == ["status"] else parts[0]


MOST_BUCKETS = 64
PHASES = ("Pending", "Running", "Recovering", "Suspended", "Complete", "Failed")


@dataclass(frozen=True)
class JobReading:
    """A job as it is known now."""

    key: JobKey
    brief: Mapping[str, Any]
    """Of JobEntry."""
    status: Mapping[str, Any]
    told: Mapping[str, Any] | None = None
    """What shard 0 last said (contract.STATUS_KEYS); None where it could not be asked."""
    told_at: float | None = None


def job_families(jobs: Iterable[JobReading], now: float) -> Iterator[Family]:
    """Every family that is about jobs, at unix time `now`."""
    page = _JobSeries()
    counted: collections.Counter[tuple[str, str]] = collections.Counter()
    for job in sorted(jobs, key=lambda seen: seen.key):
        counted[job.key.namespace, _phase(job)] += 1
        _of_status(page, job, now)
        _of_told(page, job, now)
    for labels, count in sorted(counted.items()):
        page.set(JOBS, labels, count)
    return page.families()


class _JobSeries:
    def __init__(self) -> None:
        kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
        shown = (JOBS, *OF_A_JOB, *TOLD_BY_SHARD_0)
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


def _of_status(page: _JobSeries, job: JobReading, now: float) -> None:
    labels, status = tuple(job.key), job.status
    workers, restarts, kept = _map(status, "workers"), _map(status, "restarts"), _map(status, "checkpoint")
    page.set(PHASE, (*labels, _phase(job)), 1)
    for ready, declared, text in (
        (SHARDS_READY, SHARDS, status.get("shardsReady")),
        (WORKERS_READY, WORKERS, status.get("workersReady")),
    ):
        there, _, wanted = text.partition("/") if isinstance(text, str) else ("", "", "")
        if there.isdecimal() and wanted.isdecimal():
            page.set(ready, labels, 0 if _says(status, "Failed") else int(there))
            page.set(declared, labels, int(wanted))
    for name, stage in _stages(status):
        there, _, _ = str(stage.get("workersReady")).partition("/")
        page.set(STAGE_WORKERS_READY, (*labels, name), int(there) if there.isdecimal() else None)
    for cause, count in _map(restarts, "causes").items():
        page.set(RESTARTS, (*labels, str(cause)), count)
    page.set(CONTENDED, labels, 1 if _says(status, "Contended") else None)
    page.set(FAILURES, labels, restarts.get("counted", 0 if workers else None))
    page.set(STEPS_LOST, labels, restarts.get("stepsLost"))
    page.set(UPDATES_LOST, labels, restarts.get("updatesLost"))
    page.set(LAST_RECOVERY, labels, _map(status, "lastRecovery").get("durationSeconds"))
    page.set(INTERRUPTED, labels, _age(_map(status, "interruption").get("since"), now))
    page.set(CHECKPOINT_STEP, labels, kept.get("step"))
    page.set(CHECKPOINT_BYTES, labels, kept.get("bytes"))
    if _trains(status) and not _map(job.brief, "checkpoint").get("disabled"):
        page.set(CHECKPOINT_AGE, labels, _age(_since(job, now), now))
        page.set(CHECKPOINT_INTERVAL, labels, _interval(job))
    page.set(FINISHED, labels, unix(_text(status.get("completionTime"))))


def _trains(status: Mapping[str, Any]) -> bool:
    """Its processes have all been there, and it has not ended or been suspended since."""
    return bool(_map(status, "internal").get("readyTime")) and not any(_says(status, kind) for kind in TERMINAL)


def _says(status: Mapping[str, Any], kind: str) -> bool:
    """A condition of this type is True."""
    told = status.get("conditions")
    found = (it for it in told if isinstance(it, Mapping)) if isinstance(told, list | tuple) else ()
    return any(it.get("type") == kind and it.get("status") == "True" for it in found)


def _since(job: JobReading, now: float) -> float | None:
    """From when a checkpoint is waited for: the last one, or the job's start, which a resumption sets anew."""
    kept = _newest(job, now) or unix(_text(_map(job.status, "checkpoint").get("time")))
    times = [at for at in (kept, unix(_text(job.status.get("startTime")))) if at is not None]
    return max(times, default=None)


def _interval(job: JobReading) -> float:
    """Of spec.checkpoint.periodSeconds; of what cannot be read, the default."""
    return _number(_map(job.brief, "checkpoint").get("periodSeconds")) or Checkpoint().period_seconds


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _newest(job: JobReading, now: float) -> float | None:
    """When the last checkpoint was committed, as shard 0 tells it: newer than the status, which is written once a minute."""
    age = _number(_map(_coordinator(job), "checkpoint").get("age"))
    return job.told_at - age if job.told_at is not None and age is not None and age >= 0 else None


def _of_told(page: _JobSeries, job: JobReading, now: float) -> None:
    labels, said = tuple(job.key), _coordinator(job)
    if not said:
        return
    page.set(STEP, labels, said.get("step"))
    page.set(LOSS, labels, said.get("loss"))
    page.set(PUSH_BYTES, labels, _natural(said.get("pushBytes")))
    page.set(PUSHES, labels, _natural(_map(job.told or {}, "counters").get("applied")))
    page.histogram(STALENESS, labels, said.get("staleness"))
    page.histogram(GAP, labels, said.get("gap"))
    if not _trains(job.status):
        return  # a job that has ended or rests has no rate
    page.set(RATE, labels, said.get("rate"))
    told = said.get("workers")
    idle = [number for worker in told if (number := _idle(worker)) is not None] if isinstance(told, list) else []
    page.set(WAIT_SHARE, labels, sum(idle) / len(idle) if idle else None)
    parts = _map(said, "stepParts")
    for name in STEP_PARTS:  # what else is told is no series
        page.set(STEP_PART, (*labels, name), _natural(parts.get(name)))
    declared = dict(_stages(job.status))
    for name, stage in _stages(said):
        if declared.pop(name, None) is not None:  # what is told of a stage that the job does not have is no series
            page.set(STAGE_STEP, (*labels, name), _natural(stage.get("step")))
            page.set(STAGE_IDLE, (*labels, name), _idle(stage))
            page.set(STAGE_STALENESS, (*labels, name), _natural(stage.get("delay")))
            page.set(STAGE_MEMORY, (*labels, name), _natural(stage.get("peakBytes")))
    page.set(PROGRESS_AGE, labels, None if job.told_at is None else max(0.0, now - job.told_at))


def _stages(said: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """By name."""
    told = said.get("stages")
    found = [stage for stage in told if isinstance(stage, Mapping)] if isinstance(told, list) else []
    return [(stage["name"], stage) for stage in found if isinstance(stage.get("name"), str)]


def _coordinator(job: JobReading) -> Mapping[str, Any]:
    return _map(job.told or {}, "coordinator")


def _phase(job: JobReading) -> str:
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
