"""The operator as a process: wait for the CRD, watch, work; end when asked to, or when the watches end.

Log lines are text for people, or one JSON object a line for collectors, each with the job it is about. `Health` serves /livez, that the
loop turns; /readyz, that the CRD is served and the store is whole; /metrics for Prometheus. `check_installation` asks the cluster whether
an installed operator works: what `helm test` runs as a pod, with the operator's own rights.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import logging
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import aiohttp
from aiohttp import web

from psjob_operator.cluster import reconcile
from psjob_operator.cluster.cache import JobStore
from psjob_operator.cluster.client import (
    AGENT,
    JOBS,
    LEASES,
    OPTIONAL,
    WATCHED,
    ApiError,
    KubernetesClient,
    Limits,
    ResourceKind,
    load_configuration,
)
from psjob_operator.cluster.leader_election import Timing
from psjob_operator.cluster.lease import Candidate
from psjob_operator.cluster.metrics import CONTENT_TYPE, Meter, Sources
from psjob_operator.cluster.observe import Settings
from psjob_operator.cluster.operator_key import KeySecret, OperatorKey, default_file
from psjob_operator.cluster.queue import NEAR, Queue, urgency
from psjob_operator.cluster.watch import KindWatch, Places, Relist, WatchCallbacks, watch_jobs
from psjob_operator.render import NOBODY, Peer

DEEPEST_OBJECT = 10_000
"""Levels of nesting that the API server takes."""
RECURSION = 40_000
"""Calls of Python, of which a level may take several."""
_log = logging.getLogger(__name__)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Format = Literal["text", "json"]
BEAT = 1.0
STUCK = 60.0
CONNECTIONS = 32
"""At a time; the next to connect takes the place of the oldest connection."""
LINE_BYTES = 2048
"""Most bytes of one line of a request; of its headers there may be a hundred or so."""
LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class LeaseOptions:
    """The Lease that says which of several replicas takes turns."""

    namespace: str
    name: str
    timing: Timing = field(default_factory=Timing)


@dataclass(frozen=True)
class Options:
    """How this operator runs."""

    runtime_image: str
    shard_user: int | None = NOBODY
    """Of render.pod."""
    auto_encryption: str = "auto"
    """Of ObservedState."""
    askers: tuple[Peer, ...] = ()
    """Of Settings."""
    log_tails: bool = True
    """Of scrub.told."""
    kubeconfig: str | None = None
    namespaces: tuple[str, ...] = ()
    """Empty: all of them."""
    health_host: str = ""
    health_port: int = 8080
    limits: Limits = field(default_factory=Limits)
    turns: int = 8
    """Jobs looked at side by side; one more serves only those that lost something or are about to run."""
    relist_seconds: float = 600.0
    progress_seconds: float = 60.0
    crd_seconds: float = 5.0
    """How often it is asked whether the CRD is served."""
    key_file: Path = field(default_factory=default_file)
    """Of the operator's own key."""
    key_secret: KeySecret | None = None
    """What the file is mounted from; None: the file is made where it is missing."""
    lease: LeaseOptions | None = None
    """None: it takes turns without asking whether another does."""


async def run_operator(options: Options) -> int:
    """Run until SIGTERM or SIGINT (0), or until the watches end by themselves (1). Raises ConnectError, KeyFileError, OSError (port)."""
    stop = asyncio.Event()
    _on_signals(stop)
    read_deep_objects()
    configuration = await load_configuration(options.kubeconfig)
    own_key = OperatorKey(options.key_file, options.key_secret)
    own_key.load()
    gc.collect()
    gc.freeze()  # what was imported stays, and need not be looked through again and again
    meter = Meter()
    client = KubernetesClient(configuration, options.limits, AGENT, observer=meter)
    async with _candidate(options, meter) as candidate:
        if candidate is not None:
            client.before_write = candidate.check
        return await _start(options, client, own_key, candidate, meter, stop)


def read_deep_objects() -> None:
    """Let this process read whatever the API server stores: its lists of nested JSON go 10,000 levels deep, and Python's reader 1,000.

    A watch that cannot read one job would end the operator for all of them.
    """
    sys.setrecursionlimit(max(sys.getrecursionlimit(), RECURSION))
    try:
        json.loads("[" * DEEPEST_OBJECT + "]" * DEEPEST_OBJECT)
    except RecursionError:
        _log.warning("this Python cannot read JSON of %d levels: a job of so many would end the operator; use Python 3.11", DEEPEST_OBJECT)


