"""A worker's stream to one shard, as `worker/connection.py` drives it: dial, hello, frames to events, again if the machine says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from psjob.modes import format_mode
from psjob.protocol.records import RecordId, RecordIn, RecordsOnStream
from psjob.protocol.worker import events as e
from psjob.wire.frame import Flag, Header, Kind
from tests.simulation.protocol.network import End

if TYPE_CHECKING:
    from tests.simulation.protocol.worker import SimWorker

SILENCE = 10.0
PUSHES = (Kind.PUSH, Kind.ROW_PUSH)
TURNS = {Kind.FINISHED: "finished", Kind.LEFT: "left", Kind.STOPPED: "stopped"}
PUSH_BYTES = 4096


class SimLink:
    """Of one life of a worker."""

    def __init__(self, worker: SimWorker, index: int) -> None:
        self.worker, self.index, self.life = worker, index, worker.life
        self.state = worker.machine.links[index]
        self.requests = self.state.requests
        self.record = RecordIn()
        self.end: End | None = None
        self._records = RecordsOnStream()
        self._last = 0.0

    def dial(self, seconds: float) -> None:
        """Dial in so many seconds."""
        self.worker.after(seconds, self._dial)

    def ask(self, header: Header) -> None:
        """Register a request and send it."""
        if not self.requests.outstanding:
            self._last = self.worker.clock()
        self.send(self.requests.ask(header))

    def send(self, header: Header, body: Any = None, size: int = 0) -> None:
        """Send a frame where the link is up."""
        if self.state.welcomed and self.end is not None:
            if header.kind in PUSHES:
                body, size = self.worker.values[self._part(header)], PUSH_BYTES
            self.end.send((header._replace(term=self.worker.machine.term, attempt=self.state.attempt), body), size)

    def send_record(self, header: Header, record: bytes) -> None:
        """Send a record as what it changes of the one before on this stream, where the link is up."""
        if self.state.welcomed and self.end is not None:
            delta = self._records.delta(record)
            if delta is None:
                self.send(header, record, len(record))
            else:
                body = header._replace(kind=Kind.RECORD_DELTA, part=delta.begin, version=(delta.crc, delta.size))
                self.send(body, delta.data, len(delta.data))

    def tick(self, now: float) -> None:
        """If something is owed and nothing comes, the stream counts as dead."""
        if self.end is None:
            return
        if not (self.requests.outstanding or not self.state.welcomed):
            self._last = now
        elif now - self._last > SILENCE:
            self.worker.trace(f"not a byte of shard {self.index}")
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
        if worker.over or self.life != worker.life:
            return
        end = worker.dial(worker.world.named.get(("shard", self.index), []))
        if end is None:
            worker.after(0.05, self._not_found)
            return
        self.end, self._last, self._records = end, worker.clock(), RecordsOnStream()
        end.heard, end.ended = self._heard, self._ended
        end.send((worker.header(Kind.HELLO, attempt=self.state.attempt), self._hello()), 200)

    def _not_found(self) -> None:
        if self.life == self.worker.life:
            self.worker.handle(e.NotFound(self.index))

    def _hello(self) -> Mapping[str, Any]:
        worker = self.worker
        body = {"role": "worker", "mode": format_mode(worker.mode), **worker.machine.hello(self.index)}
        if self.index == 0:
            body |= worker.world.model() | {"has": None if self.record.id is None else [*self.record.id, self.record.count]}
        return body

    def _ended(self, broken_rule: bool = False) -> None:
        self.end = None
        if self.life == self.worker.life:
            self.state.welcomed = False
            self.worker.handle(e.ShardStreamEnded(self.index, broken_rule))

    def _heard(self, frame: tuple[Header, Any]) -> None:
        worker, (header, body) = self.worker, frame
        self._last = worker.clock()
        kind = header.kind
        if kind is Kind.PARAM or kind is Kind.ROWS:
            self._param(header, body)
            worker.poke()
        elif kind is Kind.WELCOME:
            worker.handle(e.Welcomed.of(self.index, body))
        elif kind is Kind.WAITING:
            worker.handle(e.ShardWaits.of(self.index, body))
        elif kind is Kind.RECORD:
            worker.handle(e.RecordReturned(header.clock, body))
        elif kind is Kind.RECORD_PIECE:
            whole = self.record.take(RecordId(header.clock, *header.version), header.part, body)
            if whole is not None:
                worker.handle(e.RecordReturned(header.clock, whole))
        elif kind is Kind.RECORD_HAS:
            worker.handle(e.RecordHas(RecordId(header.clock, *header.version), header.part))
        elif kind is Kind.REWIND:
            worker.handle(e.Rewound(str((body or {}).get("mode", ""))))
        elif kind in TURNS:
            worker.handle(e.TurnOver(TURNS[kind]))
        elif kind is Kind.STOP:
            worker.handle(e.StopSet(header.clock))
        elif kind is Kind.MARK:
            worker.handle(e.MarkWanted(header.request))
        elif kind is Kind.RELEASE:
            worker.handle(e.Released(self.index, header.request))
        elif kind is Kind.ERROR and body.get("code") in ("refused", "fenced"):
            worker.handle(e.WorkerRefused(body["code"], str(body["error"])))

    def _part(self, header: Header) -> int:
        """The part that a frame is about."""
        plan = self.worker.world.plan
        if header.kind in (Kind.PUSH, Kind.PULL, Kind.PARAM) and header.block < plan.blocks:
            return header.block
        return plan.blocks + header.table * plan.shards + self.index

    def _param(self, header: Header, content: Any) -> None:
        worker = self.worker
        request = self.requests.outstanding.get(header.request)
        if request is None or self._part(request) != self._part(header):
            return
        worker.land(self._part(request), header, content)
        if header.flags & Flag.SNAPSHOT and self.index == 0:
            worker.machine.handle(e.SnapshotTold(request.clock + (request.kind in PUSHES), False), 0.0)
        self.requests.settle(header.request)
