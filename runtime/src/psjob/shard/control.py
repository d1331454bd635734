"""Carries out what the machine of a shard's control side decides, and brings back what came of it.

Events come from any thread and are handled one at a time, in order. The shard's main thread handles them, and the coordinator's, which
finds its orders carried out here when it goes on. Nothing waits for a socket or a disk.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from psjob import modes
from psjob.process.errors import Fenced
from psjob.process.pulse import Pulse
from psjob.protocol.shard import actions as a
from psjob.protocol.shard import events as e
from psjob.protocol.shard import orders
from psjob.protocol.shard.link import LinkState
from psjob.protocol.shard.machine import ShardMachine
from psjob.shard import counts
from psjob.shard.disk import DiskThread
from psjob.shard.link import CoordinatorLink
from psjob.shard.restoring import Restoring, standing
from psjob.shard.snapshots import Snapshots
from psjob.tables import TableSpec
from psjob.wire.frame import Kind, WireError

if TYPE_CHECKING:
    from psjob.shard.server import Server

TICK_SECONDS = 0.25
STALENESS_SECONDS = 2.0
"""So often the staleness of pushes goes to the coordinator."""
log = logging.getLogger("psjob.shard")


class Control:
    """`answer` carries a reply to the coordinator; `link` is the stream to it, None in shard 0's process."""

    def __init__(self, server: Server) -> None:
        self.server = server
        place, store = server.place, server.store
        self.disk = DiskThread()
        self.pulse = Pulse("control")
        self.snapshots = Snapshots(store, server.folder, self.disk, self.post)
        self.restoring = Restoring(store, self.disk, self.snapshots, self.post)
        self.link = CoordinatorLink(server, self.post) if place.index else None
        self.answer: Callable[[dict[str, Any]], None] = lambda body: None
        peer = place.config.shards[0]
        state = LinkState(f"{peer.host}:{peer.port}", place.config.connect_seconds) if place.index else None
        self.machine = ShardMachine(place.index, place.config.workers, place.view, store.mode, state)
        self._events: queue.SimpleQueue[e.Event] = queue.SimpleQueue()
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._handling = threading.Lock()
        self._serving = False
        self._told = 0.0
        self._counted: dict[str, Any] = {}
        self._carriers: Mapping[type, Callable[[Any], None]] = {
            a.Log: lambda act: log.log(logging.getLevelNamesMapping()[act.level.upper()], "%s", act.text),
            a.Answer: lambda act: self.answer(dict(act.body)),
            a.Exit: self._exit,
            a.Dial: lambda act: None if self.link is None else self.link.dial(act.after),
            a.Hello: lambda act: None if self.link is None else self.link.hello(act),
            a.HangUp: lambda act: None if self.link is None else self.link.hang_up(act.stream),
            a.TellArrivals: lambda act: self._tell_arrivals(),
            a.Reset: self._reset,
            a.TakeView: lambda act: setattr(store, "view", act.view),
            a.AdoptMode: self._adopt,
            a.LayOut: self._lay_out,
            a.DropSessions: lambda act: server.drop_sessions(act.rewind),
            a.Read: self.restoring.read,
            a.SetFences: self.restoring.set_fences,
            a.SetMost: lambda act: setattr(store, "most", dict(act.most)),
            a.Serve: self._serve,
            a.CarryOut: self._carry_out,
            a.Clip: lambda act: store.norms.carry_out(store, act.body),
            a.LookUp: self._look_up,
            a.MakeReady: lambda act: self.snapshots.make_ready(act.number, act.base),
            a.NoteLeft: lambda act: store.leave(act.rank, act.clock),
            a.AskRecords: lambda act: setattr(server, "cut_step", act.step),
            a.Hold: self.snapshots.hold,
            a.Write: lambda act: self.snapshots.write(act.cut),
            a.GiveUp: lambda act: self.snapshots.give_up(act.cut),
            a.Discard: lambda act: self.snapshots.discard(act.cut),
            a.Release: lambda act: server.release(act.cut),
            a.TellFinished: self._tell_finished,
        }

    # -- in ------------------------------------------------------------------------------------

    def order(self, body: Mapping[str, Any]) -> None:
        """The coordinator of this process orders something, and it is done when this comes back.

        Not to be called with a block's lock held. Raises WireError where the order is not in shape.
        """
        self._events.put(e.Ordered(orders.read(body)))
        with self._handling:
            self._drain()

    def mark(self, rank: int, cut: int) -> None:
        """A worker stands at its step edge and holds its pushes for `cut`."""
        self.post(e.Marked(rank, cut))

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
        store = self.server.store
        if isinstance(event, e.Initialised) and not store.initialised():
            return  # of a set-up before
        if isinstance(event, e.Connected):
            event = e.Connected(event.stream, 0 if store.decided is None else store.decided.carried)
        for action in self.machine.handle(event, time.monotonic()):
            self._carriers[type(action)](action)

    def tell_counts(self, now: float, at_once: bool = False) -> None:
        """What was counted, and the staleness of pushes, now and then: the coordinator adds up what all shards see."""
        store = self.server.store
        counted = counts.word(store.counters, store.attempt)
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

    def _exit(self, act: a.Exit) -> None:
        server = self.server
        if act.fenced is not None:
            server.fenced(Fenced(act.text, act.fenced))
        elif act.text:
            server.leave(act.code, act.text)
        else:
            server.exit_with(act.code)

    def _reset(self, act: a.Reset) -> None:
        store = self.server.store
        if store.phase is not act.phase:
            self.restoring.forget()
            store.phase = act.phase
        store.stand_down()
        store.view, store.generation = act.view, act.generation

    def _adopt(self, act: a.AdoptMode) -> None:
        self.restoring.forget()
        self.server.store.adopt(modes.read(act.mode))

    def _lay_out(self, act: a.LayOut) -> None:
        self.restoring.forget()
        store = self.server.store
        store.set_up(act.table, act.rule, tuple(TableSpec.from_json(spec) for spec in act.tables))
        self.server.changed()
        if store.initialised():
            self.server.initialised()

    def _serve(self, act: a.Serve) -> None:
        self.server.store.open(act.view, act.recovery)
        self.tell_counts(time.monotonic(), at_once=True)
        self.server.changed()

    def _carry_out(self, act: a.CarryOut) -> None:
        store = self.server.store
        if store.decided is None:
            self.post(e.Misfit("the coordinator decides on updates, and this shard's mode does not let it"))
            return
        try:
            store.decided.carry_out(store, act.body)
        except WireError as error:
            self.post(e.Misfit(str(error)))

    def _tell_arrivals(self) -> None:
        store = self.server.store
        if store.decided is not None:
            store.decided.tell_again()
        store.norms.tell_again()

    def _look_up(self, act: a.LookUp) -> None:
        store = self.server.store
        with store.lock:
            known = store.admission.rows
            rows = [(rank, known[rank].complete, len(known[rank].open)) for rank in act.ranks if rank in known]
            found = standing(store)
        self.post(e.Stands(act.ask, found, rows))

    def _tell_finished(self, act: a.TellFinished) -> None:
        self.tell_counts(time.monotonic(), at_once=True)
        self.server.final = True
        self.server.changed()
        for session in list(self.server.sessions.values()):
            session.tell(Kind.FINISHED)
