"""A few calls to the API server with a client certificate; the standard library alone, so that no virtualenv is needed."""

from __future__ import annotations

import http.client
import json
import os
import select
import ssl
import threading
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hack.cluster.pki import Pair

WATCH_SECONDS = 300
_kept = threading.local()
"""Each thread's open connections, by who asks whom. A handshake costs several times what most requests cost."""


class ApiError(Exception):
    """The API server said no: `status` is its HTTP status, the text is its message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


@dataclass(frozen=True)
class Api:
    """One API server and who we are to it."""

    url: str
    ca: Path
    pair: Pair
    timeout: float = 60.0

    def get(self, path: str) -> Any:
        return self.call("GET", path)

    def create(self, path: str, body: dict[str, Any], *, or_exists: bool = True) -> Any:
        """POST; None when it is there already and `or_exists`."""
        try:
            return self.call("POST", path, body)
        except ApiError as error:
            if error.status == 409 and or_exists:
                return None
            raise

    def delete(self, path: str) -> None:
        """DELETE; what is gone already is fine."""
        try:
            self.call("DELETE", path)
        except ApiError as error:
            if error.status != 404:
                raise

    def merge(self, path: str, body: dict[str, Any]) -> Any:
        return self.call("PATCH", path, body, "application/merge-patch+json")

    def call(self, method: str, path: str, body: dict[str, Any] | None = None, content: str = "application/json") -> Any:
        """One request; JSON in, JSON (or text, for /readyz) out. Raises ApiError for a 4xx or 5xx, OSError when nobody answers."""
        text = json.dumps(body) if body is not None else None
        headers = {"Content-Type": content, "Accept": "application/json"}
        key = (os.getpid(), self)
        connections = _connections()
        connection = connections.pop(key, None)
        if connection is None or _hung_up(connection):
            connection = self._connect(self.timeout)
        try:
            connection.request(method, path, text, headers)
            answer = connection.getresponse()
            data = answer.read()
        except http.client.HTTPException as error:
            connection.close()
            raise OSError(f"the API server cut the connection: {error}") from error
        except BaseException:
            connection.close()
            raise
        if answer.will_close:
            connection.close()
        else:
            connections[key] = connection
        if answer.status >= 400:
            raise ApiError(answer.status, _message(data))
        return json.loads(data) if data[:1] == b"{" else data.decode()

    def watch(self, path: str, version: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """(type, object) of each change after `version`, until the API server ends it. Raises ApiError or OSError, as `call` does."""
        connection = self._connect(timeout=WATCH_SECONDS + self.timeout)
        try:
            connection.request("GET", f"{path}?watch=1&resourceVersion={version}&timeoutSeconds={WATCH_SECONDS}")
            answer = connection.getresponse()
            if answer.status >= 400:
                raise ApiError(answer.status, _message(answer.read()))
            while line := answer.readline():
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise ApiError(int(event["object"].get("code") or 0), str(event["object"].get("message")))
                yield event["type"], event["object"]
        except http.client.HTTPException as error:
            raise OSError(f"the API server cut the connection: {error}") from error
        finally:
            connection.close()

    def ok(self, path: str) -> bool:
        """Does that path answer 2xx now?"""
        try:
            self.get(path)
        except (ApiError, OSError):
            return False
        return True

    def _connect(self, timeout: float) -> http.client.HTTPSConnection:
        parts = urllib.parse.urlsplit(self.url)
        context = ssl.create_default_context(cafile=str(self.ca))
        context.load_cert_chain(str(self.pair.cert), str(self.pair.key))
        return http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=timeout, context=context)


def _connections() -> dict[tuple[int, Api], http.client.HTTPSConnection]:
    try:
        found: dict[tuple[int, Api], http.client.HTTPSConnection] = _kept.connections
    except AttributeError:
        found = _kept.connections = {}
    return found


def _hung_up(connection: http.client.HTTPSConnection) -> bool:
    """Whether the other side has ended it: nothing else comes between two requests. Closes it then."""
    gone = connection.sock is None or bool(select.select([connection.sock], [], [], 0)[0])
    if gone:
        connection.close()
    return gone


def _message(data: bytes) -> str:
    try:
        return str(json.loads(data).get("message", ""))[:500]
    except (ValueError, AttributeError):
        return data.decode(errors="replace")[:500]
