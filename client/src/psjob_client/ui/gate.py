"""Who may read the page: a browser of this machine that has the page's address.

The token is behind the # of the address, so that no request, log or referrer has it. The page's script sends it in a header. A cookie
would go to every port of 127.0.0.1, which other users of the machine may listen at.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
"""Nothing is loaded from elsewhere, no other page may show this one, and nothing of it is kept."""
DATA = "/api/"
"""Where what jobs say is read. All else is the page's own files, which are in every psjob."""
SCHEME = "Bearer "
WORDS = "open the address that `psjob ui` has printed: it holds a token that changes at each start"


class Gate:
    """Lets GET requests through that name this machine as host and, where they are of data, have the token as `Authorization`.

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
        """A refusal; None where the request is let through."""
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("this page is read-only: only GET is answered\n", 405, {"Allow": "GET, HEAD"})
        port = self._port()
        headers = Headers(scope=scope)
        if headers.get("host") not in (f"127.0.0.1:{port}", f"localhost:{port}"):
            return PlainTextResponse(f"this page is served only at http://127.0.0.1:{port}\n", 421)
        given = headers.get("authorization", "").removeprefix(SCHEME)
        if scope["path"].startswith(DATA) and not self._is_token(given):
            return PlainTextResponse(WORDS + "\n", 403)
        return None

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self._token.encode())


def _with_headers(send: Send) -> Callable[[Message], Awaitable[None]]:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(HEADERS)
        await send(message)

    return sending
