"""What this process counts of itself: turns, requests, lists, recoveries. Other parts call it as an observer and know no library."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar, get_args

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

import psjob_operator
from psjob_operator.cluster import jobmetrics, metrics
from psjob_operator.cluster.kinds import CORE_EVENTS, EVENTS, LEASES, NODES, SECRETS, WATCHED
from psjob_operator.cluster.metrics import Metric

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
    jobs: Callable[[], list[jobmetrics.Seen]]
    ready: Callable[[], bool]
    refused: Callable[[], Iterable[str]] = tuple
    """Namespaces of which something may not be read; an empty name stands for all."""


class Meter:
    """Counts begin at 0 with this process."""

    def __init__(self) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._turns, self._turn = self._counter(metrics.TURNS), self._histogram(metrics.TURN)
        self._requests, self._request = self._counter(metrics.REQUESTS), self._histogram(metrics.REQUEST)
        self._errors, self._relists = self._counter(metrics.ERRORS), self._counter(metrics.RELISTS)
        self._heard, self._pulls = self._counter(metrics.WATCH_EVENTS), self._counter(metrics.PULLS)
        self._recovery = self._histogram(metrics.RECOVERY)
        self._leader, self._ready = self._gauge(metrics.LEADER), self._gauge(metrics.READY)
        self._waiting, self._oldest = self._gauge(metrics.QUEUE_JOBS), self._gauge(metrics.QUEUE_OLDEST)
        self._running, self._backoff = self._gauge(metrics.TURNS_RUNNING), self._gauge(metrics.BACKOFF_JOBS)
        self._refused = self._gauge(metrics.REFUSED)
        self._objects = self._gauge(metrics.OBJECTS)
        self._gauge(metrics.INFO).labels(psjob_operator.__version__).set(1)
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
        return await asyncio.to_thread(written, self.registry, jobs, now)

    def _counter(self, metric: Metric) -> Counter:
        return _made(Counter, metric, self.registry)

    def _gauge(self, metric: Metric) -> Gauge:
        return _made(Gauge, metric, self.registry)

    def _histogram(self, metric: Metric) -> Histogram:
        return Histogram(metric.name, metric.help, metric.labels, registry=self.registry, buckets=metric.buckets)


def _made(kind: type[_Made], metric: Metric, registry: CollectorRegistry) -> _Made:
    return kind(metric.name, metric.help, metric.labels, registry=registry)


@dataclass(frozen=True)
class _Page(Collector):
    own: CollectorRegistry
    jobs: Iterable[Family]

    def collect(self) -> Iterator[Family]:
        yield from self.own.collect()
        yield from self.jobs


def written(own: CollectorRegistry, jobs: list[jobmetrics.Seen], now: float) -> bytes:
    """The whole page as text."""
    return prometheus_client.generate_latest(_Page(own, jobmetrics.families(jobs, now)))


def resource_of(path: str) -> str:
    """The resource of an API path, with its subresource: `pods`, `pstrainingjobs/status`; `other` for what is no object of ours."""
    parts = path.strip("/").split("/")
    parts = parts[2:] if parts[0] == "api" else parts[3:] if parts[0] == "apis" else []
    if parts[:1] == ["namespaces"]:
        parts = parts[2:]
    if not parts or parts[0] not in KNOWN:
        return "other"
    return f"{parts[0]}/status" if parts[2:] == ["status"] else parts[0]
