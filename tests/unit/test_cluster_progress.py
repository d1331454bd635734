"""What a pod says about its progress is cut to size before anyone looks at it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from psjob_operator.cluster import progress
from psjob_operator.contract import STATUS_BYTES


@pytest.mark.parametrize(
    "raw",
    [None, b"", b"[1]", b"3", b"{", b'{"a":' * 5000, b"x" * (STATUS_BYTES + 1), b"\xff\xfe{}", b"[" * 100_000],
    ids=["nothing", "empty", "list", "number", "cut", "deep", "long", "not utf-8", "deeper"],
)
def test_what_is_no_object_of_bounded_size_is_nothing(raw: bytes | None) -> None:
    assert progress.parse(raw) is None


def test_numbers_must_be_finite_and_strings_are_cut_and_made_printable() -> None:
    raw = json.dumps(
        {"loss": float("nan"), "rate": 1e400, "step": 12, "huge": 2**70, "text": "a\x1b[31m" + "b" * 400, "deep": {"a": [{"b": 1}]}}
    )
    found = progress.parse(raw.encode())
    assert found is not None
    assert found["loss"] is None and found["rate"] is None and found["huge"] is None
    assert found["step"] == 12
    assert found["deep"] == {"a": [{"b": 1}]}
    assert "\x1b" not in found["text"] and len(found["text"]) <= progress.TEXT


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)


@settings(max_examples=50)
@given(st.dictionaries(st.text(), JSON, max_size=5))
def test_the_result_is_plain_json_whatever_came(value: dict[str, Any]) -> None:
    found = progress.parse(json.dumps(value).encode())
    assert found is None or json.dumps(found, allow_nan=False)


def _pull(monkeypatch: pytest.MonkeyPatch, answer: Callable[[web.Request], Awaitable[web.StreamResponse]], ip: str = "127.0.0.1") -> Any:
    async def scenario() -> Any:
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        monkeypatch.setattr(progress, "STATUS_PORT", runner.addresses[0][1])
        try:
            async with aiohttp.ClientSession() as session:
                return await progress.pull(session, ip)
        finally:
            await runner.cleanup()

    return asyncio.run(scenario())


def test_an_answer_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"path": request.path})

    assert _pull(monkeypatch, answer) == {"path": "/status"}


def test_a_redirect_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(request: web.Request) -> web.Response:
        if request.path == "/status":
            raise web.HTTPFound("/secret")
        return web.json_response({"secret": 1})

    assert _pull(monkeypatch, answer) is None


def test_an_answer_without_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse()
        await reply.prepare(request)
        while True:
            await reply.write(b" " * 8192)
        return reply

    assert _pull(monkeypatch, answer) is None


def test_silence_ends_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS", 0.2)

    async def answer(_: web.Request) -> web.Response:
        await asyncio.sleep(5)
        return web.json_response({})

    assert _pull(monkeypatch, answer) is None


@pytest.mark.parametrize("ip", ["", "localhost", "example.com", "169.254.169.254/latest", "1.2.3"])
def test_only_an_address_is_asked(monkeypatch: pytest.MonkeyPatch, ip: str) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"asked": True})

    assert _pull(monkeypatch, answer, ip) is None
