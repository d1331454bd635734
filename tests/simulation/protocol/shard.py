"""A shard's process: the shipped machine of its control side and the shipped store, driven on the virtual clock, network and volume."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from psjob import contract, modes
from psjob.checkpoint.disk import CheckpointProblem, Damage
from psjob.modes import format_mode
from psjob.protocol import messages
from psjob.protocol.coordinator.events import ShardRestartedFromKeeper, WorkerFacts
from psjob.protocol.messages import ShardMessage, ShardPosition, decode_order, encode_message
from psjob.protocol.shard import events as e
from psjob.protocol.shard.events import Phase
from psjob.protocol.shard.machine import CoordinatorLinkState, ShardMachine
from psjob.shard import deduplication
from psjob.shard.session import RecordsHere
from psjob.tables import TableSpec
from psjob.wire.frame import Header, Kind, WireError
from tests.simulation.protocol import records
from tests.simulation.protocol.kernel import Process
from tests.simulation.protocol.ledger import HeldTable, LedgerStore
from tests.simulation.protocol.network import End
from tests.simulation.protocol.promises import Saved
from tests.simulation.protocol.sessions import SimSession
from tests.simulation.protocol.snapshot import Snapshots
from tests.simulation.protocol.volume import DiskThread, Job

if TYPE_CHECKING:
    from tests.simulation.protocol.coordinator import SimCoordinator
    from tests.simulation.protocol.world import World

FORKS = 0.05
"""Seconds until a process is there that is forked in place of one that crashed."""
TICK = 0.25
THREAD = 0.001
"""Within so many seconds a thread hears what another one has posted."""
BEAT = 2.0
"""The coordinator says something down each stream at least this often."""
DIAL = 3.0
"""Seconds after which a dial that nobody answers is given up."""


class SimShard(Process):
    """One start of a shard. Shard 0 has a `coordinator` too."""

    def __init__(self, world: World, index: int, attempt: int, term: int, before: SimShard | None = None) -> None:
        super().__init__(world.kernel, f"ps-{index}-a{attempt}")
        self._before = before
        """The process of this attempt that crashed, from whose memory this one continues."""
        self.world, self.index, self.attempt, self.first_term = world, index, attempt, term
        self.disk = DiskThread(self)
        self.up = False
        """It has come through its imports."""
        self.final = False
        self.snapshot_step = -1
        self.wishes = False
        self.sessions: dict[int, SimSession] = {}
        self.records = RecordsHere()
        self.coordinator: SimCoordinator | None = None
        self.moved = (0, 0)
        """Bytes of the transfer that is under way, and how many there are in all."""
        self.progress = 0
        """Rises with all that this process does."""
        self._seen = (-1, 0.0)
        self._early: list[tuple[Any, ...]] = []
        self._posted: deque[e.Event] = deque()
        self._handling = False
        self._streams: dict[int, End] = {}
        self._numbers = 0
        self._missing: set[int] = set()
        starts = world.plan.starts if before is None else FORKS
        self.after(starts * (0.5 + world.kernel.random.random()), self._begin)
        if index and attempt > 1 and before is None:
            self.after(0.05, self._announce)

    # -- beginning ---------------------------------------------------------------------------------

    def _begin(self) -> None:
        world = self.world
        plan = world.plan
        self.mode = world.mode_of(world.planner.mode)
        self.store = LedgerStore(self.index, plan.shards, plan.workers, self.attempt, self.mode, "run").bind(
            world.promises, self.pod, plan.clips
        )
        self.store.term = self.first_term
        self.store.on_failure = self.store.on_problem = _failed
        if self.store.decided is not None:
            self.store.decided.arrived = self.tell
        self.store.norms.measured = self.tell
        link = None if self.index == 0 else CoordinatorLinkState("shard 0", 600.0)
        self.machine = ShardMachine(self.index, plan.workers, self.first_term, self.mode, link)
        self.snapshots = Snapshots(self)
        self.up = True
        if self.index == 0:
            from tests.simulation.protocol.coordinator import SimCoordinator

            self.coordinator = SimCoordinator(self)
            if self._before is not None:
                self._take_up(self._before)
            self.coordinator.begin()
            self.store.on_step = self.coordinator.step_passed
        elif self.attempt > 1 or self._before is not None:
            if self._before is not None:
                self._take_up(self._before)
            self.disk.ask(records.newest(world.volume, self.pod), self._over)
        self.post(e.Begin())
        self.after(TICK, self._tick)
        early, self._early = self._early, []
        for end, frame in early:
            if not end.closed:
                end.heard(frame)

    def outlived(self) -> bool:
        """Has all that this process serves been in memory that outlives it?"""
        if not self.up or not self.alive:
            return False
        store = self.store
        plain = store.mode.name == "sync" and not store.mode.decided and not store.row_cells
        return plain and store.phase is Phase.SERVING

    def _take_up(self, before: SimShard) -> None:
        """What `Store.take_up` does, with ledgers."""
        store, held = self.store, before.store
        store.mode, store.restored_by = held.mode, held.restored_by
        store._lay_out(self.world.layout, "sgd", ())
        for index, cell in store.cells.items():
            cell.put(held.cells[index].held, held.cells[index].n)  # type: ignore[attr-defined]
        ranks = {rank: (row.incarnation, row.left_at) for rank, row in held.admission.rows.items()}
        store.admission.load(deduplication.taken_by([cell.n for cell in store.cells.values()], ranks), {})
        store.begin(cell.n for cell in store.all_cells())
        store.norms.take_up(held.norms.ordered)
        left = frozenset(rank for rank, (_, at) in ranks.items() if at is not None)
        if self.coordinator is not None and before.coordinator is not None:
            workers = tuple(
                WorkerFacts(row.complete, *row.incarnation, left=row.left_at) for _, row in sorted(store.admission.rows.items())
            )
            snapshot, clip = before.coordinator.machine.state.snapshots.number, held.norms.ordered
            self.coordinator.take_up(
                ShardRestartedFromKeeper(held.term, held.restore_id, format_mode(held.mode), self.world.layout, workers, snapshot, clip)
            )
        self.post(e.RestartedFromKeeper(held.term, held.restore_id, held.restored_by, format_mode(held.mode), left))
        self.world.promises.counts["taken up"] += 1

    def _over(self, found: Any) -> None:
        if not isinstance(found, Exception) and found[0] is not None and found[0].final:
            self.post(e.RunIsOver())

    def _announce(self) -> None:
        """Before torch is imported: tell the coordinator of the new term."""
        end = self.dial(self.world.named.get(("shard", 0), []))
        if end is not None:
            end.send((Header(Kind.HELLO), {"role": "shard", "early": True, "term": self.first_term, "index": self.index}))
            end.close()

    def _tick(self) -> None:
        self.progress += 1
        self.after(TICK, self._tick)
        self.post(e.Tick(*self.moved))
        now = self.clock()
        if self.index:
            for session in list(self.sessions.values()):
                session.admit(now)

    def healthy(self) -> bool:
        """Does its own heartbeat continue?"""
        return not self.frozen

    # -- the machine -------------------------------------------------------------------------------

    def post(self, event: e.Event) -> None:
        """Tell the machine soon: a thread of its own hears of it, after what it is told already."""
        self._posted.append(event)
        if not self._handling:
            self._handling = True
            self.after(self.kernel.random.random() * THREAD, self._handle)

    def _handle(self) -> None:
        while self._posted:
            event = self._posted.popleft()
            if isinstance(event, e.AllInitialised) and not self.store.initialised():
                continue  # of a set-up before
            for action in self.machine.handle(event, self.clock()):
                if self.alive:
                    _CARRY[type(action)](self, action)
            if not self.alive:
                return
        self._handling = False

    def order(self, body: Mapping[str, Any], stream: int | None) -> None:
        """An order of the coordinator."""
        self.world.count("order", str(body.get("do")))
        if self.kernel.traced is not None and body.get("do") != "nothing":
            self.trace(f"is ordered {json.dumps(body)[:300]}")
        try:
            order = decode_order(body)
        except WireError as error:
            self.post(e.Misfit(str(error)))
            return
        if stream is None:  # the coordinator of this process finds its orders carried out
            self._posted.append(e.Ordered(order))
            self._handle()
        else:
            self.post(e.Ordered(order, stream))

    def tell(self, message: ShardMessage) -> None:
        """Tell the coordinator, where there is a stream."""
        self.answer(encode_message(message))

    def answer(self, body: Mapping[str, Any]) -> None:
        """Carry a message's body to the coordinator."""
        self.world.count("answer", str(body.get("did")))
        body = json.loads(json.dumps(body))
        if self.coordinator is not None:
            self.coordinator.answer(0, body)
            return
        link = self.machine.link
        end = self._streams.get(-1 if link is None or link.stream is None else link.stream)
        if end is not None:
            end.send((Header(Kind.PEER), body), 100)

    # -- streams -----------------------------------------------------------------------------------

    def dial(self, targets: list[Any]) -> End | None:
        """A stream to one of the processes that have a name."""
        alive = [target for target in targets if target.alive]
        self.kernel.random.shuffle(alive)
        for target in alive:
            ends = self.world.network.connect(self, target)
            if ends is not None:
                target.accept(ends[1])
                return ends[0]
        return None

    def accept(self, end: End) -> None:
        """Somebody has dialled."""
        end.heard = lambda frame: self.meet(end, frame)

    def meet(self, end: End, frame: tuple[Header, Any]) -> None:
        """The first frame of a stream."""
        if not self.up:
            self._early.append((end, frame))
            return
        header, hello = frame
        if hello.get("role") == "shard":
            if self.coordinator is not None:
                self.coordinator.peer(end, hello)
            else:
                end.close()
            return
        self.world.count("hello", "worker")
        self._numbers += 1
        session = SimSession(self, end, header, hello, self._numbers)
        old = self.sessions.get(session.rank)
        if self.outdated(session, old):
            session.refuse(WireError(f"worker {session.rank}: a newer process of this rank is here; this one is fenced"))
            return
        self.sessions[session.rank] = session
        if old is not None:
            old.hang_up()
        if self.coordinator is not None:
            self.coordinator.hello(session)
        else:
            session.admit(self.clock())

    def outdated(self, session: SimSession, old: SimSession | None) -> bool:
        """Is a newer process of its rank here?"""
        return old is not None and old.incarnation > session.incarnation and not old.done

    def session_over(self, session: SimSession) -> None:
        """A worker's stream has ended."""
        if self.coordinator is not None:
            self.coordinator.stream_ended(session)

    def _dial(self, action: e.DialCoordinator) -> None:
        self.after(action.after, self._dial_now)

    def _dial_now(self) -> None:
        end = self.dial(self.world.named.get(("shard", 0), []))
        if end is None:
            self.after(min(DIAL, 0.2), self.post, e.Unreached())
            return
        self._numbers += 1
        number = self._numbers
        self._streams = {number: end}
        end.heard = lambda frame: self.order(frame[1], number)
        end.ended = lambda: self.post(e.Lost(number))
        decided = self.store.decided
        self.after(2 * self.world.plan.delay, self.post, e.Connected(number, 0 if decided is None else decided.carried))

    def _hello(self, action: e.Hello) -> None:
        body = {
            "role": "shard", "index": self.index, "attempt": self.attempt, "term": action.term, "serving": action.serving,
            "restore_id": action.restore_id, "mode": action.mode, "carried": action.carried,
        }  # fmt: skip
        self.world.count("answer", "hello")
        self._streams[action.stream].send((Header(Kind.HELLO), body))

    def _hang_up(self, action: e.CloseStream) -> None:
        end = self._streams.pop(action.stream, None)
        if end is not None:
            end.close()

    # -- blocks ------------------------------------------------------------------------------------

    def cell(self, header: Header) -> Any:
        """The block, or table, that a frame is about. Raises WireError."""
        if header.kind in (Kind.PUSH, Kind.PULL, Kind.INIT) and header.block < self.world.plan.blocks:
            return self.store.cell(header.block)
        return self.store.row_cell(header.table)

    def first_value(self, session: SimSession, header: Header) -> None:
        """Rank 0's first value of a part. Raises WireError."""
        store = self.store
        if session.rank != 0 or store.phase is not Phase.INIT:
            raise WireError(f"INIT from worker {session.rank} while this shard is {store.phase.value}")
        cell = self.cell(header)
        if cell.held is None:
            content = store.first(cell.part)
            cell.put(content if header.kind is Kind.INIT else HeldTable(cell.spec, content), 0)
        if store.initialised_one(cell.index):
            self.post(e.AllInitialised())

    def _lay_out(self, action: e.LayOut) -> None:
        self.store.set_up(action.table, action.rule, tuple(map(TableSpec.from_json, action.tables)))
        if self.store.initialised():
            self.post(e.AllInitialised())

    def _reset(self, action: e.Reset) -> None:
        store = self.store
        store.phase, store.term, store.restored_by = action.phase, action.term, action.restored_by

    def _drop_sessions(self, action: e.DropSessions) -> None:
        for session in list(self.sessions.values()):
            if not session.welcomed or session.done:
                continue  # it has only just come, and waits for what follows
            if action.rewind:
                session.rewind()
            else:
                session.hang_up()

    def _read(self, action: e.Read) -> None:
        self.moved = (0, 0)
        self.disk.ask(self._reading(action), lambda result: self._have_read(action, result))

    def _reading(self, action: e.Read) -> Job:
        volume, plan = self.world.volume, self.world.plan
        saved: Saved = yield from volume.read(self.pod, action.manifest)
        mine = self.world.owned(self.index)
        self.moved = (0, plan.shard_bytes)
        for name in sorted({saved.where[part] for part in mine}):
            yield from volume.read(self.pod, name)
        self.moved = (plan.shard_bytes, plan.shard_bytes)
        return saved

    def _have_read(self, action: e.Read, result: Any) -> None:
        if isinstance(result, CheckpointProblem):
            self.post(e.Unread(action.reading, str(result), isinstance(result, Damage)))
            return
        if isinstance(result, Exception):
            raise result
        if self.machine.reading is None or self.machine.reading.number != action.reading:
            return
        saved: Saved = result
        store, world = self.store, self.world
        together = store.mode.ahead == 0
        mine = world.owned(self.index)
        states = {part: (saved.parts[part], saved.step if together else saved.versions[part]) for part in mine if part < world.plan.blocks}
        tables = [
            (HeldTable(spec, saved.parts[part]), saved.step if together else saved.versions[part])
            for spec, part in zip(world.specs(), [part for part in mine if part >= world.plan.blocks], strict=True)
        ]
        store.restore(world.layout, "sgd", states, tables)
        store.admission.load(saved.tables[self.index], {})
        world.promises.counts["restores"] += 1
        left = frozenset(rank for rank, row in store.admission.rows.items() if row.left_at is not None)
        complete = tuple(row.complete for _, row in sorted(store.admission.rows.items()))
        self.post(e.Placed(action.reading, self.position(), complete, left))

    def position(self) -> ShardPosition:
        """How far the blocks are."""
        low, high = self.store.span()
        return ShardPosition(low, high, self.store.admission.owned, low)

    def _set_fences(self, action: e.SetFences) -> None:
        for rank, fence in action.fences.items():
            self.store.admission.rows[rank].incarnation = fence
        self.store.most = dict(action.most)

    def _serve(self, action: e.Serve) -> None:
        self.world.promises.opened(self, action.restore_id)
        self.store.open(action.term, action.restore_id)
        for session in list(self.sessions.values()) if self.index else ():
            session.admit(self.clock())

    def _carry_out(self, order: messages.Decide) -> None:
        if self.store.decided is None or self.store.phase is not Phase.SERVING:
            return
        try:
            self.store.carry_out(order)
        except WireError as error:
            self.post(e.Misfit(str(error)))

    def _look_up(self, order: messages.Where) -> None:
        rows = self.store.admission.rows
        found = {rank: (rows[rank].complete, len(rows[rank].open)) for rank in order.ranks}
        self.post(messages.WorkerPositions(self.index, order.ask, self.position(), found))

    def _note_left(self, action: e.NoteLeft) -> None:
        before = self.store.counters.lost
        self.store.leave(action.rank, action.clock)
        if self.store.counters.lost > before:
            self.store.given_up(action.rank, action.clock)

    def _release(self, action: e.Release) -> None:
        for session in list(self.sessions.values()):
            session.tell(Kind.RELEASE, request=action.snapshot)

    def _tell_finished(self, action: e.TellFinished) -> None:
        self.final = True
        for session in list(self.sessions.values()):
            session.tell(Kind.FINISHED)

    def marked(self, rank: int, snapshot: int) -> None:
        """A worker's mark."""
        self.post(e.Marked(rank, snapshot))

    def left(self, rank: int) -> None:
        """A worker has left."""
        self.post(e.Left(rank))

    def to_coordinator(self, session: SimSession, header: Header, body: Any) -> None:
        """What only the coordinator understands."""
        if self.coordinator is not None:
            self.coordinator.frame(session, header, body)

    # -- the end -----------------------------------------------------------------------------------

    def _exit(self, action: e.ExitProcess) -> None:
        self.leave(action.code, {} if action.fenced is None else {"fenced": {"term": action.fenced}}, action.text)

    def leave(self, code: int, message: Mapping[str, Any], why: str = "") -> None:
        """End this process by itself."""
        self.trace(f"leaves: {why}")
        self.end(code, dict(message))
        self.world.network.killed(self, silently=False)

    def kill(self) -> None:
        """SIGKILL."""
        if self.alive:
            self.end(137)
            self.world.network.killed(self, silently=False)

    def crash(self) -> None:
        """SIGKILL to the process that serves: the keeper forks another, where that can continue from memory; else it ends with it."""
        goes_on = self.outlived()
        self.kill()
        if goes_on:
            self.world.fork_shard(self)

    def power_cut(self) -> None:
        """Its host loses power."""
        if self.alive:
            self.end(137)
            self.world.network.killed(self, silently=True)
        self.world.volume.power_cut(self.pod)

    def terminate(self) -> None:
        """SIGTERM."""
        self.call(self._terminated)

    def _terminated(self) -> None:
        if not self.up:
            self.leave(contract.EXIT_RETRY, {}, "asked to end while it starts")
            return
        if self.coordinator is not None:
            self.coordinator.stop()
        self.post(e.Terminated())

    def polled(self) -> None:
        """The planner reads the status."""
        if self.coordinator is not None:
            self.coordinator.polled()

    def standing(self) -> str:
        """A few words for who looks at a run that hangs."""
        if not self.alive or not self.up:
            return f"ended with {self.code}" if not self.alive else "starts"
        store = self.store
        rows = {rank: (row.complete, len(row.open), row.left_at) for rank, row in store.admission.rows.items()}
        words = f"{store.phase.value} term {store.term} recovery {store.restore_id} {format_mode(store.mode)} at {store.span()} rows {rows}"
        return words if self.coordinator is None else f"{words}; {self.coordinator.standing()}"


