"""Hears that jobs and their children changed, and keeps the store whole.

kopf is used for one thing: to hear that a job changed (watch_jobs). Its handlers are `on.event` only, return nothing and touch nothing, so
kopf writes no annotation, no finalizer and no patch. Two facts that kopf does not hand to handlers are read from its own requests, by a
trace of its session. One is that it has (re-)listed a kind, after which objects may have vanished unseen. The other is that its watch of
that kind is open.

Children are watched by Watch: a list of each kind, a page at a time, then a watch from that moment on, forever. An event goes from the
wire into the store's small projection and is dropped: there are as many as five a pod while a fleet of jobs begins.

Relist lists each kind at the start, whenever a watch has to begin anew, and once in ten minutes. Of jobs kopf tells what it finds in a
list, never what has vanished since the one before; a list of our own, made after kopf's, does. Places knows what may be read in each
namespace: one that is refused keeps no other waiting.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import kopf
from kubernetes.aio.client import Configuration

from psjob_operator.cluster.cache import JobStore, read_list
from psjob_operator.cluster.client import (
    JOBS,
    OPTIONAL,
    WATCHED,
    ApiError,
    JobKey,
    KubernetesClient,
    ResourceKind,
    risen_version,
    watch_session,
)
from psjob_operator.cluster.queue import Queue
from psjob_operator.render.objects import LABEL_JOB

_PREFIX = "psjob.dev"


FIRST_SECONDS, MOST_SECONDS = 0.5, 30.0
"""Until a list or a watch that failed is tried again."""
_log = logging.getLogger(__name__)
RETRY_SECONDS = 2.0
REFUSED_SECONDS = 15.0
"""Until a list that was refused is tried again."""
REFUSALS = (401, 403)


class Patience:
    """Seconds between kopf's tries of one request: without an end, unless each of `places` namespaces refuses us.

    A process that may read nothing must end. One that lives through an outage keeps its picture of the world, and where one namespace of
    several refuses us the others continue.
    """

    FIRST = (1.0, 2.0, 3.0, 5.0, 5.0)

    def __init__(self, places: int = 1) -> None:
        self._places = places
        self.refused: set[tuple[ResourceKind, str]] = set()
        """What we may not read, as of the last answer."""

    def __iter__(self) -> Iterator[float]:
        yield from self.FIRST
        while len(self.refused) < self._places:
            yield self.FIRST[-1]


@dataclass(frozen=True)
class WatchCallbacks:
    """Who hears of changes. All are called in the event loop and must return at once."""

    on_event: Callable[[ResourceKind, str | None, dict[str, Any]], None]
    """(kind, type, object): type is ADDED, MODIFIED, DELETED, or None for an object that a (re-)list found."""
    on_listed: Callable[[ResourceKind, str], None]
    """(kind, namespace): kopf has listed this kind and its watch begins: what was known and not listed has gone."""
    on_start: Callable[[], None]
    """kopf has started, and put its own signal handlers in the place of ours."""
    on_refused: Callable[[str, str], None] = lambda namespace, verb: None
    """(namespace, list or watch): the API server does not let kopf read the jobs there."""
    on_granted: Callable[[str, str], None] = lambda namespace, verb: None
    """(namespace, list or watch): it does."""
    on_answer: Callable[[ResourceKind, str, int], None] = lambda kind, verb, code: None
    """(kind, list or watch, HTTP status): the API server has answered kopf."""


async def watch_jobs(
    configure: Callable[[], Awaitable[Configuration]], namespaces: tuple[str, ...], callbacks: WatchCallbacks, stop: asyncio.Event
) -> None:
    """Watch until `stop` is set or a watch ends for good. `configure` is awaited at each (re-)login for a Configuration."""
    patience = Patience(len(namespaces) or 1)
    await kopf.operator(
        # Else kopf asks for the user's name, which a container's user (65532, or any of OpenShift's) need not have.
        identity=cast(Any, "psjob-operator"),
        registry=_registry(configure, callbacks, patience),
        settings=_settings(patience),
        standalone=True,
        clusterwide=not namespaces,
        namespaces=list(namespaces),
        stop_flag=stop,
    )


def _registry(configure: Callable[[], Awaitable[Configuration]], callbacks: WatchCallbacks, patience: Patience) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()
    kopf.on.event(JOBS.group, JOBS.version, JOBS.plural, registry=registry, id=f"wake-{JOBS.plural}")(_handler(callbacks))

    @kopf.on.login(registry=registry, id="login")
    async def login(**_: Any) -> kopf.AiohttpSession:
        configuration = await configure()
        return kopf.AiohttpSession(
            server=configuration.host, aiohttp_session=await watch_session(configuration, _trace(callbacks, patience))
        )

    @kopf.on.startup(registry=registry, id="start")
    async def started(**_: Any) -> None:
        # kopf sets its signal handlers just after it has begun this one.
        await asyncio.sleep(0.1)
        callbacks.on_start()

    return registry


def _handler(callbacks: WatchCallbacks) -> Any:
    async def wake(event: Mapping[str, Any], **_: Any) -> None:
        callbacks.on_event(JOBS, event.get("type"), dict(event["object"]))

    return wake


def _settings(patience: Patience) -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.peering.standalone = True
    settings.watching.chunk_size = 500
    settings.watching.server_timeout = 300
    settings.networking.request_timeout = 15
    settings.networking.error_backoffs = patience
    settings.process.ultimate_exiting_timeout = 15
    # Never used (no handler keeps state), set so that nothing could ever be written under another project's name.
    settings.persistence.finalizer = f"{_PREFIX}/unused"
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=_PREFIX)
    settings.persistence.diffbase_storage = _NoDifferences()
    return settings


class _NoDifferences(kopf.DiffBaseStorage):
    """Nothing here asks what of an object has changed, and kopf would copy each object whole to find out."""

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        """Nothing is stored."""


def _trace(callbacks: WatchCallbacks, patience: Patience) -> aiohttp.TraceConfig:
    """A watch that follows a list, rather than another watch, is the sign that all the list held has been handed on."""
    listed: set[tuple[ResourceKind, str]] = set()

    async def ended(_session: aiohttp.ClientSession, _context: SimpleNamespace, params: aiohttp.TraceRequestEndParams) -> None:
        found = _locate(params.url.path)
        if found is None:
            return
        verb, code = "watch" if "watch" in params.url.query else "list", params.response.status
        callbacks.on_answer(found[0], verb, code)
        if code in (401, 403):
            patience.refused.add(found)
            callbacks.on_refused(found[1], verb)
        else:
            patience.refused.discard(found)
        if code == 200:
            callbacks.on_granted(found[1], verb)
        if code == 404:
            # The CRD has gone, and may come back. kopf would end at once, but waits for an API server that is not up yet.
            params.response.status = 503
        if params.response.status != 200:
            return
        if "watch" not in params.url.query:
            listed.add(found)
        elif found in listed:
            listed.discard(found)
            callbacks.on_listed(*found)

    trace = aiohttp.TraceConfig()
    trace.on_request_end.append(ended)
    return trace


def _locate(path: str) -> tuple[ResourceKind, str] | None:
    """The watched kind and the namespace (empty: all) of a collection's path."""
    if path == JOBS.path():
        return JOBS, ""
    head, _, rest = path.partition("/namespaces/")
    if head.endswith(JOBS.root) and rest.endswith("/" + JOBS.plural) and rest.count("/") == 1:
        return JOBS, rest.split("/")[0]
    return None


