"""The driver of the coordinator: a thread that feeds the machine and carries its actions out, and one beside it for the disk.

Streams' threads call in; what they bring is read here, so that a malformed message ends its stream and never reaches the machine.
"""

from __future__ import annotations

import itertools
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import torch

from psjob import rules
from psjob.contract import MOST_RISE, keys
from psjob.layout.blocks import MAX_TENSORS, TensorSpec, check_aliases, check_table
from psjob.modes import format_mode
from psjob.process import supervise
from psjob.process.config import ProcessContext
from psjob.process.errors import Fenced
from psjob.protocol import messages
from psjob.protocol.coordinator import events, updates
from psjob.protocol.coordinator.consistency import Digest, Told
from psjob.protocol.coordinator.events import Action, Event, JobFacts, StreamFacts, WorkerFacts
from psjob.protocol.coordinator.machine import Coordinator
from psjob.protocol.coordinator.report import MAX_METRICS
from psjob.protocol.coordinator.step_times import StepTimed
from psjob.protocol.records import PIECE
from psjob.shard.checks import rule_problem
from psjob.shard.control import ExitCalls
from psjob.shard.coordinator_disk import DiskWork, Job, read_part
from psjob.shard.push_metrics import JobCounts, StalenessHistogram
from psjob.shard.session import Session
from psjob.shard.store import Store
from psjob.shard.worker_stream import ShardJobFacts
from psjob.tables import TableSpec
from psjob.wire import tcp
from psjob.wire.frame import IDLE_PARTS, Header, Kind, WireError, run_digest
from psjob.wire.unauthenticated import one_line

MOST_UNHEARD = 2048
"""Frames of a worker that the coordinator has not heard; with more, no more of its frames are read."""
TICK_SECONDS = 0.05
MANY = 256
"""So many that wait wake the thread all the same."""
BEAT_SECONDS = 2.0
"""The coordinator says something down each stream at least this often."""
PATIENT_SECONDS = 1.0
"""If checkpoints are at least so far apart, steps and records between them are handled by ticks."""
STALENESS_SECONDS = 0.5
MAX_TABLES: Final = 10_000
LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}
log = logging.getLogger("psjob.coordinator")
T = TypeVar("T")
SendOrder = Callable[[Mapping[str, Any]], None]


