"""Who may read the page: a browser of this machine that has the page's address."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
"""Nothing is loaded from elsewhere, no other page may show this one, and nothing of it is kept."""
WORDS = "open the address that `psjob ui` has printed: it holds a token that changes at each start"


class Gate:
    """Lets GET requests through that name this machine as host and have the token, as a cookie or in the address of the first page.

    The name of the host is looked at because a page elsewhere can let its own name point to 127.0.0.1 (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, token: str, port: Callable[[], int]) -> None:
        self._app = app
        self._token = token
        self._port = port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers by itself, or hands the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = self._answer(scope)
        await (self._app if answer is None else answer)(scope, receive, _with_headers(send))

    def _answer(self, scope: Scope) -> Response | None:
        """A refusal, or the cookie; None where the request is let through."""
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("this page is read-only: only GET is answered\n", 405, {"Allow": "GET, HEAD"})
        port = self._port()
        headers = Headers(scope=scope)
        if headers.get("host") not in (f"127.0.0.1:{port}", f"localhost:{port}"):
            return PlainTextResponse(f"this page is served at http://127.0.0.1:{port} alone\n", 421)
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if given and self._is_token(given):
            answer = RedirectResponse(scope["path"], 303)
            answer.set_cookie(_cookie(port), self._token, httponly=True, samesite="strict", path="/")
            return answer
        if not self._is_token(_read(headers.get("cookie", ""), _cookie(port))):
            return PlainTextResponse(WORDS + "\n", 403)
        return None

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self._token.encode())


def _cookie(port: int) -> str:
    """Cookies are not kept apart by port, so that two pages would take each other's."""
    return f"psjob-{port}"


def _read(header: str, name: str) -> str:
    try:
        found = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return found.value if found is not None else ""


def _with_headers(send: Send) -> Callable[[Message], Awaitable[None]]:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(HEADERS)
        await send(message)

    return sending
