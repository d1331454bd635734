"""Whoever reaches a port that answers by HTTP, and whoever answers there in a shard's place.

- A stranger at a status port: what it says is bounded in bytes and in time, and those who may ask are answered meanwhile.
- A stranger at the operator's health port: its connections and their requests are bounded, and probes are answered meanwhile.
- Bytes of a stranger at a status port, read over a real connection: no answer, and no exception except those that are promised.
- The operator asks shard 0 for its progress, and believes an answer only with a proof.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from bench.peers.light_clients import status
from psjob import contract
from psjob.process.status_client import ask_shard
from psjob.shard.status_server import CONNECTIONS, REQUEST_BYTES
from psjob_client.local.process import Listening
from psjob_client.local.status import ask_status, is_healthy
from psjob_operator.cluster import observe
from psjob_operator.cluster.main import CONNECTIONS as HEALTH_CONNECTIONS
from psjob_operator.cluster.main import LINE_BYTES, Health
from psjob_operator.contract import STATUS_BYTES
from tests.live.live_shards import aside, eventually
from tests.live.shard_processes import Processes, processes
from tests.support.fuzzing import Change, byte_changes, changed_bytes, counts, fuzz
from tests.support.ports import free
from tests.support.runkeys import RUN
from tests.support.statusport import StatusPort

LINES = 20
MEMORY_KIB = 16 << 10


def started(run: Processes) -> int:
    """The status port of a shard that answers."""
    assert eventually(lambda: run.get(0, contract.STARTED_PATH)[0] == 200, 60)
    return int(run.config["shards"][0]["statusPort"])


def heard(port: int, *parts: bytes, pause: float = 0.0) -> bytes:
    """All that comes back until the end."""
    raw = b""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock, contextlib.suppress(ConnectionError):
        for part in parts:
            sock.sendall(part)
            time.sleep(pause)
        while part := sock.recv(4096):
            raw += part
    return raw


def trickled(port: int, words: bytes, pause: float) -> int:
    """How many bytes were sent, one by one, before the other side hung up without a word."""
    with socket.create_connection(("127.0.0.1", port), timeout=pause) as sock, contextlib.suppress(ConnectionError):
        for sent, byte in enumerate(words):
            sock.sendall(bytes([byte]))
            with contextlib.suppress(TimeoutError):
                assert sock.recv(1) == b""
                return sent
    return sent


def test_long_requests_cost_little_memory(tmp_path: Path) -> None:
    line = b"X-A: " + b"a" * 65000 + b"\r\n"
    with processes(tmp_path, forked=True, shards=1) as run, contextlib.ExitStack() as held:
        shard = run.start(0)
        port = started(run)
        (before,) = status(shard.pid, ("VmRSS",))
        socks = [held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10)) for _ in range(CONNECTIONS)]
        for part in (b"GET /healthz HTTP/1.1\r\n", *[line] * LINES):
            for sock in socks:
                with contextlib.suppress(OSError):  # hung up on
                    sock.sendall(part)
        time.sleep(0.3)
        assert status(shard.pid, ("VmRSS",))[0] - before <= MEMORY_KIB
        assert ask_shard("127.0.0.1", port, RUN["questions"])["run"] == "run-1"


@pytest.mark.parametrize("first", [b"", b"GET /healthz HTTP/1.1\r\n"])
def test_a_request_of_too_many_bytes_is_refused(tmp_path: Path, first: bytes) -> None:
    with processes(tmp_path, forked=True, shards=1) as run:
        run.start(0)
        port = started(run)
        head = b"GET /healthz HTTP/1.1\r\nX-A: "
        most = head + b"a" * (REQUEST_BYTES - len(head) - 4) + b"\r\n\r\n"
        assert heard(port, most).startswith(b"HTTP/1.1 200")
        assert heard(port, (first + b"X-A: ").ljust(REQUEST_BYTES, b"a")).split()[1] == b"431"
        assert b"alive" not in heard(port, most[:-4] + b"a\r\n\r\n")


def test_a_slow_request_is_hung_up_on(tmp_path: Path) -> None:
    """Each byte comes in time, and all of them do not. Requests that are whole may follow each other for longer."""
    with processes(tmp_path, forked=True, shards=1) as run:
        run.start(0)
        port = started(run)
        assert trickled(port, b"GET /healthz HTTP/1.1\r\nX-A: ".ljust(100, b"a"), pause=0.2) < 100
        question = f"GET {contract.CHALLENGE_PATH} HTTP/1.1\r\n\r\n".encode()
        raw = heard(port, *[question] * 4, f"GET {contract.HEALTH_PATH} HTTP/1.1\r\n\r\n".encode(), pause=0.8)
        assert raw.count(b"HTTP/1.1 200") == 5


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
                for _ in range(3 * HEALTH_CONNECTIONS):
                    sock = opened.enter_context(await asyncio.to_thread(socket.create_connection, ("127.0.0.1", port), 5))
                    await asyncio.to_thread(sock.sendall, b"GET /livez HTTP/1.1\r\nX-A: a\r\n")
                    socks.append(sock)
                await asyncio.sleep(0.2)
                gone = [await asyncio.to_thread(_hung_up, sock) for sock in socks]
                assert gone == [True] * (2 * HEALTH_CONNECTIONS) + [False] * HEALTH_CONNECTIONS
                assert await _code(port) == 200
            assert await _code(port, a="a" * (LINE_BYTES // 2)) == 200
            assert await _code(port, a="a" * (LINE_BYTES + 1)) == 400
        finally:
            beating.cancel()
            await health.stop()

    asyncio.run(asyncio.wait_for(main(), 60))


KEY = bytes(range(32))
MOST = 8 << 20
"""Bytes of memory for one answer here, which is a few KiB: JSON takes some ten times its bytes, and each reader makes its own of it."""


HEAD = b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\nX-Psjob-Answer: %s\r\nContent-Length: %d\r\n\r\n"


@counts(150, 20_000)
def test_the_client_reads_whatever_a_port_sends(cases: int) -> None:
    """Bytes of a stranger at the port, over a real connection: None, and no exception."""
    said: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said.pop(0) if said else b"")
        await writer.drain()
        writer.close()

    async def asked(port: int) -> None:
        shard = Listening("127.0.0.1", 0, port)
        assert await ask_status(shard, KEY, 5.0) is None
        await is_healthy(shard, 5.0)

    def read(case: tuple[list[Change], list[Change], bytes]) -> None:
        nonce = b'{"nonce": "%s"}' % case[2]
        said[:] = [changed_bytes(HEAD % (b"x", len(nonce)) + nonce, case[0]), changed_bytes(HEAD % (b"0" * 64, 2) + b"{}", case[1])] * 2
        loop.run_until_complete(asked(port))

    def made(random: Random) -> tuple[list[Change], list[Change], bytes]:
        return byte_changes(random), byte_changes(random), random.choice((b"a1", b"\\ud800", b"a\\r\\nX: y", b"", b"5" * 5000))

    loop = asyncio.new_event_loop()
    try:
        server = loop.run_until_complete(asyncio.start_server(serve, "127.0.0.1", 0))
        port = server.sockets[0].getsockname()[1]
        fuzz(cases, made, read, 2 * STATUS_BYTES + MOST)
        server.close()
    finally:
        loop.close()


@pytest.mark.parametrize("code", [b"9" * 5000, b"20", b"-1", b"\xb2"])
def test_a_code_that_is_none_is_no_answer(code: bytes) -> None:
    async def scenario() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.0 " + code + b" OK\r\n\r\n{}")
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        shard = Listening("127.0.0.1", 0, server.sockets[0].getsockname()[1])
        assert not await is_healthy(shard, 5.0)
        assert await ask_status(shard, KEY, 5.0) is None
        server.close()

    asyncio.run(scenario())


DEEP = b"HTTP/1.1 200 OK\r\nContent-Length: 200000\r\n\r\n" + b"[" * 200_000
ODD_ANSWERS = {
    "nothing": b"",
    "no HTTP": b"SSH-2.0-x\r\n",
    "a long line": b"HTTP/1.1 200 " + b"x" * 70_000,
    "a list": b"HTTP/1.1 200 OK\r\n\r\n[]",
    "deep": DEEP,
    "a nonce on two lines": b'HTTP/1.1 200 OK\r\nContent-Length: 21\r\n\r\n{"nonce": "a\\r\\nX: y"}',
}


@pytest.mark.parametrize("name", ODD_ANSWERS)
def test_a_shard_that_is_asked_raises_what_it_promises(name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            sock = server.accept()[0]
            with sock:
                sock.recv(1000)
                sock.sendall(ODD_ANSWERS[name])

        thread = aside(answer)
        with pytest.raises((OSError, ValueError)):
            ask_shard("127.0.0.1", server.getsockname()[1], KEY, seconds=10.0)
        thread.join(10)


Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _pull(monkeypatch: pytest.MonkeyPatch, answer: Answer, ip: str = "127.0.0.1", key: bytes | None = KEY) -> observe.ProgressAnswer:
    async def scenario() -> observe.ProgressAnswer:
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        monkeypatch.setattr(observe, "STATUS_PORT", runner.addresses[0][1])
        try:
            async with aiohttp.ClientSession() as session:
                return await observe.pull(session, ip, key)
        finally:
            await runner.cleanup()

    return asyncio.run(scenario())


def _proving(port: StatusPort, change: Callable[[bytes], bytes] = lambda body: body) -> Answer:
    async def answer(request: web.Request) -> web.Response:
        code, headers, body = port.respond(request.path, request.headers)
        return web.Response(status=code, headers=headers, body=change(body) if request.path == "/status" else body)

    return answer


def test_an_answer_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    port = StatusPort(lambda path: {"path": path}, lambda: KEY)
    assert _pull(monkeypatch, _proving(port)) == observe.ProgressAnswer({"path": "/status"})
    assert port.asked == ["/status"] and port.refused == 0


def test_who_has_another_key_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    port = StatusPort(lambda path: {"path": path}, lambda: KEY)
    assert _pull(monkeypatch, _proving(port), key=bytes(32)) == observe.ProgressAnswer(None, observe.UNKNOWN_KEY)
    assert not port.asked


@pytest.mark.parametrize("change", [lambda body: body + b" ", lambda body: body.replace(b"1", b"2"), lambda _: b"{}"])
def test_a_body_that_was_changed_on_the_way_is_not_believed(monkeypatch: pytest.MonkeyPatch, change: Callable[[bytes], bytes]) -> None:
    port = StatusPort(lambda _: {"step": 1}, lambda: KEY)
    assert _pull(monkeypatch, _proving(port, change)) == observe.ProgressAnswer(None, observe.UNPROVEN)


def test_an_answer_without_a_proof_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"nonce": "a1"} if request.path == "/challenge" else {"step": 1})

    assert _pull(monkeypatch, answer) == observe.ProgressAnswer(None, observe.UNPROVEN)


def test_without_a_key_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.json_response({})

    assert _pull(monkeypatch, answer, key=None) == observe.ProgressAnswer() and not asked


@pytest.mark.parametrize("nonce", [None, 3, "", "a b", "a\r\nX: y", "ä"], ids=repr)
def test_a_challenge_that_is_none_is_not_answered(monkeypatch: pytest.MonkeyPatch, nonce: Any) -> None:
    asked = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.json_response({"nonce": nonce})

    assert _pull(monkeypatch, answer) == observe.ProgressAnswer() and asked == ["/challenge"]


@pytest.mark.parametrize("at", ["/challenge", "/status"])
def test_a_redirect_is_not_followed(monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    async def answer(request: web.Request) -> web.Response:
        if request.path == at:
            raise web.HTTPFound("/secret")
        return web.json_response({"nonce": "a1", "secret": 1})

    assert _pull(monkeypatch, answer) == observe.ProgressAnswer()


@pytest.mark.parametrize("at", ["/challenge", "/status"])
def test_an_answer_without_end_is_left(monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path != at:
            return web.json_response({"nonce": "a1"})
        reply = web.StreamResponse()
        await reply.prepare(request)
        while True:
            await reply.write(b" " * 8192)
        return reply

    assert _pull(monkeypatch, answer) == observe.ProgressAnswer()


def test_silence_ends_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "SECONDS", 0.2)

    async def answer(_: web.Request) -> web.Response:
        await asyncio.sleep(5)
        return web.json_response({})

    assert _pull(monkeypatch, answer) == observe.ProgressAnswer()


@pytest.mark.parametrize("ip", ["", "localhost", "example.com", "169.254.169.254/latest", "1.2.3"])
def test_only_an_address_is_asked(monkeypatch: pytest.MonkeyPatch, ip: str) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"asked": True})

    assert _pull(monkeypatch, answer, ip) == observe.ProgressAnswer()
