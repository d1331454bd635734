"""A proxy between the operator and the API server. It can end the operator at any of its writes: after the reply, or with it lost. It can
also lose replies, refuse, delay, and double, delay or drop what a watch brings, to an operator that lives.

It speaks plain HTTP on loopback to the operator and to the API server with the operator's own certificate.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import ssl
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

WRITES = frozenset({"POST", "PUT", "PATCH", "DELETE"})
HOPS = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "host", "te", "upgrade"})
SESSION = web.AppKey("session", aiohttp.ClientSession)


@dataclass
class Strike:
    """End the operator at its n-th write from now on (from 1)."""

    at: int
    lost: bool
    """True: the write is carried out and the reply never arrives; False: it arrives, and nothing after it is carried out."""


class Weather:
    """What goes wrong on the way, by a seed: `request` and `event` are asked once each, and answer how, or nothing."""

    REQUESTS = ("lost", "409", "429", "500 done", "500", "503", "slow")
    EVENTS = ("doubled", "stale", "dropped")

    def __init__(self, seed: int, share: float = 0.25) -> None:
        self._random = random.Random(seed)
        self._share = share
        self._left: dict[tuple[str, ...], list[str]] = {}
        """Of each list of faults, those that were not done since all were: a short run sees each of them, too."""
        self.seen: Counter[str] = Counter()
        """How often each fault was done."""

    def request(self, write: bool) -> str:
        """The fault of this request; lists and reads are not lost by halves."""
        return self._draw(self.REQUESTS if write else ("429", "500", "503", "slow"))

    def event(self) -> str:
        """The fault of this line of a watch."""
        return self._draw(self.EVENTS)

    def seconds(self) -> float:
        """How long something slow takes."""
        return self._random.uniform(0.2, 2.0)

    def _draw(self, faults: tuple[str, ...]) -> str:
        if self._random.random() >= self._share:
            return ""
        left = self._left.get(faults) or self._random.sample(faults, len(faults))
        found = left.pop()
        self._left[faults] = left
        self.seen[found] += 1
        return found


REFUSALS = {
    "409": (409, "Conflict", "the object has been modified; please apply your changes to the latest version and try again"),
    "429": (429, "TooManyRequests", "too many requests, please try again later"),
    "500": (500, "InternalError", "etcdserver: leader changed"),
    "500 done": (500, "InternalError", "etcdserver: request timed out"),
    "503": (503, "ServiceUnavailable", "apiserver is shutting down"),
}


class Proxy:
    """`url` is what the operator's kubeconfig names. `kill` must end the process before it returns."""

    def __init__(self, upstream: str, ca: Path, cert: Path, key: Path) -> None:
        self._upstream = upstream
        self._context = ssl.create_default_context(cafile=str(ca))
        self._context.load_cert_chain(str(cert), str(key))
        self._strike: Strike | None = None
        self._kill: Callable[[], None] = lambda: None
        self._cut = False
        self._count = 0
        self._blind = False
        self._away = self._said = False
        self._gone = 0
        self.weather: Weather | None = None
        """None: everything passes."""
        self.writes: list[str] = []
        """Every write that was carried out: `POST /api/v1/…`."""
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._up.wait(30)

    def arm(self, strike: Strike | None, kill: Callable[[], None]) -> None:
        """From now on: count writes anew; None lets everything pass."""
        self._strike, self._kill, self._count, self._cut = strike, kill, 0, False

    @property
    def struck(self) -> bool:
        """Whether the operator was ended."""
        return self._cut

    def blind(self) -> None:
        """From now on watches bring nothing, though they stay open."""
        self._blind = True

    def away(self, away: bool, said: bool = False) -> None:
        """The API server is out of reach: watches end, and new requests bring the end of their connection, or 503 where that is `said`."""
        self._away, self._said = away, said

    def gone(self) -> None:
        """Every open watch is told 410 Gone, as after a compaction, and sees again."""
        self._blind = False
        self._gone += 1

    def close(self) -> None:
        """End the proxy."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        if left:
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()

    async def _serve(self) -> None:
        app = web.Application(client_max_size=64 * 2**20)
        connector = aiohttp.TCPConnector(ssl=self._context, limit=0)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False, read_bufsize=2**22) as session:
            app[SESSION] = session
            app.router.add_route("*", "/{tail:.*}", self._pass)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            self._up.set()
            await self._stop.wait()
            await runner.cleanup()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        if self._away and not self._said and request.transport is not None:
            request.transport.abort()
        weather, watch = self.weather, "watch" in request.query
        fault = weather.request(request.method in WRITES) if weather is not None and not watch else ""
        if weather is not None and fault == "slow":
            await asyncio.sleep(weather.seconds())
        if fault in REFUSALS and fault != "500 done":
            return _refusal(fault)
        return await self._forward(request, lost=fault == "lost", instead="500 done" if fault == "500 done" else "")

    async def _forward(self, request: web.Request, lost: bool, instead: str) -> web.StreamResponse:
        if self._cut or self._away:
            raise web.HTTPServiceUnavailable
        write = request.method in WRITES
        body = await request.read()
        if self._cut:
            raise web.HTTPServiceUnavailable
        if write:
            self._count += 1
        mine = write and self._strike is not None and self._count == self._strike.at
        # From the chosen write on nothing else is carried out, though it be under way already.
        self._cut = self._cut or mine
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOPS}
        url = self._upstream + request.raw_path
        session = request.app[SESSION]
        async with session.request(
            request.method, url, data=body or None, headers=headers, timeout=aiohttp.ClientTimeout(total=None)
        ) as reply:
            if write and reply.status < 300:
                self.writes.append(f"{request.method} {request.path}")
            if mine and self._strike is not None and self._strike.lost:
                await reply.read()
                await asyncio.to_thread(self._kill)
                raise web.HTTPServiceUnavailable
            if lost or instead:
                await reply.read()
                if instead:
                    return _refusal(instead)
                if request.transport is not None:
                    request.transport.abort()
                raise web.HTTPServiceUnavailable
            answer = web.StreamResponse(status=reply.status, headers=_kept(reply))
            await answer.prepare(request)
            with contextlib.suppress(ConnectionError, aiohttp.ClientError):
                if "watch" in request.query:
                    await self._watch(reply, answer)
                else:
                    await answer.write(await reply.read())
                await answer.write_eof()
            if mine:
                await asyncio.sleep(0.05)
                await asyncio.to_thread(self._kill)
            return answer

    def _lines(self, found: bytes, late: list[bytes]) -> list[bytes]:
        """What a watch brings for this line: it, twice, with an old one after it, or nothing. `late` are all that there were."""
        fault = self.weather.event() if self.weather is not None else ""
        late.append(found)
        if fault == "doubled":
            return [found, found]
        if fault == "stale":
            return [found, late[len(late) // 2]]
        return [] if fault == "dropped" else [found]

    async def _watch(self, reply: aiohttp.ClientResponse, answer: web.StreamResponse) -> None:
        since = self._gone
        late: list[bytes] = []
        line = asyncio.ensure_future(reply.content.readline())
        try:
            while self._gone == since and not self._stop.is_set():
                if self._away:
                    return
                done, _ = await asyncio.wait([line], timeout=0.1)
                if not done:
                    continue
                found = line.result()
                if not found:
                    return
                if not self._blind:
                    for each in self._lines(found, late):
                        await answer.write(each)
                line = asyncio.ensure_future(reply.content.readline())
            if self._stop.is_set():
                return
            status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Expired", "code": 410, "message": "too old"}
            await answer.write(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")
        finally:
            line.cancel()


def _refusal(fault: str) -> web.Response:
    code, reason, message = REFUSALS[fault]
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code, "message": message}
    return web.json_response(status, status=code, headers={"Retry-After": "1"} if code == 429 else None)


def _kept(reply: aiohttp.ClientResponse) -> dict[str, Any]:
    return {name: value for name, value in reply.headers.items() if name.lower() not in HOPS}
