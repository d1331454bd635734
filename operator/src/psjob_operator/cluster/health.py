"""Is this operator well? /livez, that the loop turns; /readyz, that the CRD is served and the store is whole; /metrics for Prometheus.

check_installation asks the cluster whether an installed operator works: what `helm test` runs as a pod, with the operator's own rights.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from psjob_operator.cluster.client import AGENT, JOBS, LEASES, ApiError, Client, Limits, load_configuration
from psjob_operator.cluster.metrics import CONTENT_TYPE

BEAT = 1.0
STUCK = 60.0
CONNECTIONS = 32
"""At a time; the next to connect takes the place of the oldest connection."""
LINE_BYTES = 2048
"""Most bytes of one line of a request; of its headers there may be a hundred or so."""


LOOK_SECONDS = 0.5


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
        """Listen. Raises OSError where the port is taken."""
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
        """Prove for ever that the event loop turns."""
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
    client = Client(await load_configuration(asked.kubeconfig), Limits(), f"{AGENT}/check")
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


async def _kind(client: Client) -> str:
    if not await client.served(JOBS):
        name = f"{JOBS.plural}.{JOBS.group}"
        raise CheckFailed(f"the CRD {name} is not served; install it with the chart (crds.enabled=true) or kubectl apply -f crds/")
    return f"{JOBS.kind} is served as {JOBS.group}/{JOBS.version}"


async def _jobs(client: Client, namespaces: tuple[str, ...]) -> str:
    count = 0
    for namespace in namespaces or ("",):
        async for page in client.pages(JOBS, namespace):
            count += len(page.items)
    return f"{count} jobs can be read in {', '.join(namespaces) or 'all namespaces'}"


async def _lease(client: Client, asked: CheckOptions) -> str:
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
