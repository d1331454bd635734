"""Carries out what the machine of a shard's control side decides, and brings back what came of it.

Events come from any thread and are handled one at a time, in order. The shard's main thread handles them, and the coordinator's, which
finds its orders carried out here when it continues. Nothing waits for a socket or a disk.

The stream of a shard to the coordinator: dialled and read in one thread, written by another, decided on by `psjob.protocol.shard`.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psjob import modes
from psjob.process import supervise
from psjob.process.config import ProcessContext
from psjob.process.errors import Fenced
from psjob.process.supervise import ThreadPulse
from psjob.protocol import messages
from psjob.protocol.messages import ShardMessage, decode_order, encode_message
from psjob.protocol.shard import events as e
from psjob.protocol.shard.events import Hello
from psjob.protocol.shard.machine import CoordinatorLinkState, ShardMachine
from psjob.shard.acceptor import hello_body
from psjob.shard.restore import Restoring, position_of
from psjob.shard.snapshot import DiskThread, Snapshots
from psjob.shard.store import Store
from psjob.shard.worker_stream import ShardJobFacts
from psjob.tables import TableSpec
from psjob.wire import tcp
from psjob.wire.frame import Header, Kind, WireError, run_digest
from psjob.wire.handshake import greet
from psjob.wire.tcp import Stream, StreamClosed
from psjob.wire.unauthenticated import one_line

TICK_SECONDS = 0.25
STALENESS_SECONDS = 2.0
"""So often the staleness of pushes goes to the coordinator."""
log = logging.getLogger("psjob.shard")


@dataclass(frozen=True)
class ExitCalls:
    """How a shard's process ends."""

    leave: Callable[[int, str], None]
    """With a status, and why."""
    exit_with: Callable[[int], None]
    fenced: Callable[[Fenced], None]


@dataclass(frozen=True)
class WorkerCalls:
    """What the coordinator's orders do to all workers of this shard."""

    changed: Callable[[], None]
    """This shard has come to another term or phase."""
    drop: Callable[[bool], None]
    """End their streams; True: they rewind."""
    release: Callable[[int], None]
    """Those that marked for a snapshot may continue."""
    finished: Callable[[], None]
    """The job is over."""