class KindWatch:
    """One kind, in one namespace or (empty) in all."""

    def __init__(
        self,
        client: KubernetesClient,
        read: Callable[[ResourceKind, str], Awaitable[int]],
        heard: Callable[[ResourceKind, str | None, Mapping[str, Any]], None],
        kind: ResourceKind,
        namespace: str,
        granted: Callable[[ResourceKind, str, str], None] = lambda kind, place, verb: None,
        refused: Callable[[ResourceKind, str, str, str], None] = lambda kind, place, verb, why: None,
    ) -> None:
        """`read` takes a whole list in and answers its resourceVersion; `heard` is told of each event.

        `granted` and `refused` are told whether the API server lets us watch.
        """
        self._client = client
        self._read, self._heard = read, heard
        self._granted, self._refused = granted, refused
        self._kind = kind
        self._namespace = namespace
        self._version = ""
        """Of the last that was heard; empty: a list is needed."""
        self._failures = 0

    async def run(self) -> None:
        """Until cancelled. What fails is tried again, after a while that grows."""
        while True:
            try:
                if not self._version:
                    self._version = str(await self._read(self._kind, self._namespace))
                began = asyncio.get_running_loop().time()
                await self._follow()
                self._failures = 0
                if asyncio.get_running_loop().time() - began < FIRST_SECONDS:
                    await asyncio.sleep(FIRST_SECONDS)  # an API server that ends watches at once is not to be asked in a circle
            except ApiError as error:
                if error.code == 410:
                    self._version = ""
                    continue
                await self._wait(error)

    async def _follow(self) -> None:
        """One watch, until the API server ends it."""
        try:
            stream = self._client.watch(self._kind, self._namespace, self._version, LABEL_JOB, self._opened)
            async for type_, raw in stream:
                self._take(type_, raw)
        except ApiError as error:
            if error.code in (401, 403):
                self._refused(self._kind, self._namespace, "watch", error.message)
            raise

    def _opened(self) -> None:
        self._granted(self._kind, self._namespace, "watch")

    def _take(self, type_: str, raw: Mapping[str, Any]) -> None:
        self._failures = 0
        if type_ == "ERROR":
            raise ApiError(int(raw.get("code") or 0), str(raw.get("reason") or "Unknown"), str(raw.get("message") or raw))
        if type_ != "BOOKMARK":
            self._heard(self._kind, type_, raw)
        self._version = raw["metadata"]["resourceVersion"]

    async def _wait(self, error: ApiError) -> None:
        delay = min(MOST_SECONDS, FIRST_SECONDS * 2.0 ** min(self._failures, 10))
        self._failures += 1
        # A connection that is cut now and then is the watch's ordinary end.
        say = _log.warning if self._failures > 1 or error.code else _log.debug
        say("watching %s failed, again in %.1f s: %s", self._kind.plural, delay, error)
        await asyncio.sleep(max(error.retry_after, delay * random.uniform(0.8, 1.2)))  # noqa: S311 - spreads calls over time


