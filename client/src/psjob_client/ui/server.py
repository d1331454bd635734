"""The page's server: reads jobs where they are, and answers GET only on 127.0.0.1, to a browser that has the page's address.

The token is behind the # of the address, so that no request, log or referrer has it. The page's script sends it in a header. A cookie
would go to every port of 127.0.0.1, which other users of the machine may listen at. Every user of the machine can read the command line
of a browser, so that it names a file of this user, which leads on (`opened`).
"""

from __future__ import annotations

import asyncio
import contextlib
import html
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
import webbrowser
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from psjob_client.compare import outcome
from psjob_client.jobs.view import JobView
from psjob_client.problems import BadInput, JobProblem, NoSuchJob
from psjob_client.sdk.client import AsyncClient
from psjob_client.ui import shown
from psjob_client.ui.shown import AXES, MOST, STEP, points_each

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.datastructures import Headers, MutableHeaders
    from starlette.requests import Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
except ModuleNotFoundError:
    raise BadInput("the page needs a web server, which is not installed here: pip install starlette uvicorn") from None

HOST = "127.0.0.1"
STATIC = {
    "": ("index.html", "text/html"), "page.css": ("page.css", "text/css"), "page.js": ("page.js", "text/javascript"),
    "charts.js": ("charts.js", "text/javascript"), "uplot.js": ("uplot.js", "text/javascript"), "uplot.css": ("uplot.css", "text/css"),
    "views.js": ("views.js", "text/javascript"), "timeline.js": ("timeline.js", "text/javascript"), "dom.js": ("dom.js", "text/javascript"),
    "icon.svg": ("icon.svg", "image/svg+xml"),
}  # fmt: skip
SECONDS = 15.0
"""A place that has not answered by then is shown as a problem."""
RUNS, LINES_READ = 200, 12_000
"""Runs that are drawn over one another: so many at most, with so many lines of their records together."""
MOST_SMOOTHING = 0.99
LINES, LONGEST_LINE = 400, 2000
"""Of a process's log: so many lines, each with so many characters."""
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
LEADS_ON = """<!doctype html>
<meta charset="utf-8"><meta http-equiv="refresh" content="0;url={address}"><title>psjob</title>
<p>The page is <a href="{address}">here</a>.
"""


