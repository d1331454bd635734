"""Who comes in before this process has imported torch, and to whom a stream goes after.

A new shard 0 is known to its workers the moment it listens: in a mode where all rewind together, a worker of an older view
is told so at once and restarts while this shard still imports and restores. All others wait at the acceptor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from psjob.modes import of as mode_of
from psjob.process.config import Place
from psjob.wire.frame import Header, Kind, WireError, dump, run_digest
from psjob.wire.loop import Apart
from psjob.wire.pooled import Pooled
from psjob.wire.reading import HELLO_SECONDS, Pause, StreamClosed, Wants

Meet = Callable[[Pooled, Header, dict[str, Any]], Wants[Apart | None]]


class Acceptor:
    """Reads the hello of each stream, then hands it to `meet` once `open` was called. `refused` counts bad ones."""

    def __init__(self, here: Place) -> None:
        self.here = here
        self.run = run_digest(here.run)
        self.refused: Callable[[Pooled, Exception], None] = self._answer_error
        self._together = mode_of(here.config).rewinds_together
        self._meet: Meet | None = None
        self._waiting: dict[Pooled, None] = {}

    def open(self, meet: Meet, refused: Callable[[Pooled, Exception], None]) -> None:
        """From now on streams go to `meet`."""
        self.refused = refused
        self._meet = meet
        for stream in list(self._waiting):
            stream.wake()

    def serve(self, stream: Pooled) -> Wants[Apart | None]:
        """One stream, from hello to its end. A stranger or a broken rule gets one ERROR and is closed."""
        try:
            header = yield from stream.next_header(HELLO_SECONDS)
            if header.kind is not Kind.HELLO:
                raise WireError(f"the first frame is {header.kind.name}, expected HELLO")
            if header.run != self.run:
                raise WireError(f"this shard belongs to run {self.here.run} of job {self.here.config.job}; the hello is of another run")
            hello = yield from stream.hello(header)
            if hello.get("scheme", "none") != "none":
                raise WireError(f"authentication scheme {str(hello.get('scheme'))[:40]!r} is not offered; only none is")
            if self._meet is None and self._must_rewind(hello):
                stream.put_frame(Header(Kind.REWIND, run=self.run, view=self.here.view, attempt=self.here.number))
                return None
            meet = yield from self._opened(stream)
            apart = yield from meet(stream, header, hello)
            return None if apart is None else partial(self._go_on, stream, apart)
        except (WireError, TimeoutError, ValueError, KeyError, TypeError, OverflowError) as error:
            self._end(stream, error)
        except StreamClosed:
            pass
        return None

    def _opened(self, stream: Pooled) -> Wants[Meet]:
        self._waiting[stream] = None
        try:
            while self._meet is None:
                yield Pause()
            return self._meet
        finally:
            del self._waiting[stream]

    def _go_on(self, stream: Pooled, apart: Apart) -> None:
        try:
            apart()
        except (WireError, TimeoutError, ValueError, KeyError, TypeError, OverflowError) as error:
            self._end(stream, error)
        except StreamClosed:
            pass

    def _end(self, stream: Pooled, error: Exception) -> None:
        shaped = isinstance(error, WireError | TimeoutError)
        self.refused(stream, error if shaped else WireError(f"a frame's body is not in shape: {error!r}"))

    def _must_rewind(self, hello: dict[str, Any]) -> bool:
        older = int(hello.get("view", 0)) < self.here.view
        return hello.get("role") == "worker" and self._together and not hello.get("fresh") and older

    def _answer_error(self, stream: Pooled, error: Exception) -> None:
        raw = dump({"code": "protocol", "error": str(error)[:500]})
        stream.put_frame(Header(Kind.ERROR, run=self.run, view=self.here.view, attempt=self.here.number), raw)
