"""An attached worker: joined to its job, at one clock, exchanging blocks with every shard.

The script's thread calls `join`, `exchange`, `edge` and `leave`; the links' threads call the `on_…` methods. One condition
guards what they share. Whatever ends the script's turn (a rewind, the job's end, a stop, a refusal) is an *ending*: it is
noted by a link and carried out by the script's thread at its next call.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from psjob.layout.blocks import Layout, TensorSpec
from psjob.layout.packing import Packs
from psjob.modes import of as mode_of
from psjob.process.config import Place
from psjob.tables import TableSpec
from psjob.wire import shared
from psjob.wire.frame import Flag, Header, Kind, run_digest
from psjob.worker.ending import SessionEnd
from psjob.worker.exchange import Exchange
from psjob.worker.handin import HandIn
from psjob.worker.idle import Idle
from psjob.worker.link import ShardLink
from psjob.worker.rows import Rows

SMALL_RECORD = 64 << 10
"""A record of at most this many bytes goes to the coordinator with every clock, a larger one at cuts only."""
STOP_SECONDS = 25.0
log = logging.getLogger("psjob.worker")


class WorkerSession:
    """`table` describes the parameters in order; `rule` is the shards' rule, `reduce` when the worker steps by itself."""

    def __init__(
        self,
        place: Place,
        table: Sequence[TensorSpec],
        rule: str,
        aliases: Mapping[str, str],
        tables: Sequence[TableSpec] = (),
        first_rows: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        self.place, self.rule, self.aliases = place, rule, dict(aliases)
        self.run = run_digest(place.run)
        self.mode = mode_of(place.config)
        self.reduces = rule == "reduce"
        self.layout = Layout.of(tuple(table))
        self.cond = threading.Condition()
        self.links = [ShardLink(self, index) for index in range(len(place.config.shards))]
        self.owner: list[int] = []
        self.clock = 0
        self.view = 0
        self.recovery = 0
        self.record: bytes | None = None
        self.initial: bytes | None = None
        self.cut_clock = -1
        self.stores = False
        """At that cut this worker gives the shards its weights."""
        self.mark_wanted = 0
        self.holding = 0
        """The cut whose mark was sent and whose release is awaited."""
        self.stop_clock: int | None = None
        self.stop_requested = False
        self._asked_stop = False
        self.leaving = False
        self.ended = False
        self._ending: SessionEnd | None = None
        self.joined = False
        self._init = 0
        """How often a shard has asked rank 0 for the run's first values."""
        self.states: dict[int, bytes] = {}
        self._said = 0.0
        self._last_record = (0, b"")
        self.records = HandIn(self)
        self.idle = Idle()
        self._told: dict[Kind, dict[str, Any]] = {}
        self._wished = -1
        """The clock at which the newest checkpoint was asked for."""
        """The last wish or report of each kind: a broken stream may have swallowed it."""
        os.register_at_fork(after_in_child=self._forget_streams)
        self.rows = Rows(self, tables, first_rows or {})
        self.exchange = Exchange(self)

    # -- the script's thread -------------------------------------------------------------------

    def join(self, parameters: Sequence[torch.Tensor], initial: Callable[[], bytes], numbers: list[dict[str, Any]]) -> None:
        """Enter the job; afterwards `parameters` hold the job's weights and `record` what to put back. Raises SessionEnd.

        `numbers` are the rule's, a parameter group each: what a worker is sent may depend on them.
        """
        self.links[0].start()
        self.wait(lambda: self.joined or self._init > 0, "the coordinator")
        while not self.joined:
            asked = self._begin_run(parameters, initial)
            self.wait(lambda: self.joined or self._init > asked, "the first checkpoint")  # noqa: B023
        for link in self.links[1:]:
            link.start()
        self.wait(lambda: all(link.welcomed for link in self.links), "all shards")
        self.exchange.pull(parameters, numbers)

    def _store(self, link: ShardLink, packs: Packs, parameters: Sequence[torch.Tensor | None]) -> None:
        """Worker-side update: give the shard the weights of this clock."""
        for block in self.layout.blocks:
            if self.owner[block.index] == link.index:
                header = self.header(Kind.PUSH, block=block.index, clock=self.clock, flags=Flag.STORE, version=(0, self.clock))
                link.send(header, packs[block.index].gather(parameters))

    def edge(self, make_record: Callable[[], bytes], parameters: Sequence[torch.Tensor], large: bool = False) -> None:
        """The script stands between two steps: hand in the record, take part in a cut, stop if asked. Raises SessionEnd.

        `large`: a record holds state of the model's size, so it is made for cuts only.
        """
        self.check()
        self.idle.at(self.clock, time.monotonic())
        left_out = self.exchange.compression
        if left_out.feeds:
            self.exchange.finish()  # what a push leaves out is known when it has been sent
        record = make_record() if left_out.small and not large else None
        stops = self.stop_requested or self.stop_clock is not None
        mark = self.mark_wanted
        small = record is not None and len(record) <= SMALL_RECORD
        if stops or mark or not small:
            self.exchange.finish()  # under overlap the answers that tell of a cut may still be under way
        cut = self.cut_clock == self.clock
        for link in self.links if cut and self.stores else ():
            self._store(link, self.exchange.packs, parameters)
        if cut or stops or mark or small:
            self._last_record = (self.clock, make_record() if record is None else record)
            self._hand_in(cut or stops or mark > 0)
        if mark or self.cut_clock > self._wished:
            self._told.pop(Kind.CHECKPOINT, None)
        self._mark(mark)
        if stops:
            self._stand_still()

    def _hand_in(self, cut: bool = False) -> None:
        """The last record goes to the coordinator, and how long the script has waited."""
        self.records.hand_in(*self._last_record, cut, self.idle.told)

    def _mark(self, mark: int) -> None:
        """Tell every shard that this worker holds its pushes for cut `mark` (0: none is wanted), and wait until all have copied."""
        if not mark:
            return
        with self.cond:
            self.holding = mark
            if self.mark_wanted == mark:
                self.mark_wanted = 0
        for link in self.links:
            link.send(self.header(Kind.MARK, clock=self.clock, request=mark))
        self.wait(lambda: all(link.released >= mark for link in self.links), "all shards to copy a checkpoint")

    def _stand_still(self) -> None:
        """Ask for the stop clock, and wait there for the last checkpoint; returns when the stop clock is still ahead."""
        self._ask_stop()
        while self.stop_clock is None or self.clock >= self.stop_clock:
            self.wait(
                lambda: self.mark_wanted > 0 or (self.stop_clock is not None and self.clock < self.stop_clock),
                "the last checkpoint",
                STOP_SECONDS,
            )
            self._mark(self.mark_wanted)

    def inside_round(self) -> None:
        """The script stands between two steps of its own: a stop is asked for, and made where the round ends. Raises SessionEnd."""
        self.check()
        if self.stop_requested:
            self._ask_stop()

    def _ask_stop(self) -> None:
        if not self._asked_stop:
            self._asked_stop = True
            self._tell(Kind.STOP, {})

    def leave(self, make_record: Callable[[], bytes], parameters: Sequence[torch.Tensor]) -> None:
        """The script is through: say so, and wait until a checkpoint holds it. Raises SessionEnd (left or finished is the good one)."""
        self.exchange.finish()
        self.idle.at(self.clock, time.monotonic())
        self._last_record = (self.clock, make_record())
        self.exchange.sources = parameters
        self.exchange.sharing.settle(self.place.config.workers - 1)  # the others may go on as soon as this worker has left
        self.leaving = True
        for link in reversed(self.links):  # the coordinator's last: it may act on it at once
            self.on_relinked(link)
        self.wait(lambda: False, "the checkpoint that holds this worker's end")

    def report(self, numbers: dict[str, float]) -> None:
        self._tell(Kind.REPORT, numbers)

    def checkpoint(self) -> None:
        self._tell(Kind.CHECKPOINT, {})

    def _tell(self, kind: Kind, body: dict[str, Any]) -> None:
        """Say it to the coordinator, and again to whoever is the coordinator on the next stream."""
        self._told[kind] = body
        if kind is Kind.CHECKPOINT:
            self._wished = self.clock
        self.links[0].send_json(self.header(kind, clock=self.clock), body)

    @property
    def over(self) -> bool:
        """This process's turn has ended, or is about to."""
        return self.ended or self._ending is not None

    def check(self) -> None:
        """Raise the ending that a link has noted, if any."""
        with self.cond:
            if self._ending is not None:
                raise self._ending

    # -- shared helpers ------------------------------------------------------------------------

    def header(self, kind: Kind, **fields: Any) -> Header:
        place = self.place
        return Header(kind, run=self.run, worker=place.index, start=place.number, rewinds=place.rewinds, view=self.view, **fields)

    @property
    def transports(self) -> list[str]:
        """Ways by which blocks may go, as a hello names them."""
        return self.row_transports if self.exchange.lends else ["tcp"]

    @property
    def row_transports(self) -> list[str]:
        """Ways by which rows may go."""
        config = self.place.config
        coded = not {config.compression.push, config.compression.pull} <= {"none", "auto"}  # only what is sent has a codec
        return ["tcp"] if coded or config.transport == "tcp" or not shared.possible() else ["shared", "tcp"]

    def withdraw(self) -> None:
        """The script goes on without an answer, or this is a fork: what it writes must not reach a push that a shard still holds."""
        self.exchange.sharing.withdraw()
        self.rows.sharing.withdraw()

    @property
    def initialising(self) -> bool:
        """Rank 0 was asked for the run's first values, and is not in the job yet."""
        return self._init > 0 and not self.joined

    # -- the links' threads --------------------------------------------------------------------

    def on_assignment(self, link: ShardLink, body: dict[str, Any]) -> None:
        """Shard 0 tells which shard has which block."""
        if link.index == 0:
            with self.cond:
                self.owner = [int(i) for i in body.get("assignment", self.owner)]

    def on_welcome(self, link: ShardLink, body: dict[str, Any]) -> None:
        """Called with the condition held."""
        if link.index == 0:
            self.records.relinked()
        link.released = max(link.released, self.holding)  # a shard that comes anew knows nothing of that cut
        self.view = max(self.view, int(body["view"]))
        if not body["serving"]:
            self._init += 1  # of another shard: what this link has sent may be lost, or of a set-up before this one
        if link.index == 0:
            self.recovery = int(body["recovery"])
            if not body.get("init") and not self.joined:
                self.clock = int(body["clock"])
                if not body.get("record"):
                    self.joined = True
        if link.attempt and not link.acked:
            link.acked = min((asked.clock for asked in link.outstanding.values()), default=self.clock)
        self.cond.notify_all()

    def on_relinked(self, link: ShardLink) -> None:
        """A shard has welcomed this worker: say again what it may have missed."""
        if link.index == 0 and self._last_record[1]:
            self._hand_in()
        for kind, body in list(self._told.items()) if link.index == 0 else ():
            link.send_json(self.header(kind, clock=self.clock), body)
        if self.leaving and self.reduces:
            self._store(link, self.exchange.make_packs(), self.exchange.sources)
        if self.leaving and (link.index or self.records.through):
            link.send(self.header(Kind.LEAVE, clock=self.clock))

    def on_record_has(self, header: Header) -> None:
        """The coordinator has so much of a record; who leaves says so once it has all."""
        self.records.has(header)
        if self.leaving and self.records.through:
            self.links[0].send(self.header(Kind.LEAVE, clock=self.clock))

    def on_record(self, clock: int, blob: bytes) -> None:
        with self.cond:
            if clock < 0:
                self.initial = blob
            else:
                self.record = blob
            self.joined = True
            self.cond.notify_all()

    def on_state(self, number: int, raw: bytes) -> None:
        with self.cond:
            self.states[number] = raw
            self.cond.notify_all()

    def on_waiting(self, link: ShardLink, body: dict[str, Any]) -> None:
        if "workers" in body:
            link.waiting = f"shard {link.index} waits for workers {body['workers']} ({body.get('for')}, {body.get('seconds')} s)"
        else:
            link.waiting = str(body.get("reason") or f"shard {link.index} is {body.get('state', 'not ready')}")
        now = time.monotonic()
        if now - self._said > 30:
            self._said = now
            log.warning("waiting: %s", link.waiting)

    def on_error(self, link: ShardLink, body: dict[str, Any]) -> None:
        message = str(body.get("error", "the shard refused this worker"))[:1000]
        code = body.get("code")
        if code == "refused":
            self._end(SessionEnd("refused", message))
        elif code == "fenced":
            self._end(SessionEnd("fenced", message))
        else:
            log.warning("shard %d: %s", link.index, message)

    def on_signal(self, link: ShardLink, header: Header) -> None:
        kind = header.kind
        if kind is Kind.FINISHED:
            self._end(SessionEnd("finished"))
        elif kind is Kind.LEFT:
            self._end(SessionEnd("left"))
        elif kind is Kind.STOPPED:
            self._end(SessionEnd("stopped"))
        with self.cond:
            if kind is Kind.STOP:
                self.stop_clock = header.clock
            elif kind is Kind.MARK:
                self.mark_wanted = header.request
            elif kind is Kind.RELEASE:
                link.released = max(link.released, header.request)
                if self.mark_wanted <= header.request and link.index == 0:
                    self.mark_wanted = 0
            self.cond.notify_all()

    def on_rewind(self, body: Mapping[str, Any]) -> None:
        self._end(SessionEnd("rewind", str(body.get("mode", ""))))

    def not_found(self, index: int) -> None:
        peer = self.place.config.shards[index]
        seconds = self.place.config.connect_seconds
        self._end(SessionEnd("lost", f"shard {index} at {peer.host}:{peer.port} was not found in {seconds:.0f} s; starting again"))

    def _end(self, ending: SessionEnd) -> None:
        with self.cond:
            if self._ending is None:
                self._ending = ending
            self.cond.notify_all()

    # -- inside --------------------------------------------------------------------------------

    def _forget_streams(self) -> None:
        """In a forked loader process: close the copies, so that a shard sees at once when this worker dies."""
        for link in self.links:
            for lane in link.lanes:
                lane.stream.sock.close()
        self.withdraw()

    def _begin_run(self, parameters: Sequence[torch.Tensor], initial: Callable[[], bytes]) -> int:
        for link in self.links[1:]:
            link.start()
        self.wait(lambda: all(link.welcomed for link in self.links), "all shards")
        asked = self._init
        for block in self.layout.blocks:
            self.links[self.owner[block.index]].send(
                self.header(Kind.INIT, block=block.index), self.exchange.packs[block.index].gather(parameters)
            )
        self.rows.initialise()
        self.records.hand_in(-1, initial(), True, (0, 0))
        return asked

    def wait(self, done: Callable[[], bool], what: str, seconds: float | None = None) -> None:
        """Wait for `done`. An ending is raised first; after `seconds` (None: as long as the job waits) the worker stops."""
        began = said = time.monotonic()
        with self.cond:
            while True:
                if self._ending is not None:
                    raise self._ending
                if done():
                    self.idle.waited += time.monotonic() - began
                    return
                now = time.monotonic()
                if seconds is not None and now - began > seconds:
                    raise SessionEnd("stopped", f"waited {seconds:.0f} s for {what}")
                if now - said > 30:
                    said = now
                    words = "; ".join(link.waiting for link in self.links if link.waiting)
                    log.warning("waiting for %s, %d s: %s", what, now - began, words)
                if self.stop_requested and not self._asked_stop:
                    if not self.joined:
                        raise SessionEnd("stopped")
                    self._ask_stop()
                    seconds = now - began + STOP_SECONDS
                self.cond.wait(0.5)