class Page:
    """Serves the jobs of some places, and the comparisons of a folder, from its own thread while it is entered."""

    def __init__(self, clients: Sequence[AsyncClient], folder: Path, port: int = 0) -> None:
        """Raises BadInput if the port is taken."""
        self._clients = clients
        self._folder = folder
        self._token = secrets.token_urlsafe(24)
        self._socket = _listening(port)
        self.port: int = self._socket.getsockname()[1]
        self._server = uvicorn.Server(
            uvicorn.Config(self._app(), log_level="error", lifespan="on", access_log=False, timeout_graceful_shutdown=1)
        )
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, name="page", daemon=True)

    @property
    def address(self) -> str:
        """What is opened in a browser; anyone who has it may read."""
        return f"http://{HOST}:{self.port}/#token={self._token}"

    def __enter__(self) -> Page:
        """It is served from now on."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """It is no longer served."""
        self._server.should_exit = True
        self._thread.join(SECONDS)
        self._socket.close()

    def wait(self) -> None:
        """Until somebody ends it, as Ctrl-C does."""
        while self._thread.is_alive():
            self._thread.join(0.5)

    def _app(self) -> Starlette:
        @contextlib.asynccontextmanager
        async def life(_: Starlette) -> AsyncIterator[None]:
            yield
            for client in self._clients:
                with contextlib.suppress(Exception):
                    await client.close()

        app = Starlette(
            routes=[
                Route("/api/jobs", self._jobs), Route("/api/jobs/{place:int}/{name}", self._job),
                Route("/api/jobs/{place:int}/{name}/curves", self._curves), Route("/api/jobs/{place:int}/{name}/log", self._log),
                Route("/api/runs", self._runs),
                Route("/api/comparisons", self._comparisons), Route("/api/comparisons/{name}", self._comparison),
                Route("/", _static), Route("/{name}", _static),
            ],
            lifespan=life,
        )  # fmt: skip
        app.add_middleware(Gate, token=self._token, port=lambda: self.port)
        return app

    async def _jobs(self, request: Request) -> Response:
        """All jobs by place; a place that cannot be read says why, and the others are there."""
        return JSONResponse({"now": time.time(), "places": await asyncio.gather(*(_listed(client) for client in self._clients))})

    async def _job(self, request: Request) -> Response:
        async def read(client: AsyncClient, name: str) -> Any:
            found = await asyncio.gather(client.get(name), client.timeline(name), client.events(name), client.checkpoints(name))
            return shown.detail(*found, time.time())

        return await self._asked(request, read)

    async def _curves(self, request: Request) -> Response:
        return await self._asked(request, lambda client, name: _curves(client, name, *_drawn(request)))

    async def _runs(self, request: Request) -> Response:
        """Curves and hyperparameters of all that `run=PLACE/ID` names, in that order; one that cannot be read says why."""
        asked = list(dict.fromkeys(request.query_params.getlist("run")))
        if len(asked) > RUNS:
            return JSONResponse({"problem": f"{len(asked)} runs are chosen; at most {RUNS} are drawn over one another: choose fewer"}, 400)
        wanted = [(int(place), name) for place, _, name in (one.partition("/") for one in asked) if place.isascii() and place.isdigit()]
        places = sorted({place for place, _ in wanted if place < len(self._clients)})
        listed = dict(zip(places, await asyncio.gather(*(_known(self._clients[place]) for place in places)), strict=True))
        read = (_run(self._clients, listed, place, name, len(wanted), *_drawn(request)) for place, name in wanted)
        return JSONResponse({"runs": await asyncio.gather(*read)})

    async def _log(self, request: Request) -> Response:
        process = request.query_params.get("process") or None
        return await self._asked(request, lambda client, name: _log(client, name, process))

    async def _comparisons(self, request: Request) -> Response:
        return JSONResponse({"comparisons": outcome.names(self._folder)})

    async def _comparison(self, request: Request) -> Response:
        try:
            return JSONResponse(shown.comparison(outcome.read_comparison(self._folder, request.path_params["name"]), _drawn(request)[1]))
        except BadInput as problem:
            return JSONResponse({"problem": str(problem)}, 404)

    async def _asked(self, request: Request, read: Callable[[AsyncClient, str], Coroutine[Any, Any, Any]]) -> Response:
        """What a place says of a job; else its sentence, which the page shows."""
        place, name = request.path_params["place"], request.path_params["name"]
        if place >= len(self._clients):
            return JSONResponse({"problem": f"there is no place {place}; load the page again"}, 404)
        try:
            return JSONResponse(await asyncio.wait_for(read(self._clients[place], name), SECONDS))
        except NoSuchJob as problem:
            return JSONResponse({"problem": problem.in_terminal}, 404)
        except JobProblem as problem:
            return JSONResponse({"problem": problem.in_terminal}, 502)
        except TimeoutError:
            return JSONResponse({"problem": f"no answer within {SECONDS:g} s"}, 504)


async def _listed(client: AsyncClient) -> dict[str, Any]:
    title = "cluster"
    try:
        async with asyncio.timeout(SECONDS):
            title = (await client.place()).title
            return {"title": title, "jobs": [shown.row(job) for job in await client.list()], "problem": ""}
    except JobProblem as problem:
        return {"title": title, "jobs": [], "problem": problem.in_terminal}
    except TimeoutError:
        return {"title": title, "jobs": [], "problem": f"no answer within {SECONDS:g} s"}


async def _curves(client: AsyncClient, name: str, axis: str, smoothing: float) -> dict[str, Any]:
    return shown.curves(await client.metrics(name), axis, smoothing, MOST)


async def _known(client: AsyncClient) -> Mapping[str, JobView] | str:
    """All jobs of a place by id, or why it cannot be read."""
    try:
        async with asyncio.timeout(SECONDS):
            return {job.id: job for job in await client.list()}
    except JobProblem as problem:
        return str(problem)
    except TimeoutError:
        return f"no answer within {SECONDS:g} s"


async def _run(
    clients: Sequence[AsyncClient], listed: Mapping[int, Mapping[str, JobView] | str], place: int, name: str, runs: int, axis: str,
    smoothing: float,
) -> dict[str, Any]:  # fmt: skip
    jobs = listed.get(place, f"there is no place {place}; load the page again")
    job = None if isinstance(jobs, str) else jobs.get(name)
    problem = jobs if isinstance(jobs, str) else f"there is no run {name} any more"
    if job is not None:
        try:
            async with asyncio.timeout(SECONDS):
                history = await (await clients[place].place()).history(name, LINES_READ // runs)
            return shown.run_data(place, job, history, axis, smoothing, points_each(runs))
        except JobProblem as said:
            problem = str(said)
        except TimeoutError:
            problem = f"no answer within {SECONDS:g} s"
    return {"place": place, "id": name, "name": name, "settings": {}, "series": [], "problem": problem}


async def _log(client: AsyncClient, name: str, process: str | None) -> dict[str, Any]:
    lines = [{"process": line.process, "text": line.text[:LONGEST_LINE]} async for line in client.logs(name, process, tail=LINES)]
    return {"lines": lines[-LINES:], "most": LINES}


async def _static(request: Request) -> Response:
    name, kind = STATIC.get(request.path_params.get("name", ""), ("", ""))
    if not name:
        return Response("there is no such page\n", 404, media_type="text/plain")
    return Response(files(__package__).joinpath("static", name).read_bytes(), media_type=kind)


def _drawn(request: Request) -> tuple[str, float]:
    """The axis, and how much is smoothed, of a request for curves."""
    axis, text = request.query_params.get("axis", STEP), request.query_params.get("smoothing", "0")
    try:
        smoothing = float(text)
    except ValueError:
        smoothing = 0.0
    return axis if axis in AXES else STEP, min(smoothing, MOST_SMOOTHING) if smoothing > 0 else 0.0


def _listening(port: int) -> socket.socket:
    try:
        return socket.create_server((HOST, port))
    except (OSError, OverflowError) as error:
        raise BadInput(f"--port {port}: {HOST} cannot be listened on there: {error}; leave --port out for a free one") from None


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


@contextlib.contextmanager
def browser_opened(address: str) -> Iterator[Path]:
    """Opens `address` in a browser; the file that does is there meanwhile."""
    folder = Path(tempfile.mkdtemp(prefix="psjob-page-"))  # of mode 0700
    try:
        file = folder / "open.html"
        made = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(made, "w", encoding="utf-8") as to:
            to.write(LEADS_ON.format(address=html.escape(address)))
        webbrowser.open(file.as_uri())
        yield file
    finally:
        shutil.rmtree(folder, ignore_errors=True)
