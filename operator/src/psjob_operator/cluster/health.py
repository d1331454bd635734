"""Answers over HTTP: /livez, that the loop turns; /readyz, that the CRD is served and the store is whole; /metrics for Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from psjob_operator.cluster.meter import CONTENT_TYPE

BEAT = 1.0
STUCK = 60.0
CONNECTIONS = 32
"""At a time; the next to connect takes the place of the oldest connection."""
LINE_BYTES = 2048
"""Most bytes of one line of a request; of its headers there may be a hundred or so."""


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