class CoordinatorDriver:
    """What is public may be called from any thread, but for `feed` and `carry_out`, which are the coordinator's own."""

    def __init__(self, place: ProcessContext, folder: Path, store: Store, job: ShardJobFacts, order: SendOrder, exits: ExitCalls) -> None:
        """`order` carries an order out in this process."""
        self.place, self.store, self._job, self._exits = place, store, job, exits
        self.closed = False
        self.clock: Callable[[], float] = time.monotonic
        self.machine = Coordinator(job_of(place, store, folder), self.clock())
        self.disk = DiskWork(place, folder)
        self.lateness, self.counts = StalenessHistogram(), JobCounts()
        self.beat = time.monotonic()
        """When the machine was last seen to move."""
        self.pending: Mailbox[Event] = Mailbox()
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._ids = itertools.count(1)
        self._sessions: dict[int, Session] = {}
        self._streams: dict[Session, int] = {}
        self._orders: dict[int, SendOrder] = {0: order}
        self._table: tuple[list[Any], tuple[TensorSpec, ...]] = ([], ())
        """The one that came last, as it came and as it was read: workers of one job share it."""
        self._lock = threading.Lock()
        self._said: dict[int, int] = {}
        """By stream, what its worker has said and the machine has not handled: frames, and for each PIECE of a record one more."""
        self._staleness_told = 0.0

    def take_up(self, said: Mapping[str, Any]) -> None:
        """Before `start`: this process continues from memory, which says that of the whole."""
        store = self.store
        assert store.layout is not None and store.kept is not None
        rows = [row for _, row in sorted(store.admission.rows.items())]
        workers = tuple(WorkerFacts(row.complete, *row.incarnation, left=row.left_at) for row in rows)
        snapshot, clip = store.kept.highest_snapshot, store.kept.clip
        self.feed(events.ShardRestartedFromKeeper(said["term"], said["restore_id"], said["mode"], store.layout, workers, snapshot, clip))

    def close(self) -> None:
        """End its threads."""
        self.closed = True
        self.jobs.put(None)

    def start(self) -> None:
        """Begin, in threads of its own."""
        supervise.start_thread(self._run, "coordinator")
        supervise.start_thread(self._work, "coordinator-disk")

    def _run(self) -> None:
        self.feed(events.Started())
        ticked = 0.0
        while not self.machine.state.ended and not self.closed:
            event: Event | None = None
            try:
                event = self.pending.get(timeout=max(0.0, ticked + TICK_SECONDS - self.clock()))
            except queue.Empty:
                pass
            else:
                self.feed(event)
            self.beat = time.monotonic()
            now = self.clock()
            quick = isinstance(event, events.StepPassed) and not self._patient  # a snapshot is named ahead of quick steps
            if now - ticked >= TICK_SECONDS or quick:
                ticked = now
                self.tick()

    def _work(self) -> None:
        torch.set_num_threads(1)
        while (job := self.jobs.get()) is not None:
            done = self.disk.carry_out(job)
            if done is not None:
                self.pending.put(done)

    def feed(self, event: Event) -> None:
        """Let the machine handle an event, and carry out what it wants."""
        for action in self.machine.handle(event, self.clock()):
            self.carry_out(action)
        stream = getattr(event, "stream", None)
        if type(stream) is int and stream in self._said:
            with self._lock:
                self._said[stream] -= _weight(event)
        if isinstance(event, events.WorkerStreamEnded):
            session = self._sessions.pop(event.stream, None)
            if session is not None:
                self._streams.pop(session, None)
            with self._lock:
                self._said.pop(event.stream, None)
        elif isinstance(event, events.ShardLost):
            self._orders.pop(event.link, None)

    def tick(self) -> None:
        """Look at the time."""
        now = self.clock()
        self._look(now)
        self.feed(events.Tick(self.store.furthest()))

    # -- from other threads --------------------------------------------------------------------

    def post(self, event: Event) -> None:
        """Let the coordinator's thread handle an event."""
        self.pending.put(event)

    def behind(self, session: Session) -> bool:
        """Has this worker said so much that no more of it should be read before the coordinator has heard some? Memory bounds it."""
        return self._said.get(self._streams.get(session, -1), 0) > MOST_UNHEARD

    def _post_step(self, event: Event) -> None:
        """As `post`, of what comes at every step: while no checkpoint is near nobody waits for it, and no thread is woken."""
        self.pending.put(event, urgent=not self._patient)

    @property
    def _patient(self) -> bool:
        job, snapshots = self.machine.state.job, self.machine.state.snapshots
        return snapshots.current is None and job.every is None and (job.interval is None or job.interval >= PATIENT_SECONDS)

    def hello(self, session: Session) -> None:
        """A worker says hello. Raises WireError for what is no worker's hello."""
        stream = self._read_hello(next(self._ids), session)
        self._sessions[stream.id], self._streams[session] = session, stream.id
        self.post(events.WorkerHello(stream))

    def ended(self, session: Session) -> None:
        """A worker's stream is gone."""
        stream = self._streams.get(session)
        if stream is not None:
            self.post(events.WorkerStreamEnded(stream))

    def frame(self, session: Session, header: Header, body: Mapping[str, Any], blob: bytes = b"") -> None:
        """What a worker says beside its pushes."""
        stream, kind = self._streams.get(session), header.kind
        if stream is None:
            return
        posted = self._event(session, stream, kind, header, body, blob)
        if posted is None:
            return
        event, soon = posted
        with self._lock:
            self._said[stream] = self._said.get(stream, 0) + _weight(event)
        (self.post if soon else self._post_step)(event)

    def _event(
        self, session: Session, stream: int, kind: Kind, header: Header, body: Mapping[str, Any], blob: bytes
    ) -> tuple[Event, bool] | None:
        """What a worker says, and whether the coordinator's thread is to be woken for it. Raises WireError."""
        workers = self.place.config.workers
        match kind:
            case Kind.RECORD:
                idle = min(1.0, header.request / IDLE_PARTS) if header.part else None
                return events.RecordCame(stream, header.clock, blob, idle), header.clock < 0
            case Kind.MARK:
                return events.WorkerMarked(stream, header.request, header.clock), True
            case Kind.LEAVE:
                return events.WorkerLeft(stream, header.clock), True
            case Kind.REPORT:
                return events.Reported(stream, numbers_of(body)), True
            case Kind.CHECKPOINT:
                return events.CheckpointAsked(stream), True
            case Kind.STOP:
                return events.WorkerStops(stream), True
            case Kind.MEASURED if (timed := StepTimed.of(stream, body)) is not None:
                return timed, False
            case Kind.STEP_LOST | Kind.MEASURED if not self.place.config.stages:
                raise WireError(f"worker {session.rank} sends {kind.name}, and this job has no stages")
            case Kind.STEP_LOST:
                return events.StepLost.of(stream, body, workers), True
            case Kind.MEASURED:
                return events.Measured.of(stream, header.clock, body, workers), True
            case Kind.HEARTBEAT:
                return events.Heartbeat.of(stream, body), True
            case Kind.INPUTS:
                told = Told.of(body)
                return events.InputsSeen.of(stream, body) if told is None else events.DataSeen(stream, told), True
            case Kind.DIGEST if (digest := Digest.of(body)) is not None:
                return events.DigestCame(stream, digest), True
        return None

    def shard(self, index: int, hello: Mapping[str, Any], order: SendOrder) -> int:
        """Another shard says hello; `order` reaches it. Returns the number of its stream. Raises WireError."""
        link = next(self._ids)
        try:
            event = events.ShardHello.of_peer(link, {**hello, "index": index}, len(self.place.config.shards))
        except messages.Malformed as error:
            raise WireError(str(error)) from None
        self._orders[link] = order
        self.post(event)
        return link

    def announced(self, term: int) -> None:
        """A shard that still starts tells of its term."""
        self.post(events.ShardAnnounced(term))

    def lost(self, index: int, link: int) -> None:
        """Another shard's stream is gone."""
        self.post(events.ShardLost(index, link))

    def answer(self, index: int, body: Mapping[str, Any]) -> None:
        """A shard answers an order. Raises WireError for what is not in shape."""
        try:
            if body.get("did") in ("staleness", "counts"):
                self._late(index, body)
                return
            event = messages.decode_message(index, body, self.place.config.workers, read_part)
        except (ValueError, KeyError, TypeError) as error:
            if index == 0:
                raise  # no stream to end: it is this process that is wrong
            raise WireError(f"shard {index}: {error}") from None
        if event is not None:
            self.post(event)

    def step_passed(self, step: int) -> None:
        """All workers that are there have passed `step` steps."""
        self._post_step(events.StepPassed(step, time.time()))

    def stop(self) -> None:
        """This pod is asked to go: last snapshot, then leave."""
        self.post(events.StopAsked())

    # -- what is told --------------------------------------------------------------------------

    def status(self) -> dict[str, Any] | None:
        """Of the whole job; None until it is known what that is."""
        state = self.machine.state
        if state.phase == "reading" and state.search.waits_for is None:
            return None
        said = self.machine.status(self.clock(), time.time())
        with self._lock:
            self.counts.heard(0, self.store.counters.word(self.store.attempt))
        waiting = said["waiting"] or self._job.waiting_for or state.stages.waiting(self.clock())
        return said | {"waiting": waiting} | self.lateness.told() | self.counts.told()

    def missing(self) -> list[int]:
        """In a decided mode: workers of whom no push waits for a decision; empty in any other."""
        return updates.missing(self.machine.state)

    # -- out -----------------------------------------------------------------------------------

    def carry_out(self, action: Action) -> None:
        """Do what the machine wants."""
        match action:
            case events.Log(level, text):
                log.log(LEVELS[level], "%s", one_line(text, 4000))  # it may quote a worker
            case events.Tell(stream, kind, body, clock, request):
                if (session := self._sessions.get(stream)) is not None:
                    session.tell(kind, body, clock=clock, request=request)
            case events.CloseWorkerStream(stream):
                if (session := self._sessions.get(stream)) is not None:
                    session.hang_up()
            case events.Welcome():
                self._welcome(action)
            case events.Introduce():
                if (session := self._sessions.get(action.stream)) is not None:
                    session.tell(Kind.NEIGHBOUR, self._neighbour(session, action))
            case events.WishRecords(on):
                self._job.record_requested = on
            case events.Order(link, order):
                if isinstance(order, messages.TakeSnapshot):
                    self.store.note_snapshot(order.snapshot)
                elif isinstance(order, messages.Clip):
                    self.store.note_clip(order.version, order.factor)
                if (send := self._orders.get(link)) is not None:
                    send(action.with_most(self.store.clocks).body)
            case events.Leave(code, why):
                if why is None:
                    self._exits.exit_with(code)
                else:
                    self._exits.leave(code, why)
            case events.LeaveFenced(term, why):
                self._exits.fenced(Fenced(why, term))
            case _:
                self.jobs.put(action)

    def _welcome(self, action: events.Welcome) -> None:
        session = self._sessions.get(action.stream)
        if session is None:
            return
        if action.acked is not None:
            session.hello = dict(session.hello) | {"acked": action.acked}
        if not action.init:
            try:
                session.join()
            except WireError as fenced:
                self.post(events.NotJoined(action.stream, str(fenced)))
                return
        session.welcome(**action.body)
        if action.record:
            session.tell(Kind.RECORD, payload=action.record, clock=action.record_clock)

    def _neighbour(self, session: Session, told: events.Introduce) -> dict[str, Any]:
        workers, start = self.place.keys.workers, session.incarnation[0]
        ends = {session.rank: start, told.rank: told.start}
        key = keys.masked(keys.worker_key(workers, session.rank, start), keys.link_key(workers, ends), ends)
        return {"rank": told.rank, "start": told.start, "host": told.host, "port": told.port, "key": key.hex()}

    # -- counts --------------------------------------------------------------------------------

    def _late(self, index: int, body: Mapping[str, Any]) -> None:
        with self._lock:
            (self.counts if body["did"] == "counts" else self.lateness).heard(index, body)

    def _look(self, now: float) -> None:
        """This shard's own part of how late pushes are."""
        store = self.store
        if store.staleness is not None and now - self._staleness_told >= STALENESS_SECONDS:
            self._staleness_told = now
            self._late(0, store.staleness.word(store.attempt))

    # -- hello ---------------------------------------------------------------------------------

    def _read_hello(self, number: int, session: Session) -> StreamFacts:
        hello = session.hello
        for key in ("restore_id", "acked", "attempt"):
            if not (type(hello.get(key, 0)) is int and 0 <= hello.get(key, 0) <= messages.MOST):
                raise WireError(f"worker {session.rank}: {key} of its hello is {str(hello[key])[:40]!r}, expected a whole number from 0")
        table, tables, problem = self._read_model(session.rank, hello)
        aliases = hello.get("aliases") or {}
        if not isinstance(aliases, dict):
            raise WireError(f"worker {session.rank}: aliases of its hello are {str(aliases)[:40]!r}, expected an object")
        if problem is None:
            try:
                check_aliases(aliases, table)
            except ValueError as error:
                problem = f"the aliases of this worker cannot be: {error}"
        if problem is not None:
            aliases = {}
        mode = str(hello.get("mode", format_mode(self.machine.state.mode)))
        return StreamFacts(
            number, session.rank, session.incarnation, bool(hello.get("fresh")), mode[:80], int(hello.get("restore_id", 0)),
            str(hello.get("rule"))[:80], table, tables, tuple(sorted(aliases.items())),
            str(hello.get("layout", ""))[:80], problem, self._listens(session), int(hello.get("acked", 0)),
        )  # fmt: skip

    def _listens(self, session: Session) -> tuple[str, int] | None:
        """Where a worker of a stage waits for its neighbours. Raises WireError for what is no port."""
        port = session.hello.get("port")
        if port is None or not self.place.config.stages:
            return None
        if type(port) is not int or not 0 < port < 1 << 16:
            raise WireError(f"worker {session.rank}: port of its hello is {str(port)[:40]!r}, expected 1 to 65535")
        try:
            return str(session.stream.sock.getpeername()[0]), port
        except OSError as error:
            raise WireError(f"worker {session.rank}: it has gone: {error}") from None

    def _read_model(self, rank: int, hello: dict[str, Any]) -> tuple[tuple[TensorSpec, ...], tuple[Mapping[str, Any], ...], str | None]:
        """Parameters and tables, and why they can be no job's."""
        raw = hello.get("table")
        if not isinstance(raw, list) or len(raw) > MAX_TENSORS:
            return (), (), "this worker's hello has no parameter table"
        last, table = self._table
        if raw != last:  # else a look at each row would take longer
            try:
                table = tuple(TensorSpec.from_json(row) for row in raw)
                check_table(table)
                for stages in {row.stages for row in table}:
                    self.machine.state.job.stages.who(stages)
            except (ValueError, KeyError, TypeError) as error:
                return (), (), f"the parameter table of this worker cannot be: {error}"
            self._table = raw, table
        hello.pop("table")  # megabytes, which would stay with the session
        try:
            rules.named(str(hello.get("rule")))
        except ValueError as error:
            return (), (), str(error)
        if problem := rule_problem(self.place.config, rank, str(hello.get("rule"))):
            return (), (), problem
        tables = hello.get("tables") or []
        if not isinstance(tables, list) or len(tables) > MAX_TABLES:
            return (), (), f"this worker's hello has no list of at most {MAX_TABLES} tables"
        try:
            specs = [TableSpec.from_json(spec) for spec in tables]
        except (ValueError, TypeError) as error:
            return (), (), f"a table of this worker cannot be: {error}"
        names = [spec.name for spec in specs]
        twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
        return table, tuple(spec.to_json() for spec in specs), None if twice is None else f"this worker has table {twice} twice"


