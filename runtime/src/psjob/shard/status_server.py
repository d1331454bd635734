"""The read-only status port: whether this shard lives, for everybody; JSON for who proves to have the run's key for questions.

Nonces of the status port: each is good for one question, and for a short time. None is kept until it has been used.

What an asker at the status port says: a request line and a few headers, which come soon or not at all."""

from __future__ import annotations

import contextlib
import io
import json
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from psjob import contract
from psjob.contract import keys
from psjob.process import supervise
from psjob.process.errors import LONGEST_MESSAGE, leave_message
from psjob.protocol.coordinator.step_times import JobSettings, advice
from psjob.protocol.shard.events import Phase
from psjob.shard.server import Server
from psjob.shard.worker_stream import said_of
from psjob.wire.unauthenticated import UnauthenticatedPeers

SAID = 32
"""Digits of a nonce before its seal: when it was made, in microseconds, and half of them random."""


class Nonces:
    """Hex digits. Times are those of one clock, in seconds; a nonce is good for `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._key = secrets.token_bytes(keys.SIZE)
        self._used: dict[str, float] = {}
        """By nonce, until when it would have been good; oldest first."""
        self._lock = threading.Lock()

    def make(self, now: float) -> str:
        """A fresh one."""
        said = f"{int(now * 1e6):016x}{secrets.token_hex(8)}"
        return said + keys.mac(self._key, said).hex()

    def spend(self, nonce: str, now: float) -> bool:
        """Use it up; False where it was not made here, is too old, or was used before."""
        said, seal = nonce[:SAID], nonce[SAID:]
        if not keys.same(seal, keys.mac(self._key, said).hex()):
            return False
        until = int(said[:16], 16) / 1e6 + self._seconds
        with self._lock:
            while self._used and (oldest := next(iter(self._used.items())))[1] < now:
                del self._used[oldest[0]]
            if now > until or nonce in self._used:
                return False
            self._used[nonce] = until
            return True


REQUEST_BYTES: Final = 4096
"""Most bytes of one request. The longest that anybody needs, with a proof, has a few hundred."""
REQUEST_SECONDS: Final = 2.0
"""From the first byte of a request to its last."""


class TooLong(HTTPException):
    """A request has more than REQUEST_BYTES."""


class BoundedRequest(io.BufferedIOBase):
    """The requests of one connection, line by line. `idle` seconds may pass before the first byte of one."""

    def __init__(self, sock: socket.socket, idle: float) -> None:
        self._sock, self._idle = sock, idle
        self._held = b""
        self._taken = 0
        self._until: float | None = None

    def readable(self) -> bool:
        return True

    def begin(self) -> None:
        """The next request has its own bytes and its own time."""
        self._taken, self._until = 0, None

    def readline(self, size: int | None = -1, /) -> bytes:
        """The next line with its end; less at the end of the stream. Raises TooLong, TimeoutError and OSError."""
        while b"\n" not in self._held:
            room = REQUEST_BYTES - self._taken - len(self._held)
            if room <= 0:
                raise TooLong(f"a request has at most {REQUEST_BYTES} bytes")
            part = self._receive(room)
            if not part:
                break
            self._held += part
        at = self._held.find(b"\n") + 1 or len(self._held)
        line, self._held = self._held[:at], self._held[at:]
        self._taken += len(line)
        return line

    def _receive(self, most: int) -> bytes:
        if self._until is None and self._held:
            self._until = time.monotonic() + REQUEST_SECONDS
        left = self._idle if self._until is None else self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"a request has at most {REQUEST_SECONDS:g} s")
        self._sock.settimeout(left)
        try:
            part = self._sock.recv(most)
        finally:
            self._sock.settimeout(self._idle)  # what is answered has its own time
        if self._until is None:
            self._until = time.monotonic() + REQUEST_SECONDS
        return part


CONNECTIONS = 64
"""At a time; the next to ask takes the place of one that has had more time."""
IDLE_SECONDS = 5.0
"""Who has connected may say nothing for so long, and take as long to read a part of an answer."""


def serve_status(server: Server, bind: str | None, port: int) -> ThreadingHTTPServer:
    """Listen in a thread, until what is returned is shut down. Raises OSError when the port is taken."""
    nonces, questions = Nonces(contract.CHALLENGE_SECONDS), server.place.keys.questions

    class Handler(BaseHTTPRequestHandler):
        timeout = IDLE_SECONDS
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            self.rfile.close()
            self.rfile: BoundedRequest = BoundedRequest(self.connection, IDLE_SECONDS)

        def handle_one_request(self) -> None:
            self.rfile.begin()
            self.requestline = self.request_version = self.command = ""
            try:
                super().handle_one_request()
            except TooLong as error:  # the request line; of headers the base class answers the same
                self.send_error(431, str(error))

        def do_GET(self) -> None:
            if self.path == contract.HEALTH_PATH:
                late = server.coordinator is not None and time.monotonic() - server.coordinator.beat > server.place.config.shard_timeout
                alive = server.liveness.alive() and not late
                self._send(200 if alive else 503, {"alive": alive})
            elif self.path == contract.STARTED_PATH:
                self._send(200 if server.asked else 503, {"started": server.asked})
            elif self.path == contract.CHALLENGE_PATH:
                self._send(200, {"nonce": nonces.make(time.monotonic())})
            elif self.path in (contract.STATUS_PATH, contract.HISTORY_PATH):
                self._answer({contract.STATUS_PATH: status, contract.HISTORY_PATH: history}[self.path])
            else:
                self._send(404, {"error": f"there is {contract.HEALTH_PATH} and {contract.STARTED_PATH}"})

        def _answer(self, told: Callable[[Server], dict[str, Any] | None]) -> None:
            nonce, _, proof = self.headers.get(contract.PROOF_HEADER, "").partition(" ")
            right = keys.same(proof, keys.question(questions, nonce, self.path)) if questions else False
            if not right or not nonces.spend(nonce, time.monotonic()):
                self._send(
                    403,
                    {"error": f"{contract.PROOF_HEADER} does not prove that this question is of this run; see {contract.CHALLENGE_PATH}"},
                )
                return
            body = told(server)
            self._send(404 if body is None else 200, body if body is not None else {"error": "shard 0 keeps the history"}, nonce)

        def _send(self, code: int, body: dict[str, Any], nonce: str = "") -> None:
            raw = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            if nonce:
                self.send_header(contract.ANSWER_HEADER, keys.answer(questions, nonce, self.path, raw))
            if self.path != contract.CHALLENGE_PATH:
                self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(raw)

        def version_string(self) -> str:
            return "psjob"

        def log_message(self, format: str, *args: Any) -> None:
            return

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 1024
        open: UnauthenticatedPeers[Any] = UnauthenticatedPeers(CONNECTIONS)

        def process_request(self, request: Any, client_address: Any) -> None:
            victim = self.open.add(request, str(client_address[0]))
            if victim is not None:
                hang_up(victim)
            super().process_request(request, client_address)

        def shutdown_request(self, request: Any) -> None:
            self.open.drop(request)
            super().shutdown_request(request)

        def handle_error(self, request: Any, client_address: Any) -> None:
            error = sys.exc_info()[1]
            if error is not None and not isinstance(error, OSError):  # who asked may hang up
                supervise.thread_broken("status", error)

    http = Quiet((bind or "", port), Handler)
    supervise.start_thread(http.serve_forever, "status", 0.5)
    return http


def hang_up(sock: socket.socket) -> None:
    """End a connection that another thread serves."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def last_words(server: Server) -> None:
    """The last status as termination message: a shard ends between two polls of those who look."""
    words = status(server)
    coordinator = words.get("coordinator", {})
    kept = (
        "step", "loss", "metrics", "reported", "checkpoint", "weightsSha256", "committed", "checkpointProblem", "transport", "diverged",
        "drift",
    )  # fmt: skip
    said = {"attempt": words["attempt"], "index": words["index"], "counters": words["counters"]}
    if coordinator:
        said["coordinator"] = {key: coordinator[key] for key in kept} | {"passed": coordinator["passed"][-4:]}
    met = {} if server.coordinator is None else {"met": server.coordinator.machine.state.members.met()}
    body = server.termination_message | met | {"status": said}
    for part, name in (
        (said["counters"], "acknowledged"),
        (said.get("coordinator", {}), "reported"),
        (said.get("coordinator", {}), "metrics"),
    ):
        if len(json.dumps(body)) > LONGEST_MESSAGE:  # as long as there are workers, or numbers reported
            part.pop(name, None)
    leave_message(body)