class Relist:
    """`run()` does the lists; `listed()` is kopf's word that it has listed a kind; `read()` and `heard()` are for watches of our own."""

    def __init__(
        self,
        client: KubernetesClient,
        store: JobStore,
        queue: Queue,
        places: Places,
        every: float,
        seed: int,
        kinds: Sequence[ResourceKind] = WATCHED,
    ) -> None:
        self._client = client
        self._store = store
        self._queue = queue
        self._places = places
        self._every = every
        self._random = random.Random(seed)  # noqa: S311 - spreads calls over time
        self._wanted: set[tuple[ResourceKind, str]] = set()
        self._kinds = kinds
        self._newest: dict[tuple[ResourceKind, str], int] = {}
        """The resourceVersion of the last list of each kind in each place."""
        self._changed = asyncio.Event()
        self.synced = asyncio.Event()
        """Set once every kind was listed in each place that may be read, jobs after kopf's watch of them had begun."""

    def listed(self, kind: ResourceKind, namespace: str) -> None:
        """kopf has (re-)listed: what it did not find must go from the store."""
        self._wanted.add((kind, namespace))
        self._changed.set()

    async def read(self, kind: ResourceKind, namespace: str) -> int:
        """Take a whole list in; its resourceVersion. Raises ApiError, and RuntimeError where the API server is back at an earlier state."""
        try:
            news, version = await read_list(self._client, self._store, kind, namespace, labels="" if kind == JOBS else LABEL_JOB)
        except ApiError as error:
            if error.code in REFUSALS:
                self.refused(kind, namespace, "list", error.message)
            raise
        self._newest[kind, namespace] = risen_version(self._newest.get((kind, namespace), 0), version, f"the list of {kind.plural}")
        self._places.listed(kind, namespace)
        self._wake(news)
        self._begin()
        return version

    def refused(self, kind: ResourceKind, namespace: str, verb: str, why: str) -> None:
        """The API server lets us not read this: the other places are not kept waiting for it."""
        before = self._places.shut(namespace)
        self._places.refused(kind, namespace, verb, why)
        if not before and (words := self._places.shut(namespace)):
            _log.warning("nothing is done there until it is granted: %s", words)
        self._begin()

    def may(self, kind: ResourceKind, namespace: str, verb: str) -> None:
        """The API server lets us read this."""
        before = self._places.shut(namespace)
        self._places.may(kind, namespace, verb)
        if before and not self._places.shut(namespace):
            _log.info("granted now: %s", before)
            self._wake({key for key in self._store.jobs() if namespace in ("", key.namespace)})
        self._begin()

    def heard(self, kind: ResourceKind, type_: str | None, raw: Mapping[str, Any]) -> None:
        """An event of a watch: take it in, and look at the job that it concerns."""
        key = self._store.remove(kind, raw) if type_ == "DELETED" else self._store.put(kind, raw)
        if key is not None:
            self._queue.add(key)

    async def run(self) -> None:
        """Serve the wishes until cancelled."""
        loop = asyncio.get_running_loop()
        due = loop.time() + self._interval()
        while True:
            try:
                async with asyncio.timeout_at(due):
                    await self._changed.wait()
            except TimeoutError:
                due = loop.time() + self._interval()
                self._wanted |= {(kind, place) for kind in self._kinds for place in self._places.all}
                await self._serve(everybody=True)
            else:
                await self._serve(everybody=False)

    async def _serve(self, everybody: bool) -> None:
        self._changed.clear()
        wanted, self._wanted = self._wanted, set()
        for kind, place in sorted(wanted, key=lambda pair: (self._kinds.index(pair[0]), pair[1])):
            try:
                await self.read(kind, place)
            except ApiError as error:
                if error.code in REFUSALS:
                    # Its own watch may not ask again soon, and the other lists do not wait.
                    asyncio.get_running_loop().call_later(REFUSED_SECONDS, self.listed, kind, place)
                    continue
                _log.warning("listing %s failed, again in %g s: %s", kind.plural, RETRY_SECONDS, error)
                await asyncio.sleep(RETRY_SECONDS)
                self.listed(kind, place)
        if everybody:
            self._wake(set(self._store.jobs()))

    def _begin(self) -> None:
        """Once each kind was listed where it may be, all jobs are looked at."""
        if self._places.whole and not self.synced.is_set():
            self.synced.set()
            self._wake(set(self._store.jobs()))

    def _wake(self, keys: set[JobKey]) -> None:
        for key in sorted(keys):
            self._queue.add(key)

    def _interval(self) -> float:
        return self._every * (0.9 + 0.2 * self._random.random())


