"""kopf, used for one thing: to hear that a job changed (their children are watched by cluster/watch.py).

Its handlers are `on.event` only, return nothing and touch nothing, so kopf writes no annotation, no finalizer and no patch.
Two facts that kopf does not hand to handlers are read from its own requests, by a trace of its session. One is that it has (re-)listed a
kind, after which objects may have vanished unseen. The other is that its watch of that kind is open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import kopf
from kubernetes.aio.client import Configuration

from psjob_operator.cluster import connect
from psjob_operator.cluster.kinds import JOBS, ResourceKind

_PREFIX = "psjob.dev"


class Patience:
    """Seconds between kopf's tries of one request: without an end, unless each of `places` namespaces refuses us.

    A process that may read nothing must end. One that lives through an outage keeps its picture of the world, and where one namespace of
    several refuses us the others go on.
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
class Ears:
    """Who is told. All are called in the event loop and must return at once."""

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


async def run(configure: Callable[[], Awaitable[Configuration]], namespaces: tuple[str, ...], ears: Ears, stop: asyncio.Event) -> None:
    """Watch until `stop` is set or a watch ends for good. `configure` is awaited at each (re-)login for a Configuration."""
    patience = Patience(len(namespaces) or 1)
    await kopf.operator(
        # Else kopf asks for the user's name, which a container's user (65532, or any of OpenShift's) need not have.
        identity=cast(Any, "psjob-operator"),
        registry=_registry(configure, ears, patience),
        settings=_settings(patience),
        standalone=True,
        clusterwide=not namespaces,
        namespaces=list(namespaces),
        stop_flag=stop,
    )


def _registry(configure: Callable[[], Awaitable[Configuration]], ears: Ears, patience: Patience) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()
    kopf.on.event(JOBS.group, JOBS.version, JOBS.plural, registry=registry, id=f"wake-{JOBS.plural}")(_handler(ears))

    @kopf.on.login(registry=registry, id="login")
    async def login(**_: Any) -> kopf.AiohttpSession:
        configuration = await configure()
        return kopf.AiohttpSession(server=configuration.host, aiohttp_session=await connect.session(configuration, _trace(ears, patience)))

    @kopf.on.startup(registry=registry, id="start")
    async def started(**_: Any) -> None:
        # kopf sets its signal handlers just after it has begun this one.
        await asyncio.sleep(0.1)
        ears.on_start()

    return registry


def _handler(ears: Ears) -> Any:
    async def wake(event: Mapping[str, Any], **_: Any) -> None:
        ears.on_event(JOBS, event.get("type"), dict(event["object"]))

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


def _trace(ears: Ears, patience: Patience) -> aiohttp.TraceConfig:
    """A watch that follows a list, rather than another watch, is the sign that all the list held has been handed on."""
    listed: set[tuple[ResourceKind, str]] = set()

    async def ended(_session: aiohttp.ClientSession, _context: SimpleNamespace, params: aiohttp.TraceRequestEndParams) -> None:
        found = _locate(params.url.path)
        if found is None:
            return
        verb, code = "watch" if "watch" in params.url.query else "list", params.response.status
        ears.on_answer(found[0], verb, code)
        if code in (401, 403):
            patience.refused.add(found)
            ears.on_refused(found[1], verb)
        else:
            patience.refused.discard(found)
        if code == 200:
            ears.on_granted(found[1], verb)
        if code == 404:
            # The CRD has gone, and may come back. kopf would end at once, but waits for an API server that is not up yet.
            params.response.status = 503
        if params.response.status != 200:
            return
        if "watch" not in params.url.query:
            listed.add(found)
        elif found in listed:
            listed.discard(found)
            ears.on_listed(*found)

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
