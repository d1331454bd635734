"""A stranger at the operator's health port: its connections and their requests are bounded, and probes are answered meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Mapping
from typing import Any

import aiohttp

from psjob_operator.cluster.health import CONNECTIONS, LINE_BYTES, Health
from tests.ports import free


async def _page() -> bytes:
    return b""


def _numbers() -> Mapping[str, Any]:
    return {}


async def _code(port: int, **headers: str) -> int:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/livez", headers=headers) as said:
        return said.status


def _hung_up(sock: socket.socket) -> bool:
    sock.settimeout(0.01)
    try:
        return sock.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_connections_and_requests_are_bounded() -> None:
    async def main() -> None:
        with free() as held:
            port = int(held.getsockname()[1])
        health = Health(_numbers, _page)
        await health.start("127.0.0.1", port)
        beating = asyncio.create_task(health.beat())
        try:
            with contextlib.ExitStack() as opened:
                socks = []
                for _ in range(3 * CONNECTIONS):
                    sock = opened.enter_context(await asyncio.to_thread(socket.create_connection, ("127.0.0.1", port), 5))
                    await asyncio.to_thread(sock.sendall, b"GET /livez HTTP/1.1\r\nX-A: a\r\n")
                    socks.append(sock)
                await asyncio.sleep(0.2)
                gone = [await asyncio.to_thread(_hung_up, sock) for sock in socks]
                assert gone == [True] * (2 * CONNECTIONS) + [False] * CONNECTIONS
                assert await _code(port) == 200
            assert await _code(port, a="a" * (LINE_BYTES // 2)) == 200
            assert await _code(port, a="a" * (LINE_BYTES + 1)) == 400
        finally:
            beating.cancel()
            await health.stop()

    asyncio.run(asyncio.wait_for(main(), 60))