def history(server: Server) -> dict[str, Any] | None:
    """The JSON of contract.HISTORY_PATH; None of any shard except 0."""
    return None if server.coordinator is None else {"entries": server.coordinator.machine.state.progress.past.told()}


def status(server: Server) -> dict[str, Any]:
    """The JSON of contract.STATUS_KEYS."""
    store, counters = server.store, server.store.counters
    body: dict[str, Any] = {
        "run": store.run, "index": store.index, "attempt": store.attempt, "term": store.term, "pod": server.place.pod,
        "state": _state(server), "transfer": _transfer(server), "problem": server.problem,
        "counters": {
            "pushes": counters.pushes, "applied": counters.applied, "dropped": counters.dropped,
            "pushBytes": counters.bytes,
            "duplicatesRefused": counters.duplicates, "duplicatesDiffering": counters.differing, "fenced": counters.fenced,
            "updatesLost": counters.lost, "crashes": counters.crashes, "acknowledged": {str(r): c for r, c in store.clocks().items()},
            "firstApplied": counters.first_applied, "badConnections": server.bad_connections, "blocks": len(store.cells),
        },
        "transports": {str(rank): session.transport for rank, session in sorted(server.sessions.copy().items())},
        "memory": {"rssBytes": _rss()},
        "nonFinite": store.non_finite.told(),
        "largePushes": None if store.push_norms is None else store.push_norms.told(),
        **(store.staleness.told() if store.staleness is not None else {"staleness": None, "gap": None}),
    }  # fmt: skip
    coordinator = server.coordinator
    said = None if coordinator is None else coordinator.status()
    if said is not None:
        body["coordinator"] = said | {
            "codecs": said_of(session.encoded for session in list(server.sessions.values())),
            "transport": _transport(server),
            "stepAdvice": _advice(server, said["stepParts"]),
            "nonFinite": store.non_finite.sentence(),
            "largePush": None if store.push_norms is None else store.push_norms.sentence(),
            "diverged": said["diverged"] or (store.non_finite.sentence() if store.non_finite.passes else None),
            "warning": store.staleness.guard.warning if store.staleness is not None and store.staleness.guard is not None else None,
        }
    return body


