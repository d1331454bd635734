"""Who comes in before this process has imported torch, and to whom a stream goes after.

A new shard 0 is known to its workers the moment it listens: in a mode where all rewind together, a worker of an older view
is told so at once and restarts while this shard still imports and restores. All others wait at the acceptor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from psjob.modes import of as mode_of
from psjob.process.config import Place
from psjob.wire.frame import Header, Kind, WireError, dump, run_digest
from psjob.wire.tcp import HELLO_SECONDS, Stream, StreamClosed

Meet = Callable[[Stream, Header, dict[str, Any]], None]


class Acceptor:
    """Reads the hello of each stream, then hands it to `meet` once `open` was called. `refused` counts bad ones."""

    def __init__(self, here: Place) -> None:
        self.here = here
        self.run = run_digest(here.run)
        self.refused: Callable[[Stream, Exception], None] = self._answer_error
        self._together = mode_of(here.config).rewinds_together
        self._meet: Meet | None = None
        self._ready = threading.Event()

    def open(self, meet: Meet, refused: Callable[[Stream, Exception], None]) -> None:
        """From now on streams go to `meet`."""
        self._meet, self.refused = meet, refused
        self._ready.set()

    def serve(self, stream: Stream) -> None:
        """One stream, from hello to its end. A stranger or a broken rule gets one ERROR and is closed."""
        try:
            header = stream.recv_header(HELLO_SECONDS)
            if header.kind is not Kind.HELLO:
                raise WireError(f"the first frame is {header.kind.name}, expected HELLO")
            if header.run != self.run:
                raise WireError(f"this shard belongs to run {self.here.run} of job {self.here.config.job}; the hello is of another run")
            hello = stream.recv_hello(header)
            if hello.get("scheme", "none") != "none":
                raise WireError(f"authentication scheme {str(hello.get('scheme'))[:40]!r} is not offered; only none is")
            if not self._ready.is_set() and self._must_rewind(hello):
                stream.send(Header(Kind.REWIND, run=self.run, view=self.here.view, attempt=self.here.number))
                return
            self._ready.wait()
            if self._meet is not None:
                self._meet(stream, header, hello)
        except (WireError, TimeoutError) as error:
            self.refused(stream, error)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            self.refused(stream, WireError(f"a frame's body is not in shape: {error!r}"))
        except StreamClosed:
            pass

    def _must_rewind(self, hello: dict[str, Any]) -> bool:
        older = int(hello.get("view", 0)) < self.here.view
        return hello.get("role") == "worker" and self._together and not hello.get("fresh") and older

    def _answer_error(self, stream: Stream, error: Exception) -> None:
        raw = dump({"code": "protocol", "error": str(error)[:500]})
        try:
            stream.send(Header(Kind.ERROR, run=self.run, view=self.here.view, attempt=self.here.number), raw)
        except StreamClosed:
            pass