@dataclass(frozen=True)
class Parts:
    """The parts of one operator, which `_start` makes and `_serve` runs."""

    options: Options
    client: KubernetesClient
    store: JobStore
    queue: Queue
    reconciler: reconcile.Reconciler
    own_key: OperatorKey
    candidate: Candidate | None
    """None: this process takes turns without a lease."""
    health: Health
    meter: Meter
    places: Places
    kinds: tuple[ResourceKind, ...]
    """What is watched."""
    stop: asyncio.Event
    """Set: the process is to end."""


async def _start(
    options: Options, client: KubernetesClient, own_key: OperatorKey, candidate: Candidate | None, meter: Meter, stop: asyncio.Event
) -> int:
    store = JobStore(options.log_tails)
    queue = Queue(rank=lambda key: urgency(store, key))
    # Policies are watched only if they are made.
    kinds = tuple(kind for kind in WATCHED if kind not in OPTIONAL or options.askers)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=64)) as session:
        instance = f"{socket.gethostname()}-{os.getpid()}"
        settings = Settings(
            options.runtime_image, instance, options.progress_seconds, options.shard_user, options.auto_encryption, options.askers
        )
        places = Places(options.namespaces, kinds)
        reconciler = reconcile.Reconciler(client, store, queue, settings, session, own_key, meter=meter, shut=places.shut)
        sources = Sources(queue, store.counts, reconciler.seen, lambda: not health.waits_for(), lambda: tuple(places.shut_places()))
        health = Health(lambda: reconcile.health(reconciler, store, queue), lambda: meter.page(sources, time.time()))
        health.blind = lambda: places.blind
        if candidate is not None:
            health.role = candidate.role
        await health.start(options.health_host, options.health_port)
        try:
            return await _serve(
                Parts(options, client, store, queue, reconciler, own_key, candidate, health, meter, places, kinds, stop),
            )
        finally:
            await health.stop()
            await client.close()


@contextlib.asynccontextmanager
async def _candidate(options: Options, meter: Meter) -> AsyncIterator[Candidate | None]:
    if options.lease is None:
        yield None
        return
    client = KubernetesClient(await load_configuration(options.kubeconfig), Limits(), f"{AGENT}/leader-election", observer=meter)
    try:
        me = f"{socket.gethostname()}_{uuid.uuid4().hex[:12]}"
        yield Candidate(client, options.lease.namespace, options.lease.name, me, options.lease.timing)
    finally:
        await client.close()


