"""The read-only status port: JSON for the planner and the display, and the two probes. Never a path or a parameter."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from psjob import contract
from psjob.modes import written
from psjob.shard.encoded import said_of
from psjob.shard.phase import Phase

if TYPE_CHECKING:
    from psjob.shard.server import Server


def serve_status(server: Server, bind: str | None, port: int) -> None:
    """Listen in a thread. Raises OSError when the port is taken."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 5
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == contract.STATUS_PATH:
                self._send(200, status(server))
            elif self.path == contract.HEALTH_PATH:
                beat = server.beat if server.coordinator is None else min(server.beat, server.coordinator.beat)
                alive = time.monotonic() - beat < server.place.config.shard_timeout
                self._send(200 if alive else 503, {"alive": alive})
            elif self.path == contract.STARTED_PATH:
                ready = server.store.phase is Phase.SERVING or server.coordinator is not None or server.final or server.link is not None
                self._send(200 if ready else 503, {"started": ready})
            else:
                self._send(404, {"error": f"there is {contract.STATUS_PATH}, {contract.HEALTH_PATH} and {contract.STARTED_PATH}"})

        def _send(self, code: int, body: dict[str, Any]) -> None:
            raw = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, format: str, *args: Any) -> None:
            return

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

        def handle_error(self, request: Any, client_address: Any) -> None:
            return

    http = Quiet((bind or "", port), Handler)
    threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.5}, name="status", daemon=True).start()


def status(server: Server) -> dict[str, Any]:
    """The JSON of contract.STATUS_KEYS."""
    store, counters = server.store, server.store.counters
    body: dict[str, Any] = {
        "run": store.run, "index": store.index, "attempt": store.attempt, "view": store.view, "pod": server.place.pod,
        "state": _state(server),
        "counters": {
            "pushes": counters.pushes, "applied": counters.applied, "dropped": counters.dropped,
            "duplicatesRefused": counters.duplicates, "duplicatesDiffering": counters.differing, "fenced": counters.fenced,
            "updatesLost": counters.lost, "acknowledged": {str(r): c for r, c in store.clocks().items()},
            "firstApplied": counters.first_applied, "badConnections": server.bad_connections, "blocks": len(store.cells),
        },
        "transports": {str(rank): session.transport for rank, session in sorted(server.sessions.items())},
        "memory": {"rssBytes": _rss()},
        "nonFinite": store.non_finite.told(),
        **(store.staleness.told() if store.staleness is not None else {"lag": None, "gap": None}),
    }  # fmt: skip
    coordinator = server.coordinator
    if coordinator is not None and coordinator.views.state != "reading":
        body["coordinator"] = coordinator.progress.status(time.time()) | {
            "mode": written(coordinator.mode),
            **coordinator.lateness.told(),
            "workers": coordinator.members.status(),
            "waiting": coordinator.views.reason(time.monotonic()),
            "codecs": said_of(session.encoded for session in list(server.sessions.values())),
            "state": coordinator.views.state,
            "transport": _transport(server),
            "nonFinite": store.non_finite.sentence(),
            "warning": store.staleness.guard.warning if store.staleness is not None and store.staleness.guard is not None else None,
        }
    return body


def _state(server: Server) -> str:
    if server.final:
        return "finished"
    phase = server.store.phase
    if phase is Phase.SERVING:
        return "serving"
    return "restoring" if server.place.number > 1 and phase is not Phase.INIT else "waiting"


def _transport(server: Server) -> str | None:
    ways = {session.transport for session in list(server.sessions.values())}
    return "mixed" if len(ways) > 1 else next(iter(ways), None)


def _rss() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096
    except OSError:
        return 0
