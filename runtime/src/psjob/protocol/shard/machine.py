"""The control side of one shard as a state machine: setting up, restoring, serving, snapshots, ending.

`handle` is all that it does. It knows no clock, socket, disk or thread: `psjob.shard.control` carries its actions out, and so does the
simulator of the protocol. `ShardSnapshots` is how far one snapshot has come: at most one is in flight, and at most one writer.
`CoordinatorLinkState` is the stream to the coordinator: when to dial, when to say hello, when to give a silent stream up, when to give up
at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from psjob import contract, modes
from psjob.modes import ServedMode
from psjob.protocol import messages as o
from psjob.protocol.shard import events as e
from psjob.protocol.shard.events import Action, Phase

PROGRESS_SECONDS = 1.0
"""So often a shard that writes or reads says how far it is."""
FINISH_SECONDS = 2.0
"""A shard whose run is over stays so long for workers that come to hear it."""
STOP_SECONDS = 26.0
"""A shard that was asked to end waits so long for the coordinator's last snapshot."""


@dataclass
class Reading:
    """What is read, and for which restore."""

    number: int
    order: o.Restore


class ShardMachine:
    """Of shard `index`, which serves in `mode`. `link` is None for shard 0: the coordinator is in its process."""

    def __init__(self, index: int, workers: int, term: int, mode: ServedMode, link: CoordinatorLinkState | None = None) -> None:
        self.index, self.term, self.mode, self.link = index, term, mode, link
        self.phase = Phase.BLANK
        self.restore_id = self.restored_by = self.setup = 0
        self.final = False
        self.snapshots = ShardSnapshots(index, workers)
        self.reading: Reading | None = None
        self._held: tuple[o.Restore, e.Placed] | None = None
        """What was read last, as long as nobody was served since."""
        self._readings = 0
        self._stopping = False
        self._ends: tuple[float, int] | None = None
        self._told = float("-inf")

    def handle(self, event: e.Event, now: float) -> list[Action]:
        """What follows from an event. `now` is monotonic seconds."""
        if isinstance(event, e.Ordered) and event.stream is not None and (self.link is None or event.stream != self.link.stream):
            return []  # of a stream that was given up
        actions = [] if self.link is None else self.link.handle(event, now)
        match event:
            case e.Ordered():
                actions += self._order(event.order, now)
            case e.Tick():
                actions += self._tick(event, now)
            case e.Connected():
                actions += self._hello(event)
            case e.RestartedFromKeeper():
                actions += self._take_up(event)
            case e.Misfit():
                actions += self._misfit(event.why, now)
            case e.AllInitialised() if self.phase is Phase.INIT:
                actions.append(e.TellCoordinator(o.Initialised(self.index, self.setup)))
            case e.Marked():
                actions += self.snapshots.marked(event.rank, event.snapshot)
            case e.Left():
                actions += self.snapshots.left(event.rank)
            case o.MemoryReady() | o.SnapshotVoided() | o.WorkerPositions():
                actions.append(e.TellCoordinator(event))
            case e.Armed() | e.TooLate() | e.Held() | o.SnapshotWritten() | e.Failed() | e.GaveUp():
                actions += self.snapshots.result(event)
            case e.Placed():
                actions += self._placed(event)
            case e.Unread():
                actions += self._unread(event)
            case e.RunIsOver():
                actions += self._finish(now)
            case e.Terminated():
                actions += self._stop(now)
        if self.link is not None and self.link.begun and self.link.stream is None:
            return [action for action in actions if not isinstance(action, e.TellCoordinator)]
        return actions

    # -- orders --------------------------------------------------------------------------------

    def _order(self, order: o.Order, now: float) -> list[Action]:
        match order:
            case o.SetUp():
                return self._set_up(order)
            case o.Restore():
                return self._restore(order)
            case o.Bound() | o.Where():
                return [order]
            case o.Open():
                return self._open(order)
            case o.Adopt():
                self.term = max(self.term, order.term)
                return [e.TakeTerm(self.term)]
            case o.Prepare():
                return self.snapshots.prepare(order)
            case o.TakeSnapshot():
                return self.snapshots.order(order)
            case o.Void():
                return self.snapshots.void(order.snapshot)
            case o.Decide() | o.Clip():
                return [order] if self.phase is Phase.SERVING else []
            case o.Finish():
                return self._finish(now)
            case o.Stop():
                return [e.ExitProcess(contract.EXIT_RETRY)] if self.index else []
            case o.Fence():
                text = f"shard {self.index}: a newer process of this shard is here (term {order.term})"
                return [e.ExitProcess(contract.EXIT_FENCED, text, order.term)]
            case o.Unknown():
                return [e.Log("warning", f"an order that this version does not know: {order.word}")]
            case o.Nothing():
                return []

    def _set_up(self, order: o.SetUp) -> list[Action]:
        actions = self.snapshots.drop()
        self.snapshots.begin()
        self.reading = self._held = None
        self.phase, self.term, self.setup = Phase.INIT, order.term, order.setup
        actions += [e.TakeTerm(self.term), *self._adopt(order.mode), e.LayOut(order.table, order.rule, order.tables)]
        return [*actions, e.DropSessions(rewind=False)]  # rank 0 may have sent its values already, to a set-up before this one

    def _restore(self, order: o.Restore) -> list[Action]:
        """Read a manifest. What is being read, or was read and not served, is not read again for another restore."""
        actions = self.snapshots.drop()
        adopted = self._adopt(order.mode)
        self.term, self.restored_by = order.term, order.restore_id
        drop = e.DropSessions(bool(adopted) or self.mode.rewinds_together)
        if self._held is not None and not adopted and _same(self._held[0], order):
            placed = self._held[1]
            self._held = (order, placed)
            return [*actions, e.Reset(Phase.HELD, self.term, self.restored_by), drop, *self._tell_restored(order, placed)]
        self.phase, self._held = Phase.BLANK, None
        actions += [e.Reset(Phase.BLANK, self.term, self.restored_by), *adopted, drop]
        if self.reading is not None and not adopted and _same(self.reading.order, order):
            self.reading.order = order
            return actions
        self._readings += 1
        self.reading = Reading(self._readings, order)
        return [*actions, e.Read(self._readings, order.folder, order.manifest)]

    def _placed(self, event: e.Placed) -> list[Action]:
        if self.reading is None or self.reading.number != event.reading:
            return []
        order, self.reading = self.reading.order, None
        self.phase, self._held = Phase.HELD, (order, event)
        self.snapshots.begin(event.left)
        return self._tell_restored(order, event)

    def _unread(self, event: e.Unread) -> list[Action]:
        if self.reading is None or self.reading.number != event.reading:
            return []
        order, self.reading = self.reading.order, None
        return [e.TellCoordinator(o.Unrestored(self.index, order.restore_id, event.why, event.damaged))]

    def _tell_restored(self, order: o.Restore, placed: e.Placed) -> list[Action]:
        restored = o.ShardRestored(self.index, order.restore_id, placed.position, placed.complete)
        return [e.SetFences(order.fences, order.most), e.TellCoordinator(restored)]

    def _open(self, order: o.Open) -> list[Action]:
        if self.phase is Phase.BLANK:
            return [e.Log("warning", f"an order to serve term {order.term} came to a shard without blocks; it is left")]
        self.phase, self._held = Phase.SERVING, None
        self.term, self.restore_id = order.term, order.restore_id
        return [e.Serve(order.term, order.restore_id)]

    def _take_up(self, event: e.RestartedFromKeeper) -> list[Action]:
        """To the others a stream broke: what this process says of itself is what the one before it said."""
        self.mode, self.phase = modes.parse_mode(event.mode), Phase.SERVING
        self.term, self.restore_id, self.restored_by = event.term, event.restore_id, event.restored_by
        self.snapshots.begin(event.left)
        return [e.Serve(event.term, event.restore_id)]

    def _adopt(self, mode: str) -> list[Action]:
        if mode == modes.format_mode(self.mode):
            return []
        self.mode = modes.parse_mode(mode)
        return [e.AdoptMode(mode)]

    # -- the link, the clock -------------------------------------------------------------------

    def _hello(self, event: e.Connected) -> list[Action]:
        """Say hello. The coordinator has forgotten a snapshot that was in flight; what it has to hear is said again."""
        serving = self.phase is Phase.SERVING
        said: list[Action] = [
            e.Hello(event.stream, serving, self.term, self.restore_id, modes.format_mode(self.mode), event.carried),
            e.TellArrivals(),
        ]
        if self._stopping:
            said.append(e.TellCoordinator(o.Terminating(self.index)))
        return said + self.snapshots.drop()

    def _misfit(self, why: str, now: float) -> list[Action]:
        """An order broke off: only a restore brings this shard to where the others are."""
        if self.link is not None and self.link.begun:
            return self.link.hang_up(why, now)
        return [e.ExitProcess(1, why)] if self.index == 0 else [e.Log("warning", why)]

    def _tick(self, event: e.Tick, now: float) -> list[Action]:
        actions: list[Action] = []
        if self._ends is not None and now >= self._ends[0]:
            actions.append(e.ExitProcess(self._ends[1]))
        moved: o.BytesMoved | None = None
        if self.reading is not None:
            moved = o.BytesMoved(self.index, "reading", self.reading.order.restore_id, event.done, event.total)
        elif self.snapshots.writing is not None:
            moved = o.BytesMoved(self.index, "writing", self.snapshots.writing, event.done, event.total)
        if moved is None:
            self._told = float("-inf")
        elif now - self._told >= PROGRESS_SECONDS:
            self._told = now
            actions.append(e.TellCoordinator(moved))
        return actions

    # -- ending --------------------------------------------------------------------------------

    def _finish(self, now: float) -> list[Action]:
        """The final manifest is committed: workers hear it here too, then this shard may go."""
        self.final = True
        if self.index and self._ends is None:
            self._ends = (now + FINISH_SECONDS, contract.EXIT_DONE)
        return [e.TellFinished()]

    def _stop(self, now: float) -> list[Action]:
        if self.index == 0:
            return []  # its coordinator hears it
        self._stopping = True
        if self._ends is None:
            self._ends = (now + STOP_SECONDS, contract.EXIT_RETRY)
        return [e.TellCoordinator(o.Terminating(self.index))]


