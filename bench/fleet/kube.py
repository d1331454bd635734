"""A small client of one API server, quick enough to be the bare client: requests and watches."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from types import TracebackType
from typing import Any, TypeVar

import aiohttp

from hack.cluster.options import Ready

CONNECTIONS = 32
STRATEGIC = "application/strategic-merge-patch+json"
T = TypeVar("T")


class Refused(RuntimeError):
    """The API server's answer was no; `code` is its HTTP status."""

    def __init__(self, code: int, body: str) -> None:
        super().__init__(f"{code}: {body[:400]}")
        self.code = code


class Kube:
    """The cluster's administrator, with at most CONNECTIONS requests at a time."""

    def __init__(self, ready: Ready) -> None:
        self._url = ready.url
        self._tls = ssl.create_default_context(cafile=ready.ca)
        self._tls.load_cert_chain(ready.cert, ready.key)
        self._session: aiohttp.ClientSession | None = None
        self._gate = asyncio.Semaphore(CONNECTIONS)

    async def __aenter__(self) -> Kube:
        connector = aiohttp.TCPConnector(ssl=self._tls, limit=0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None), read_bufsize=2**21)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._session:
            await self._session.close()

    async def call(self, method: str, path: str, body: Any = None, content: str = "application/json") -> Any:
        """One request; JSON in and out. Raises Refused."""
        assert self._session
        headers = {"Content-Type": content} if body is not None else None
        data = None if body is None else json.dumps(body).encode()
        # The time begins behind the gate, at which thousands may wait.
        async with self._gate, asyncio.timeout(60), self._session.request(method, self._url + path, data=data, headers=headers) as answer:
            raw = await answer.read()
            if answer.status >= 400:
                raise Refused(answer.status, raw.decode(errors="replace"))
            return json.loads(raw)

    async def watch(self, path: str) -> AsyncIterator[tuple[float, str, dict[str, Any]]]:
        """(monotonic time of receipt, type, object) forever; where the API server cuts it, it is taken up."""
        assert self._session
        version = "0"
        while True:
            query = {"watch": "1", "resourceVersion": version, "timeoutSeconds": "3600"}
            async with self._session.get(self._url + path, params=query) as answer:
                if answer.status >= 400:
                    raise Refused(answer.status, await answer.text())
                rest = b""
                async for chunk in answer.content.iter_any():
                    now = time.monotonic()
                    *lines, rest = (rest + chunk).split(b"\n")
                    for event in (json.loads(line) for line in lines if line):
                        if event["type"] == "ERROR":
                            raise Refused(event["object"].get("code", 0), str(event["object"]))
                        version = event["object"]["metadata"]["resourceVersion"]
                        yield now, event["type"], event["object"]


async def together(calls: Iterable[Awaitable[T]]) -> list[T]:
    """All of them; the client's own gate bounds how many are under way."""
    return await asyncio.gather(*calls)


async def until(what: str, check: Callable[[], Any], seconds: float) -> None:
    """Poll until `check` answers something true. Raises TimeoutError that names what was waited for."""
    end = time.monotonic() + seconds
    while not check():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        await asyncio.sleep(0.02)
