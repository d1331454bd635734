"""The operator asks shard 0 for its progress, and believes an answer only with a proof."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from psjob_operator.cluster import observe
from tests.support.statusport import StatusPort

KEY = bytes(range(32))
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