def _same(one: o.Restore, other: o.Restore) -> bool:
    return (one.folder, one.manifest) == (other.folder, other.manifest)


class SnapshotStage(Enum):
    """How far a snapshot is."""

    MARKING = "marking"
    """Some live workers have not marked."""
    HOLDING = "holding"
    WRITING = "writing"


@dataclass
class HeldSnapshot:
    """The snapshot in flight. `missing` are workers whose mark it waits for."""

    order: o.TakeSnapshot
    stage: SnapshotStage
    missing: set[int]
    ready: bool = False

    @property
    def number(self) -> int:
        """The snapshot's number."""
        return self.order.snapshot


class ShardSnapshots:
    """Decides what shard `index` holds, writes, gives up and deletes. `workers` is how many ranks the job has."""

    def __init__(self, index: int, workers: int) -> None:
        self._index, self._workers = index, workers
        self.live: set[int] = set(range(workers))
        """Ranks that have not left."""
        self.current: HeldSnapshot | None = None
        self._writer: int | None = None
        """The snapshot whose writer runs; it may have been given up."""
        self._next: o.TakeSnapshot | None = None
        """A snapshot that begins when that writer, whose snapshot was given up, has stopped."""
        self._unsettled: set[int] = set()
        """Snapshots that were written and are neither committed nor void, as far as this shard knows."""

    @property
    def writing(self) -> int | None:
        """The snapshot that is being written, or waits for the disk."""
        if self._next is not None:
            return self._next.snapshot
        return self.current.number if self.current is not None and self.current.stage is SnapshotStage.WRITING else None

    def begin(self, left: Iterable[int] = ()) -> None:
        """Blocks were set up or restored: all ranks except `left` are live."""
        self.live = set(range(self._workers)) - set(left)

    def prepare(self, order: o.Prepare) -> list[Action]:
        """Memory for the next snapshot; who holds or writes one has it already."""
        if self.current is not None or self._writer is not None:
            return [e.TellCoordinator(o.MemoryReady(self._index, order.number))]
        return [order]

    def order(self, order: o.TakeSnapshot) -> list[Action]:
        """Begin a snapshot. One that is still in flight is given up: the coordinator has forgotten it."""
        actions = self._settle(order)
        actions += self.drop()
        if self._writer is not None:
            if order.clocks is not None:  # decisions come before that writer has stopped, and blocks would hold more than these clocks
                why = f"the files of snapshot {self._writer} are still being given up"
                return [*actions, e.TellCoordinator(o.SnapshotLate(self._index, order.snapshot, why))]
            self._next = order
            return actions
        actions += [e.AskRecords(order.step), *(e.NoteLeft(rank, clock) for rank, clock in sorted(order.left.items()))]
        self.live -= set(order.left)
        marks = order.marks and order.step < 0
        self.current = HeldSnapshot(order, SnapshotStage.MARKING if marks else SnapshotStage.HOLDING, set(self.live) if marks else set())
        if order.step >= 0:
            return [*actions, self._hold(order)]
        self.current.ready = True
        actions.append(e.TellCoordinator(o.SnapshotReady(self._index, order.snapshot)))
        return actions + self._hold_if_marked()

    def marked(self, rank: int, snapshot: int) -> list[Action]:
        """A worker holds its pushes; a mark that no snapshot waits for is released at once."""
        if self.current is None or self.current.number != snapshot or self.current.stage is not SnapshotStage.MARKING:
            return [e.Release(snapshot)]
        self.current.missing.discard(rank)
        return self._hold_if_marked()

    def left(self, rank: int) -> list[Action]:
        """A worker has left: no snapshot waits for its mark."""
        self.live.discard(rank)
        if self.current is None or self.current.stage is not SnapshotStage.MARKING:
            return []
        self.current.missing.discard(rank)
        return self._hold_if_marked()

    def result(self, event: e.Armed | e.TooLate | e.Held | o.SnapshotWritten | e.Failed | e.GaveUp) -> list[Action]:
        """What came of an action."""
        if isinstance(event, (o.SnapshotWritten, e.Failed, e.GaveUp)) and self._writer == event.snapshot:
            self._writer = None
            if self._next is not None:
                following, self._next = self._next, None
                return self.order(following)
        snapshot = self.current
        if snapshot is None or snapshot.number != event.snapshot:
            return []
        match event:
            case e.Armed():
                return self._tell_ready(snapshot)
            case e.TooLate():
                self.current = None
                why = f"blocks are at {event.furthest}, beyond {snapshot.order.step}"
                return [e.GiveUp(snapshot.number), e.AskRecords(-1), e.TellCoordinator(o.SnapshotLate(self._index, snapshot.number, why))]
            case e.Held() if snapshot.stage is SnapshotStage.HOLDING:
                snapshot.stage = SnapshotStage.WRITING
                self._writer = snapshot.number
                told = [*self._tell_ready(snapshot), e.TellCoordinator(o.SnapshotHeld(self._index, snapshot.number))]
                return [*told, e.Release(snapshot.number), e.Write(snapshot.number)]
            case o.SnapshotWritten():
                self.current = None
                self._unsettled.add(snapshot.number)
                return [e.TellCoordinator(event)]
            case e.Failed():
                self.current = None
                return [e.AskRecords(-1), e.TellCoordinator(o.SnapshotUnwritten(self._index, snapshot.number, event.why, event.full))]
            case e.GaveUp():  # blocks were replaced under the writer
                return self.drop()
        return []

    def void(self, number: int) -> list[Action]:
        """The coordinator gives a snapshot up: nothing of it may stay."""
        self._unsettled.discard(number)
        if self._next is not None and self._next.snapshot == number:
            self._next = None
        if self.current is not None and self.current.number == number:
            return self.drop()
        return [e.AskRecords(-1), e.Discard(number)]

    def drop(self) -> list[Action]:
        """Give up the snapshot in flight."""
        snapshot, self.current, self._next = self.current, None, None
        if snapshot is None:
            return []
        return [e.AskRecords(-1), e.GiveUp(snapshot.number), e.Release(snapshot.number), e.Discard(snapshot.number)]

    def _settle(self, order: o.TakeSnapshot) -> list[Action]:
        """Files of snapshots after the one that the newest manifest holds are nobody's: their void was lost with a stream."""
        base, unsettled = order.base, self._unsettled
        self._unsettled = set()
        return [] if base is None else [e.Discard(number) for number in sorted(unsettled) if base < number < order.snapshot]

    def _hold(self, order: o.TakeSnapshot) -> e.HoldBlocks:
        return e.HoldBlocks(order.snapshot, order.step, order.base, order.clocks)

    def _hold_if_marked(self) -> list[Action]:
        snapshot = self.current
        if snapshot is None or snapshot.missing:
            return []
        snapshot.stage = SnapshotStage.HOLDING
        return [self._hold(snapshot.order)]

    def _tell_ready(self, snapshot: HeldSnapshot) -> list[Action]:
        if snapshot.ready:
            return []
        snapshot.ready = True
        return [e.TellCoordinator(o.SnapshotReady(self._index, snapshot.number))]