class Control:
    """`answer` carries a reply to the coordinator; `link` is the stream to it, None in shard 0's process."""

    def __init__(
        self, place: ProcessContext, folder: Path, store: Store, job: ShardJobFacts, workers: WorkerCalls, exits: ExitCalls
    ) -> None:
        self._store, self._workers, self._exits = store, workers, exits
        self.disk = DiskThread()
        self.pulse = ThreadPulse("control")
        self.snapshots = Snapshots(store, folder, self.disk, self.post)
        self.restoring = Restoring(store, self.disk, self.snapshots, self.post)
        self.link = CoordinatorLink(place, store, self.post) if place.index else None
        self.answer: Callable[[dict[str, Any]], None] = lambda body: None
        peer = place.config.shards[0]
        state = CoordinatorLinkState(f"{peer.host}:{peer.port}", place.config.connect_seconds) if place.index else None
        self.machine = ShardMachine(place.index, place.config.workers, place.term, store.mode, state)
        self._events: queue.SimpleQueue[e.Event] = queue.SimpleQueue()
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._handling = threading.Lock()
        self._serving = False
        self._told = 0.0
        self._counted: dict[str, Any] = {}
        self._action_handlers: Mapping[type, Callable[[Any], None]] = {
            e.Log: lambda act: log.log(logging.getLevelNamesMapping()[act.level.upper()], "%s", act.text),
            e.TellCoordinator: lambda act: self.tell(act.message),
            e.ExitProcess: self._exit,
            e.DialCoordinator: lambda act: None if self.link is None else self.link.dial(act.after),
            e.Hello: lambda act: None if self.link is None else self.link.hello(act),
            e.CloseStream: lambda act: None if self.link is None else self.link.hang_up(act.stream),
            e.TellArrivals: lambda act: self._tell_arrivals(),
            e.Reset: self._reset,
            e.TakeTerm: lambda act: setattr(store, "term", act.term),
            e.AdoptMode: self._adopt,
            e.LayOut: self._lay_out,
            e.DropSessions: lambda act: workers.drop(act.rewind),
            e.Read: self.restoring.read,
            e.SetFences: self.restoring.set_fences,
            messages.Bound: lambda act: setattr(store, "most", dict(act.most)),
            e.Serve: self._serve,
            messages.Decide: self._carry_out,
            messages.Clip: store.clip,
            messages.Where: self._look_up,
            messages.Prepare: self.snapshots.make_ready,
            e.NoteLeft: lambda act: store.leave(act.rank, act.clock),
            e.AskRecords: lambda act: setattr(job, "snapshot_step", act.step),
            e.HoldBlocks: self.snapshots.hold,
            e.Write: lambda act: self.snapshots.write(act.snapshot),
            e.GiveUp: lambda act: self.snapshots.give_up(act.snapshot),
            e.Discard: lambda act: self.snapshots.discard(act.snapshot),
            e.Release: lambda act: workers.release(act.snapshot),
            e.TellFinished: self._tell_finished,
        }

    # -- in ------------------------------------------------------------------------------------

    def order(self, body: Mapping[str, Any]) -> None:
        """The coordinator of this process orders something, and it is done when this comes back.

        Not to be called with a block's lock held. Raises WireError if the order is not in shape.
        """
        self._events.put(e.Ordered(decode_order(body)))
        with self._handling:
            self._drain()

    def mark(self, rank: int, snapshot: int) -> None:
        """A worker stands at its step boundary and holds its pushes for `snapshot`."""
        self.post(e.Marked(rank, snapshot))

    def left(self, rank: int) -> None:
        """A worker has left."""
        self.post(e.Left(rank))

    def post(self, event: e.Event) -> None:
        """Handle an event soon. May be called with a block's lock held."""
        self._events.put(event)
        if self._serving:
            self._wakes.put(None)
            return
        while not self._events.empty() and self._handling.acquire(blocking=False):  # else whoever handles takes this one too
            try:
                self._drain()
            finally:
                self._handling.release()

    def wake(self) -> None:
        """Let `serve` look at once whether it is over."""
        self._wakes.put(None)

    def serve(self, over: threading.Event, tick: Callable[[float], None]) -> None:
        """Handle events until `over`. `tick` is called with the time at least every TICK_SECONDS."""
        self._serving = True
        self.pulse.bind()
        self.post(e.Begin())
        due = time.monotonic()
        while not over.is_set():
            with contextlib.suppress(queue.Empty):
                self._wakes.get(timeout=max(0.0, due - time.monotonic()))
            with self._handling:
                self._drain()
            self.pulse.beat()
            now = time.monotonic()
            if now >= due:
                due = now + TICK_SECONDS
                with self._handling:
                    self._handle(e.Tick(*self.disk.moving()))
                self.tell_counts(now)
                tick(now)

    def _drain(self) -> None:
        while not self._events.empty():
            self._handle(self._events.get())

    def _handle(self, event: e.Event) -> None:
        store = self._store
        if isinstance(event, e.AllInitialised) and not store.initialised():
            return  # of a set-up before
        if isinstance(event, e.Connected):
            event = e.Connected(event.stream, 0 if store.decided is None else store.decided.carried)
        for action in self.machine.handle(event, time.monotonic()):
            self._action_handlers[type(action)](action)

    def tell_counts(self, now: float, at_once: bool = False) -> None:
        """What was counted, and the staleness of pushes, now and then: the coordinator adds up what all shards see."""
        store = self._store
        counted = store.counters.word(store.attempt)
        lost = counted["updatesLost"] != self._counted.get("updatesLost")
        if self.link is None or not (at_once or lost or now - self._told >= STALENESS_SECONDS):
            return
        self._told = now
        if at_once or counted != self._counted:
            self._counted = counted
            self.answer(counted)
        if store.staleness is not None:
            self.answer(store.staleness.word(store.attempt))

    # -- out -----------------------------------------------------------------------------------

    def tell(self, message: ShardMessage) -> None:
        """Tell the coordinator."""
        self.answer(encode_message(message))

    def _exit(self, act: e.ExitProcess) -> None:
        if act.fenced is not None:
            self._exits.fenced(Fenced(act.text, act.fenced))
        elif act.text:
            self._exits.leave(act.code, act.text)
        else:
            self._exits.exit_with(act.code)

    def _reset(self, act: e.Reset) -> None:
        store = self._store
        if store.phase is not act.phase:
            self.restoring.forget()
            store.phase = act.phase
        store.stand_down()
        store.term, store.restored_by = act.term, act.restored_by

    def _adopt(self, act: e.AdoptMode) -> None:
        self.restoring.forget()
        self._store.adopt(modes.parse_mode(act.mode))

    def _lay_out(self, act: e.LayOut) -> None:
        self.restoring.forget()
        store = self._store
        store.set_up(act.table, act.rule, tuple(TableSpec.from_json(spec) for spec in act.tables))
        self._workers.changed()
        if store.initialised():
            self.post(e.AllInitialised())

    def _serve(self, act: e.Serve) -> None:
        self._store.open(act.term, act.restore_id)
        self.tell_counts(time.monotonic(), at_once=True)
        self._workers.changed()

    def _carry_out(self, order: messages.Decide) -> None:
        store = self._store
        if store.decided is None:
            self.post(e.Misfit("the coordinator decides on updates, and this shard's mode does not let it"))
            return
        try:
            store.carry_out(order)
        except WireError as error:
            self.post(e.Misfit(str(error)))

    def _tell_arrivals(self) -> None:
        store = self._store
        if store.decided is not None:
            store.decided.tell_again()
        store.norms.tell_again()

    def _look_up(self, order: messages.Where) -> None:
        store = self._store
        with store.lock:
            known = store.admission.rows
            rows = {rank: (known[rank].complete, len(known[rank].open)) for rank in order.ranks if rank in known}
            position = position_of(store)
        self.post(messages.WorkerPositions(store.index, order.ask, position, rows))

    def _tell_finished(self, act: e.TellFinished) -> None:
        self.tell_counts(time.monotonic(), at_once=True)
        self._workers.finished()


