"""A status port that a test speaks for: it wants the proof of who asks, and proves its answers, as a shard does."""

from __future__ import annotations

import base64
import contextlib
import json
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from hack.cluster.api import Api
from psjob_operator import keys
from psjob_operator.contract import ANSWER_HEADER, CHALLENGE_PATH, PROOF_HEADER, STATUS_PORT


@dataclass
class StatusPort:
    """`told` by path; `questions` is the run's key, which may be learnt late: nobody is believed before."""

    told: Callable[[str], Any]
    questions: Callable[[], bytes]
    asked: list[str] = field(default_factory=list)
    """Paths that were asked with a right proof."""
    refused: int = 0
    _nonces: set[str] = field(default_factory=set)

    def respond(self, path: str, headers: Mapping[str, str]) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, body) of one GET."""
        if path == CHALLENGE_PATH:
            nonce = secrets.token_hex(16)
            self._nonces.add(nonce)
            return 200, {}, json.dumps({"nonce": nonce}).encode()
        nonce, _, proof = (headers.get(PROOF_HEADER) or "").partition(" ")
        key = self.questions()
        if nonce not in self._nonces or not key or proof != keys.question(key, nonce, path):
            self.refused += 1
            return 403, {}, b"{}"
        self._nonces.remove(nonce)
        self.asked.append(path)
        body = json.dumps(self.told(path)).encode()
        return 200, {ANSWER_HEADER: keys.answer(key, nonce, path, body)}, body

    @contextlib.contextmanager
    def serve(self, address: str, port: int = STATUS_PORT) -> Iterator[None]:
        """Answer there, in threads, while the context lasts."""
        speaker = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                code, headers, body = speaker.respond(self.path, self.headers)  # type: ignore[arg-type]
                self.send_response(code)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer((address, port), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()


def own_loopback() -> str:
    """A loopback address for one test: tests run beside each other, and the operator knows only this one port."""
    return f"127.77.{1 + secrets.randbelow(254)}.{1 + secrets.randbelow(254)}"


def run_keys(api: Api, namespace: str, job: str, run: str, number: int = 1) -> dict[str, bytes]:
    """The keys of a run by name, read as only an administrator may."""
    raw = api.get(f"/api/v1/namespaces/{namespace}/secrets/{job}-key-{run[:8]}-{number}")
    return {name: bytes.fromhex(base64.b64decode(raw["data"][name]).decode()) for name in keys.NAMES}