def _state(server: Server) -> str:
    if server.job.final:
        return "finished"
    phase, machine = server.store.phase, server.control.machine
    if phase is Phase.SERVING:
        return "serving"
    again = server.place.number > 1 and phase is not Phase.INIT
    return "restoring" if again or machine.reading is not None else "waiting"


def _transfer(server: Server) -> dict[str, Any] | None:
    """What is read or written for a checkpoint now, in bytes."""
    machine, (done, total) = server.control.machine, server.control.disk.moving()
    if machine.reading is not None:
        return {"doing": "reading", "done": done, "total": total}
    return {"doing": "writing", "done": done, "total": total} if machine.snapshots.writing is not None else None


def _transport(server: Server) -> str | None:
    ways = {session.transport for session in list(server.sessions.values())}
    return "mixed" if len(ways) > 1 else next(iter(ways), None)


def _advice(server: Server, parts: Mapping[str, float] | None) -> str | None:
    coordinator, config = server.coordinator, server.place.config
    if parts is None or coordinator is None or not coordinator.machine.state.progress.times.settled():
        return None
    shared = _transport(server) == "shared"
    return advice(parts, JobSettings(server.store.mode.name, config.workers, shared, config.compression.push, bool(config.stages)))


def _rss() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096
    except OSError:
        return 0