def _weight(event: Event) -> int:
    return 1 + len(event.record) // PIECE if isinstance(event, events.RecordCame) else 1


def numbers_of(body: Mapping[str, Any]) -> dict[str, float]:
    """What of a REPORT is a number with a printable name: NaN and inf are written as words."""
    found = {}
    for name, value in list(body.items())[:MAX_METRICS]:
        if not name.isprintable():
            continue
        if value in ("nan", "inf", "-inf"):
            found[name] = float(value)
        if (type(value) is float and math.isfinite(value)) or (type(value) is int and abs(value) <= messages.MOST):
            found[name] = value
    return found


def job_of(place: ProcessContext, store: Store, folder: Path) -> JobFacts:
    """The job as the machine knows it."""
    config, saved = place.config, place.config.checkpoint
    return JobFacts(
        place.run, str(folder), store.mode, config.workers, len(config.shards), place.term, place.number, bool(place.min_step),
        saved.interval_seconds, saved.every_steps, saved.keep, not saved.disabled, saved.resume_from, config.success_policy,
        config.update_at, config.update_rule, config.reduction, config.step_timeout, config.stages, saved.request,
        config.flushes, config.stage_names,
    )  # fmt: skip


class PeerStream:
    """The coordinator's end of another shard's stream: orders go down it, answers come up.

    Orders are sent by a thread, so that a slow shard never holds the coordinator.
    """

    def __init__(self, coordinator: CoordinatorDriver, stream: tcp.Stream, hello: Mapping[str, Any]) -> None:
        self._coordinator, self.stream, self.hello = coordinator, stream, hello
        self.index = int(hello["index"])
        self._out: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        term, own = int(hello["term"]), coordinator.store.term
        if term > own + MOST_RISE:
            raise WireError(f"shard {self.index} says term {term}, this one is of term {own}; a term rises by {MOST_RISE} at most")

    def run(self) -> None:
        coordinator = self._coordinator
        hello, order = self.hello, self._out.put
        if hello.get("early"):
            coordinator.announced(int(hello["term"]))
            return
        if self.stream.gone():
            return  # the shard has dialled again meanwhile; an old hello must not displace the new one
        link = coordinator.shard(self.index, hello, order)
        supervise.start_thread(self._send_loop, f"to-shard-{self.index}")
        try:
            while True:
                header = self.stream.recv_header(None)
                if header.kind is not Kind.PEER:
                    raise WireError(f"{header.kind.name} is not a shard's message")
                coordinator.answer(self.index, self.stream.recv_json(header))
        finally:
            self._out.put(None)
            coordinator.lost(self.index, link)

    def _send_loop(self) -> None:
        place, store = self._coordinator.place, self._coordinator.store
        header = Header(Kind.PEER, run=run_digest(place.run), term=store.term, attempt=store.attempt)
        while True:
            try:
                body = self._out.get(timeout=BEAT_SECONDS)
            except queue.Empty:
                body = {"do": "nothing"}
            if body is None:
                return
            try:
                self.stream.send_json(header, body)
            except tcp.StreamClosed:
                return


class Mailbox(Generic[T]):
    """What waits for one thread, in its order: any thread may put, one takes.

    What is not urgent wakes nobody: it is taken with what comes next, or when the thread looks.
    """

    def __init__(self) -> None:
        self._waiting: deque[T] = deque()
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._asleep = False

    def put(self, item: T, urgent: bool = True) -> None:
        """Behind all that was put before; only what is urgent ends a wait of `get`."""
        self._waiting.append(item)
        if self._asleep and (urgent or len(self._waiting) > MANY):
            self._asleep = False
            self._wakes.put(None)

    def get(self, timeout: float) -> T:
        """The next one; waits `timeout` seconds for one that is urgent. Raises queue.Empty."""
        self._asleep = True  # before it is looked: what is put from here on either is seen or wakes
        if not self._waiting:
            try:
                self._wakes.get(timeout=timeout)
            except queue.Empty:
                pass
        self._asleep = False
        return self.get_nowait()

    def get_nowait(self) -> T:
        """The next one. Raises queue.Empty."""
        try:
            return self._waiting.popleft()
        except IndexError:
            raise queue.Empty from None

    def qsize(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def empty(self) -> bool:
        """Does none wait?"""
        return not self._waiting