AGAIN_SECONDS = 0.1
"""Between two dials."""
SILENCE_SECONDS = 10.0
"""A coordinator without a word for so long is dialled anew: its node may be cut off, and its successor has its name."""
FIRST_SECONDS = 30.0
"""The same for its first word: it listens before it has imported torch."""


class CoordinatorLinkState:
    """`address` is where the coordinator listens; it is looked for at most `seconds`."""

    def __init__(self, address: str, seconds: float) -> None:
        self._address, self._seconds = address, seconds
        self._deadline: float | None = None
        self.stream: int | None = None
        self.met = False
        """The coordinator has said a word."""
        self._heard = 0.0
        self._limit = FIRST_SECONDS

    @property
    def begun(self) -> bool:
        """The link is in use."""
        return self._deadline is not None

    def handle(self, event: e.Event, now: float) -> list[Action]:
        """What the link does; events of another stream than the one in use are of the past."""
        match event:
            case e.Begin():
                self._deadline = now + self._seconds
                return [e.DialCoordinator(0.0)]
            case e.Connected():
                self.stream, self._heard, self._limit = event.stream, now, FIRST_SECONDS
            case e.Unreached():
                if not self.met and self._deadline is not None and now > self._deadline:
                    text = f"the coordinator at {self._address} was not found in {self._seconds:.0f} s; starting again"
                    return [e.ExitProcess(contract.EXIT_RETRY, text)]
                return [e.DialCoordinator(AGAIN_SECONDS)]
            case e.Ordered() if event.stream is not None and event.stream == self.stream:
                self.met, self._heard, self._limit = True, now, SILENCE_SECONDS
            case e.Lost() if event.stream == self.stream:
                return self._again(event.why, now)
            case e.Tick() if self.stream is not None and now - self._heard > self._limit:
                return self.hang_up(f"the coordinator said nothing for {self._limit:.0f} s", now)
        return []

    def hang_up(self, why: str, now: float) -> list[Action]:
        """Give the stream in use up, and dial anew."""
        if self.stream is None:
            return []
        return [e.CloseStream(self.stream), *self._again(why, now)]

    def _again(self, why: str, now: float) -> list[Action]:
        self.stream = None
        said: list[Action] = [e.Log("warning", f"stream to the coordinator: {why}")] if why else []
        return said + self.handle(e.Unreached(), now)