async def _serve(parts: Parts) -> int:
    options, client, health, meter, candidate, stop = (
        parts.options, parts.client, parts.health, parts.meter, parts.candidate, parts.stop,
    )  # fmt: skip
    relist = Relist(client, parts.store, parts.queue, parts.places, options.relist_seconds, os.getpid(), parts.kinds)
    beat = asyncio.create_task(health.beat())
    try:
        if not await _crd_served(parts):
            return 0
        health.waiting_for = "the first lists"
        # kopf cancels at its end what was begun after it; these begin before.
        ours = [asyncio.create_task(relist.run(), name="relist")]
        ours.append(asyncio.create_task(parts.reconciler.recorder.run(), name="events"))
        turns = functools.partial(_turns, parts)
        if candidate is not None:
            parts.queue.close()
            meter.leads(False)
        lead = asyncio.create_task(_when(relist.synced, turns() if candidate is None else candidate.run(turns)), name="lead")
        ours.append(asyncio.create_task(_when(relist.synced, _say_ready(parts)), name="ready"))
        heard, read = _counted(meter.heard, relist.heard), _counted(meter.relisted, relist.read)
        ours += [
            asyncio.create_task(KindWatch(client, read, heard, kind, place, relist.may, relist.refused).run(), name=f"watch-{kind.plural}")
            for kind in parts.kinds
            if kind != JOBS
            for place in parts.places.all
        ]
        callbacks = WatchCallbacks(
            on_event=heard,
            on_listed=_counted(meter.relisted, relist.listed),
            on_start=lambda: _on_signals(stop),
            on_refused=lambda place, verb: relist.refused(JOBS, place, verb, "forbidden"),
            on_granted=lambda place, verb: relist.may(JOBS, place, verb),
            on_answer=lambda kind, verb, code: meter.watched(verb, kind.plural, code),
        )
        watching = asyncio.create_task(
            watch_jobs(lambda: load_configuration(options.kubeconfig), options.namespaces, callbacks, stop), name="watches"
        )
        stopped = asyncio.create_task(stop.wait(), name="stopped")
        serving = [watching, lead, stopped, *(task for task in ours if task.get_name() != "ready")]
        await asyncio.wait(serving, return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            _log.error("the watches or the turns ended by themselves; this process ends, to be started again")
        # First of all, so that another replica continues while this one is still ending.
        await _end(lead)
        await _end(watching, stopped, *ours)
        return 0 if stop.is_set() else 1
    finally:
        await _end(beat)


async def _turns(parts: Parts) -> None:
    """Take turns until cancelled, beginning with one of every job; nothing is left of them afterwards."""
    queue, reconciler = parts.queue, parts.reconciler
    queue.open()
    parts.meter.leads(True)
    for key in sorted(parts.store.jobs()):
        queue.add(key)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(parts.own_key.obtain(parts.client), name="key")
            for number in range(parts.options.turns):
                group.create_task(reconciler.work(), name=f"turns-{number}")
            group.create_task(reconciler.work(NEAR), name="turns-urgent")
    finally:
        queue.close()
        parts.meter.leads(False)
        reconciler.forget()


def _counted(
    count: Callable[[str], None], then: Callable[Concatenate[ResourceKind, Arguments], Result]
) -> Callable[Concatenate[ResourceKind, Arguments], Result]:
    """`then`, with each call counted under the plural of its kind."""

    def call(kind: ResourceKind, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        count(kind.plural)
        return then(kind, *args, **kwargs)

    return call


async def _crd_served(parts: Parts) -> bool:
    """Wait until the API server serves our kind; False where the process is asked to stop first."""
    told, stop = "", parts.stop
    while not stop.is_set():
        try:
            if await parts.client.served(JOBS):
                return True
            why = f"the CRD {JOBS.plural}.{JOBS.group} to be installed (kubectl apply -f crds/, or the chart)"
        except ApiError as error:
            why = f"the API server to answer: {error}"
        if why != told:
            _log.warning("waiting for %s", why)
        parts.health.waiting_for = told = why
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(parts.options.crd_seconds):
                await stop.wait()
    return False


async def _when(event: asyncio.Event, then: Coroutine[Any, Any, None]) -> None:
    try:
        await event.wait()
    except asyncio.CancelledError:
        then.close()
        raise
    await then


async def _say_ready(parts: Parts) -> None:
    parts.health.waiting_for = ""
    _log.info("ready: %s", ", ".join(f"{count} {plural}" for plural, count in parts.store.counts().items()))


def _on_signals(stop: asyncio.Event) -> None:
    """SIGTERM and SIGINT set `stop`, from the first moment on (process 1 of a container would pass over them otherwise)."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            _log.error("%s", result)


def set_up_logs(style: Format, level: str) -> None:
    """Send everything to stderr in this style."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if style == "json" else _Text())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in ("kopf", "aiohttp", "asyncio", "kubernetes"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update({key: record.__dict__[key] for key in ("job", "uid") if record.__dict__.get(key)})
        if record.exc_info:
            line["error"] = _why(self, record)
        return json.dumps(line, ensure_ascii=False)


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).strftime("%H:%M:%S")
        job = f" {record.__dict__['job']}" if record.__dict__.get("job") else ""
        text = f"{at} {record.levelname.lower():<7}{job} {record.getMessage()}"
        return text + (f": {_why(self, record)}" if record.exc_info else "")


def _why(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """The error in a line; the whole trace only for one who asked for --log-level debug."""
    found = record.exc_info if isinstance(record.exc_info, tuple) else (None, None, None)
    if logging.getLogger().isEnabledFor(logging.DEBUG) and found[0] is not None:
        return "\n" + formatter.formatException(found)
    return f"{found[0].__name__ if found[0] else 'error'}: {found[1]}"


class Health:
    """Serves from the first moment on, so that waiting for the CRD is not taken for death."""

    def __init__(self, numbers: Callable[[], Mapping[str, Any]], page: Callable[[], Awaitable[bytes]]) -> None:
        self._numbers, self._page = numbers, page
        self._beat_at = 0.0
        self._runner: web.AppRunner | None = None
        self._listening: asyncio.Server | None = None
        self.waiting_for = "starting"
        """Why this operator is not ready; empty when it is."""
        self.blind: Callable[[], str] = lambda: ""
        """What it waits for though it was ready: the right to read what it watches."""
        self.role: Callable[[], str] = lambda: "alone"
        """Does it act? leader, standby (ready all the same, and as up to date), or alone."""

    async def start(self, host: str, port: int) -> None:
        """Listen. Raises OSError if the port is taken."""
        app = web.Application()
        app.add_routes([web.get("/livez", self._live), web.get("/readyz", self._ready), web.get("/metrics", self._metrics)])
        self._runner = web.AppRunner(
            app, handle_signals=False, access_log=None, shutdown_timeout=1.0, max_line_size=LINE_BYTES, max_field_size=LINE_BYTES
        )
        await self._runner.setup()
        self._listening = await asyncio.get_running_loop().create_server(self._admit, host or None, port)

    def waits_for(self) -> str:
        """Why this operator is not ready now; empty when it is."""
        return self.blind() or self.waiting_for

    async def stop(self) -> None:
        """Close the port."""
        if self._listening is not None:
            self._listening.close()
        if self._runner is not None:
            await self._runner.cleanup()

    def _admit(self) -> asyncio.Protocol:
        """Who serves a connection that has come."""
        assert self._runner is not None and self._runner.server is not None
        for old in self._runner.server.connections[: 1 - CONNECTIONS]:
            old.force_close()
        return self._runner.server()

    async def beat(self) -> None:
        """Prove forever that the event loop turns."""
        loop = asyncio.get_running_loop()
        while True:
            self._beat_at = loop.time()
            await asyncio.sleep(BEAT)

    async def _live(self, _: web.Request) -> web.Response:
        silent = asyncio.get_running_loop().time() - self._beat_at
        return web.json_response({"role": self.role(), **self._numbers()}, status=200 if silent < STUCK else 503)

    async def _ready(self, _: web.Request) -> web.Response:
        if why := self.waits_for():
            return web.json_response({"ready": False, "waitingFor": why}, status=503)
        return web.json_response({"ready": True, "role": self.role()})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=await self._page(), headers={"Content-Type": CONTENT_TYPE})


@dataclass(frozen=True)
class CheckOptions:
    """What to look at. `namespaces` empty: all of them. `lease` is (namespace, name); None: one operator acts without a Lease."""

    kubeconfig: str | None
    namespaces: tuple[str, ...]
    lease: tuple[str, str] | None
    seconds: float
    """How long the Lease may stay without a renewal."""


async def check_installation(asked: CheckOptions) -> list[str]:
    """What was found, a sentence each. Raises ConnectError, and CheckFailed with the first thing that is wrong."""
    client = KubernetesClient(await load_configuration(asked.kubeconfig), Limits(), f"{AGENT}/check")
    try:
        async with asyncio.timeout(asked.seconds + 30):
            return [await _kind(client), await _jobs(client, asked.namespaces), await _lease(client, asked)]
    except TimeoutError as error:
        raise CheckFailed(f"the API server did not answer within {asked.seconds + 30:g} s; is it reachable from this pod?") from error
    except ApiError as error:
        raise CheckFailed(answer_words(error)) from error
    finally:
        await client.close()


class CheckFailed(Exception):
    """What is wrong, and the next step."""


def answer_words(error: ApiError) -> str:
    """What an answer of the API server, or none, means, and the next step."""
    if error.code in (401, 403):
        return f"the API server refuses: {error}; give the operator the rights of the chart's roles (rbac.create)"
    if error.code == 0:
        return f"the API server cannot be asked: {error}; look at the kubeconfig, and at what keeps this pod from the API server"
    return f"the API server does not answer as expected: {error}; read its log, and try again"


def lease_holder(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """Who renewed the Lease between two reads of it; None: nobody did."""
    spec = after.get("spec") or {}
    renewed = spec.get("renewTime")
    if not spec.get("holderIdentity") or not renewed or renewed == (before.get("spec") or {}).get("renewTime"):
        return None
    return str(spec["holderIdentity"])


async def _kind(client: KubernetesClient) -> str:
    if not await client.served(JOBS):
        name = f"{JOBS.plural}.{JOBS.group}"
        raise CheckFailed(f"the CRD {name} is not served; install it with the chart (crds.enabled=true) or kubectl apply -f crds/")
    return f"{JOBS.kind} is served as {JOBS.group}/{JOBS.version}"


async def _jobs(client: KubernetesClient, namespaces: tuple[str, ...]) -> str:
    count = 0
    for namespace in namespaces or ("",):
        async for page in client.pages(JOBS, namespace):
            count += len(page.items)
    return f"{count} jobs can be read in {', '.join(namespaces) or 'all namespaces'}"


async def _lease(client: KubernetesClient, asked: CheckOptions) -> str:
    if asked.lease is None:
        return "no Lease is asked for: leader election is off"
    namespace, name = asked.lease
    before: dict[str, Any] | None = None
    deadline = time.monotonic() + asked.seconds
    while time.monotonic() < deadline:
        try:
            found = await client.get(LEASES, namespace, name)
        except ApiError as error:
            if error.code != 404:
                raise
        else:
            before = before or found
            if who := lease_holder(before, found):
                return f"Lease {namespace}/{name} is renewed by {who}"
        await asyncio.sleep(LOOK_SECONDS)
    state = "does not exist" if before is None else "was not renewed"
    raise CheckFailed(
        f"Lease {namespace}/{name} {state} within {asked.seconds:g} s, so no operator acts; read: kubectl -n {namespace} logs deploy/{name}"
    )