class Places:
    """What is known of each namespace; the empty one stands for all of them."""

    def __init__(self, namespaces: Sequence[str] = (), kinds: Collection[ResourceKind] = WATCHED) -> None:
        self.all = tuple(namespaces) or ("",)
        self._missing = {(kind, place) for kind in kinds for place in self.all}
        self._refused: dict[tuple[str, ResourceKind, str], str] = {}
        """By place, kind and verb."""

    def listed(self, kind: ResourceKind, place: str) -> None:
        """A list of this kind was taken in."""
        self._missing.discard((kind, place))
        self.may(kind, place, "list")

    def may(self, kind: ResourceKind, place: str, verb: str) -> None:
        """The API server has granted this now."""
        self._refused.pop((place, kind, verb), None)

    def refused(self, kind: ResourceKind, place: str, verb: str, why: str) -> None:
        """It may not be listed or watched, `why` in the API server's words. What is optional is done without."""
        if kind in OPTIONAL:
            self._missing.discard((kind, place))
        else:
            self._refused[place, kind, verb] = why

    def shut(self, namespace: str) -> str:
        """Why nothing is done in this namespace; empty where all of it can be read."""
        places = ("", namespace) if "" in self.all else (namespace,)
        return next((self._words(place) for place in places if self._words(place)), "")

    def _words(self, place: str) -> str:
        found = sorted((kind.plural, verb, why) for (at, kind, verb), why in self._refused.items() if at == place)
        if not found:
            return ""
        plural, verb, why = found[0]
        where = f" in namespace {place}" if place else ""
        return f"the right to {verb} {plural}{where}: {why}"

    def shut_places(self) -> Mapping[str, str]:
        """Why, by place, of all that are refused."""
        return {place: words for place in self.all if (words := self._words(place))}

    @property
    def whole(self) -> bool:
        """Each place was listed whole or is refused, and one at least was listed."""
        shut = self.shut_places()
        return len(shut) < len(self.all) and all(place in shut for _, place in self._missing)

    @property
    def blind(self) -> str:
        """What is waited for where no place can be read; empty while one can."""
        shut = self.shut_places()
        return next(iter(shut.values())) if len(shut) == len(self.all) else ""
