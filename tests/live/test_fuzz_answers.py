"""Bytes of a stranger at a status port, read over a real connection: no answer, and no exception but those that are promised."""

from __future__ import annotations

import asyncio
import socket
import threading
from random import Random

import pytest

from psjob.process.asking import ask
from psjob_client.local import status
from psjob_client.local.process import Listening
from psjob_operator.contract import STATUS_BYTES
from tests.fuzzing import Change, byte_changes, changed_bytes, counts, fuzz

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
        assert await status.ask_status(shard, KEY, 5.0) is None
        await status.is_healthy(shard, 5.0)

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
        assert not await status.is_healthy(shard, 5.0)
        assert await status.ask_status(shard, KEY, 5.0) is None
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

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises((OSError, ValueError)):
            ask("127.0.0.1", server.getsockname()[1], KEY, seconds=10.0)
        thread.join(10)
