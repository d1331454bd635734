"""A worker's stream to one shard, as `worker/link.py` leads it: dial, hello, and after a break again, with what was not answered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from psjob.modes import written
from psjob.wire.frame import Flag, Header, Kind
from tests.simulation.protocol.network import End

if TYPE_CHECKING:
    from tests.simulation.protocol.worker import SimWorker

SILENCE = 10.0
REFUSED = 0.2


class SimLink:
    """`outstanding` are requests by number that wait for their answer."""

    def __init__(self, worker: SimWorker, index: int) -> None:
        self.worker, self.index, self.life = worker, index, worker.life
        self.end: End | None = None
        self.attempt = self.acked = self.released = self.unsent = 0
        self.welcomed = self.started = False
        self.outstanding: dict[int, Header] = {}
        self._pushed_clock = -1
        self._pushed: dict[int, Header] = {}
        self._request = 0
        self._last = 0.0

    def start(self) -> None:
        """Begin to dial."""
        if not self.started:
            self.started = True
            self._dial()

    def ask(self, header: Header) -> None:
        """Register a request and send it."""
        self._request += 1
        header = header._replace(request=self._request)
        if not self.outstanding:
            self._last = self.worker.clock()
        self.outstanding[self._request] = header
        self.unsent -= 1
        if header.kind is Kind.PUSH or header.kind is Kind.ROW_PUSH:
            if header.clock != self._pushed_clock:
                self._pushed_clock, self._pushed = header.clock, {}
            self._pushed[self._request] = header
        self.send(header)

    def send(self, header: Header, body: Any = None, size: int = 0) -> None:
        """Send a frame where the link is up."""
        if self.welcomed and self.end is not None:
            if header.kind is Kind.PUSH or header.kind is Kind.ROW_PUSH:
                body, size = self.worker.value(header), 4096
            self.end.send((header._replace(view=self.worker.view, attempt=self.attempt), body), size)

    def tick(self, now: float) -> None:
        """A shard that owes an answer and says nothing is dialled anew."""
        if self.end is not None and (self.outstanding or not self.welcomed) and now - self._last > SILENCE:
            self.worker.trace(f"not a word of shard {self.index}")
            self.end.close()
            self._ended()

    def close(self) -> None:
        """Nothing more by this link."""
        self.life = -1
        if self.end is not None:
            self.end.close()
            self.end = None

    def _dial(self) -> None:
        worker = self.worker
        if worker.over or self.end is not None or self.life != worker.life:
            return
        end = worker.dial(worker.world.named.get(("shard", self.index), []))
        if end is None:
            worker.after(0.1, self._dial)
            return
        self.end, self._last = end, worker.clock()
        end.heard, end.ended = self._heard, self._ended
        end.send((worker.header(Kind.HELLO)._replace(attempt=self.attempt), self._hello()), 200)

    def _hello(self) -> Mapping[str, Any]:
        worker = self.worker
        body: dict[str, Any] = {
            "role": "worker", "view": worker.view, "recovery": worker.recovery,
            "fresh": not (worker.joined if self.index == 0 else self.attempt),
            "acked": self.acked if self.attempt else worker.step, "attempt": self.attempt, "init": worker.initialising,
            "mode": written(worker.mode),
        }  # fmt: skip
        if self.index == 0:
            body |= worker.world.model()
        return body

    def _ended(self) -> None:
        self.end, self.welcomed = None, False
        self.worker.after(0.02, self._dial)

    def _heard(self, frame: tuple[Header, Any]) -> None:
        worker, (header, body) = self.worker, frame
        self._last = worker.clock()
        kind = header.kind
        if kind is Kind.PARAM or kind is Kind.ROWS:
            self._param(header, body)
        elif kind is Kind.WELCOME:
            self._welcome(body)
        elif kind is Kind.ERROR and body.get("code") == "protocol":
            if self.end is not None:
                self.end.close()
            self.end, self.welcomed = None, False
            worker.after(REFUSED, self._dial)
        else:
            worker.on_frame(self, header, body)
        worker.poke()

    def _welcome(self, body: Mapping[str, Any]) -> None:
        worker = self.worker
        pushing = (self._pushed_clock == worker.step and self.unsent) or self._pushed.keys() & self.outstanding.keys()
        if self.attempt and int(body["attempt"]) > self.attempt and pushing:
            self.outstanding |= self._pushed
        self.attempt = int(body["attempt"])
        self.welcomed = True
        worker.on_welcome(self, body)
        complete, opened = int(body["complete"]), set(body["open"])
        for number, old in [] if body.get("init") else sorted(self.outstanding.items()):
            push = old.kind is Kind.PUSH or old.kind is Kind.ROW_PUSH
            if push and (old.clock < complete or (old.clock == complete and old.block in opened)):
                again = Kind.PULL if old.kind is Kind.PUSH else Kind.LOOKUP
                version = (0, worker.mode.version_for(old.clock))
                self.send(old._replace(kind=again, flags=Flag.NONE, version=version, request=number))
            else:
                self.send(old)
        worker.on_relinked(self)

    def _param(self, header: Header, content: Any) -> None:
        worker = self.worker
        request = self.outstanding.get(header.request)
        if request is None or request.block != header.block:
            return
        worker.land(header, content)
        if header.flags & Flag.CUT and self.index == 0:
            worker.cut_clock = request.clock + (request.kind in (Kind.PUSH, Kind.ROW_PUSH))
        del self.outstanding[header.request]
        if not self.outstanding and not self.unsent and request.kind in (Kind.PUSH, Kind.ROW_PUSH):
            self.acked = request.clock + 1