DIAL_SECONDS = 3.0
NOTICE_SECONDS = 30.0


class CoordinatorLink:
    """At most one stream at a time is in use; nobody who says something waits for it. `post` takes what came."""

    def __init__(self, place: ProcessContext, store: Store, post: Callable[[e.Event], None]) -> None:
        self._place, self._store, self._post = place, store, post
        self._run, self._peer = run_digest(place.run), place.config.shards[0]
        self._dials: queue.SimpleQueue[float] = queue.SimpleQueue()
        self._out: queue.SimpleQueue[tuple[Stream, Kind, Mapping[str, Any]] | None] = queue.SimpleQueue()
        self._over = False
        self._number = 0
        self._told = -NOTICE_SECONDS
        """When it was logged last that who was dialled is not the coordinator."""
        self._stream: Stream | None = None
        self._addresses: Iterator[Stream] | None = None
        """What is left of the addresses that the coordinator's name had."""

    def start(self) -> None:
        """Be ready to dial."""
        supervise.start_thread(self._read_loop, "to-coordinator")
        supervise.start_thread(self._send_loop, "coordinator-sender")

    def dial(self, after: float) -> None:
        """Open a stream in so many seconds."""
        self._dials.put(after)

    def hello(self, action: Hello) -> None:
        """The first frame of a stream."""
        store, stream = self._store, self._stream
        if stream is not None and action.stream == self._number:
            body = hello_body(store.index, store.attempt, action.term, action.serving, action.restore_id, action.mode, action.carried)
            self._out.put((stream, Kind.HELLO, body))

    def say(self, body: Mapping[str, Any]) -> None:
        """An answer; on a stream that breaks it is lost."""
        stream = self._stream
        if stream is not None:
            self._out.put((stream, Kind.PEER, body))

    def hang_up(self, number: int) -> None:
        """Close a stream; what waits to be sent by it goes."""
        stream = self._stream
        if stream is not None and number == self._number:
            stream.close()

    def close(self) -> None:
        """Dial no more, and end the threads."""
        self._over = True
        self._dials.put(0.0)
        self._out.put(None)
        self.hang_up(self._number)

    def _read_loop(self) -> None:
        while not self._over:
            time.sleep(self._dials.get())
            stream = None if self._over else self._next()
            if stream is None:
                self._post(e.Unreached())
                continue
            if not self._greeted(stream):
                stream.close()
                self._post(e.Unreached())
                continue
            self._number += 1
            self._stream = stream
            if self._over:  # `close` came before there was a stream to close
                stream.close()
                return
            self._post(e.Connected(self._number))
            why = self._read(stream, self._number)
            self._stream = None
            stream.close()
            self._post(e.Lost(self._number, why))

    def _next(self) -> Stream | None:
        """The next address of the coordinator's name that can be dialled; after the last one the name is looked up again."""
        stream = None if self._addresses is None else next(self._addresses, None)
        if stream is None:
            self._addresses = tcp.connect(self._peer.host, self._peer.port, DIAL_SECONDS)
            stream = next(self._addresses, None)
        if stream is None:
            self._addresses = None
        return stream

    def _greeted(self, stream: Stream) -> bool:
        """Prove who dials; whether the coordinator answered and has proven itself too."""
        try:
            greet(stream, self._place, 0)
        except (StreamClosed, TimeoutError):
            return False
        except WireError as error:
            if time.monotonic() - self._told > NOTICE_SECONDS:
                self._told = time.monotonic()
                log.warning("stream to the coordinator at %s: %s", stream.peer, one_line(error, 1000))
            return False
        return True

    def _read(self, stream: Stream, number: int) -> str:
        """Read orders until the stream ends; why, where that is worth a line in the log."""
        try:
            while True:
                header = stream.recv_header(None)
                if header.kind is Kind.ERROR:
                    return one_line(stream.recv_json(header).get("error"), 1000)
                self._addresses = None  # this one was right
                self._post(e.Ordered(decode_order(stream.recv_json(header)), number))
        except StreamClosed:
            return ""
        except (WireError, TimeoutError) as error:
            return str(error)

    def _send_loop(self) -> None:
        while (item := self._out.get()) is not None:
            stream, kind, body = item
            store = self._store
            header = Header(kind, run=self._run, term=store.term, attempt=store.attempt, worker=-1 - store.index)
            try:
                stream.send_json(header, body)
            except StreamClosed:
                stream.close()