def _failed(sentence: str) -> None:
    raise RuntimeError(sentence)


def _log(shard: SimShard, action: e.Log) -> None:
    shard.trace(f"says: {action.text}")


def _adopt(shard: SimShard, action: e.AdoptMode) -> None:
    shard.store.adopt(modes.parse_mode(action.mode))


def _ready(shard: SimShard, order: messages.Prepare) -> None:
    shard.after(0.01, shard.post, messages.MemoryReady(shard.index, order.number))


def _ask_records(shard: SimShard, action: e.AskRecords) -> None:
    shard.snapshot_step = action.step


def _take_term(shard: SimShard, action: e.TakeTerm) -> None:
    shard.store.term = action.term


def _tell_arrivals(shard: SimShard, action: e.TellArrivals) -> None:
    if shard.store.decided is not None:
        shard.store.decided.tell_again()
    shard.store.norms.tell_again()


_CARRY: dict[type, Callable[[SimShard, Any], None]] = {
    e.Log: _log,
    e.TellCoordinator: lambda shard, action: shard.tell(action.message),
    e.ExitProcess: SimShard._exit,
    e.DialCoordinator: SimShard._dial,
    e.Hello: SimShard._hello,
    e.CloseStream: SimShard._hang_up,
    e.TellArrivals: _tell_arrivals,
    e.Reset: SimShard._reset,
    e.TakeTerm: _take_term,
    e.AdoptMode: _adopt,
    e.LayOut: SimShard._lay_out,
    e.DropSessions: SimShard._drop_sessions,
    e.Read: SimShard._read,
    e.SetFences: SimShard._set_fences,
    messages.Bound: lambda shard, act: setattr(shard.store, "most", dict(act.most)),
    e.Serve: SimShard._serve,
    messages.Decide: SimShard._carry_out,
    messages.Clip: lambda shard, order: shard.store.clip(order),
    messages.Where: SimShard._look_up,
    messages.Prepare: _ready,
    e.NoteLeft: SimShard._note_left,
    e.AskRecords: _ask_records,
    e.HoldBlocks: lambda shard, action: shard.snapshots.hold(action),
    e.Write: lambda shard, action: shard.snapshots.write(action.snapshot),
    e.GiveUp: lambda shard, action: shard.snapshots.give_up(action.snapshot),
    e.Discard: lambda shard, action: shard.snapshots.discard(action.snapshot),
    e.Release: SimShard._release,
    e.TellFinished: SimShard._tell_finished,
}
