"""A worker's session: joined to its job, at one clock, owing and owed.

The script's side and the streams' side meet here. Whatever ends the script's turn (a rewind, the job's end, a stop, a refusal) is an
*ending*. The first one that comes counts, and the script's next call carries it out. `ShardLinkState` is what a worker knows of one shard.
`Requests` is what it has asked of that shard and is owed, and what of it goes out again to a shard that comes back: on the hot path.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

from psjob.modes import ServedMode
from psjob.protocol.records import PIECE, RecordPiece, RecordsOut
from psjob.protocol.worker import events as e
from psjob.protocol.worker.events import Action
from psjob.wire.frame import Flag, Header, Kind

STOP_SECONDS = 25.0
"""A worker that was asked to stop waits so long for what it needs to stop well."""
DIAL_SECONDS = 0.1
"""Between two looks for a shard."""
BROKEN_SECONDS = 0.2
"""Before a shard that broke the protocol is dialled again."""
ENDED_SECONDS = 0.02
"""Before a shard whose stream ended is dialled again."""
SAID_SECONDS = 30.0
"""What a worker waits for is logged so often."""


@dataclass(frozen=True)
class WorkerEnding:
    """How the script's turn ends: rewind, finished, left, stopped, refused, fenced or lost.

    A rewind's `message` is the mode to come back in, any other's is for who reads the log.
    """

    how: str
    message: str = ""


class WorkerMachine:
    """Of worker `rank`. `reduces`: the workers make the steps, shards only reduce. `addresses` are the shards', in order."""

    def __init__(self, rank: int, mode: ServedMode, reduces: bool, addresses: Sequence[str], connect_seconds: float) -> None:
        self.rank, self.mode, self.reduces, self.connect_seconds = rank, mode, reduces, connect_seconds
        self.links = [ShardLinkState(index, address) for index, address in enumerate(addresses)]
        self.ending: WorkerEnding | None = None
        self.clock = self.term = self.restore_id = 0
        self.joined = False
        self.init = 0
        """How often a shard has asked rank 0 for the run's first values."""
        self.record: bytes | None = None
        self.residual = True
        """The residual in `record` was not sent yet."""
        self.initial: bytes | None = None
        self.records = RecordsOut()
        self.last_record: tuple[int, bytes, tuple[int, int]] | None = None
        self.snapshot_clock = -1
        self.stores = False
        self.mark_wanted = 0
        self.holding = 0
        """The newest snapshot whose mark was sent; no step is made before every shard has released it."""
        self.stop_requested = False
        """This process is asked to go. A signal handler sets it; the next event carries it out."""
        self.stop_clock: int | None = None
        self.standing = False
        """The script waits at a step boundary for the stop clock, and for the last checkpoint."""
        self.leaving = False
        self.told: dict[Kind, Any] = {}
        """The last wish or report of each kind: a broken stream may have swallowed it."""
        self._asked_stop = False
        self._wished = -1
        """The clock at which the newest checkpoint was asked for."""
        self._waits: tuple[str, float, float | None] | None = None
        """What the script waits for in a call, since when, and for how many seconds at most."""
        self._stood = 0.0
        self._said = float("-inf")

    def handle(self, event: e.Event, now: float) -> list[Action]:
        """What follows from an event. `now` is monotonic seconds."""
        match event:
            case e.JoinAsked():
                return self._dial(self.links[:1], now)
            case e.NotFound():
                return self._not_found(self.links[event.link], now)
            case e.ShardStreamEnded():
                self.links[event.link].welcomed = False
                return [] if self.ending is not None else [e.DialShard(event.link, BROKEN_SECONDS if event.broken_rule else ENDED_SECONDS)]
            case e.Welcomed():
                return self._welcomed(event, now)
            case e.ShardWaits():
                return self._shard_waits(event, now)
            case e.RecordReturned():
                return self._record_came(event, now)
            case e.RecordHas():
                return self._record_has(event, now)
            case e.FirstValues():
                return self._hand_in(-1, event.record, True, (0, 0))
            case e.Pulled():
                if self.mode.steady and (event.lowest, event.highest) != (self.clock, self.clock):
                    self._end("rewind")  # a block moved on while this worker was placed
            case e.AtStepBoundary():
                return self._at_step_boundary(event, now)
            case e.SnapshotToldLate():
                self.last_record = event.clock, event.record, event.idle
                return self._hand_in(event.clock, event.record, True, event.idle)
            case e.InsideRound():
                return self._ask_stop() if self.stop_requested else []
            case e.Through():
                return self._leave(event)
            case e.Said():
                return self._say(event.kind, dict(event.body))
            case e.SnapshotTold():
                self.snapshot_clock, self.stores = event.clock, event.stores
            case e.MarkWanted():
                self.mark_wanted = event.snapshot
                return self._stand_on(now)
            case e.Released():
                return self._released(event, now)
            case e.StopSet():
                self.stop_clock = event.clock
                return self._stand_on(now)
            case e.Rewound():
                self._end("rewind", event.mode)
            case e.TurnOver():
                self._end(event.how)
            case e.WorkerRefused():
                self._end(event.code, event.why)
            case e.Tick():
                return self._tick(now)
        return []

    # -- what a driver asks ----------------------------------------------------------------------------

    def hello(self, link: int) -> dict[str, Any]:
        """What a hello to a shard says of where this worker stands."""
        state = self.links[link]
        return {
            "term": self.term, "restore_id": self.restore_id, "fresh": not (state.attempt if link else self.joined),
            "acked": state.requests.acked if state.attempt else self.clock, "attempt": state.attempt, "init": self.initialising,
        }  # fmt: skip

    @property
    def initialising(self) -> bool:
        """Rank 0 was asked for the run's first values, and is not in the job yet."""
        return self.init > 0 and not self.joined

    @property
    def welcomed(self) -> bool:
        """Has every shard let this worker in?"""
        return all(link.welcomed for link in self.links)

    @property
    def released(self) -> bool:
        """Has every shard copied what the snapshot needs that this worker marked?"""
        return all(link.released >= self.holding for link in self.links)

    @property
    def may_step(self) -> bool:
        """May the script continue from its step boundary?"""
        return self.released and not self.standing

    @property
    def stops(self) -> bool:
        """Has a stop been asked for, here or by the job?"""
        return self.stop_requested or self.stop_clock is not None

    def stands(self, small: bool) -> bool:
        """Must all answers be here before it is known what this boundary needs? `small`: a record is made that goes with every clock."""
        return self.stops or self.mark_wanted > 0 or not small

    def needs_record(self, small: bool) -> bool:
        """Is a record to be handed in at this step boundary?"""
        return small or self.stops or self.mark_wanted > 0 or self.snapshot_clock == self.clock

    def next_piece(self, now: float) -> RecordPiece | None:
        """The piece of a record that is to be sent now, if any."""
        stepping = any(link.requests.outstanding or link.requests.unsent for link in self.links)
        return self.records.next(now, stepping) if self.links[0].welcomed else None

    def begin_wait(self, what: str, seconds: float | None, now: float) -> None:
        """The script waits in a call, at most so long."""
        self._waits = what, now, seconds

    def end_wait(self) -> None:
        """The script has what it waited for."""
        self._waits = None

    def waiting_for(self) -> str:
        """What shards have said of why they do not answer."""
        return "; ".join(link.waiting for link in self.links if link.waiting)

    # -- shards ------------------------------------------------------------------------------------------

    def _dial(self, links: Sequence[ShardLinkState], now: float) -> list[Action]:
        new = [link for link in links if link.since is None]
        for link in new:
            link.since = now
        return [e.DialShard(link.index) for link in new]

    def _not_found(self, link: ShardLinkState, now: float) -> list[Action]:
        if not link.attempt and link.since is not None and now - link.since > self.connect_seconds:
            self._end("lost", f"shard {link.index} at {link.address} was not found in {self.connect_seconds:.0f} s; starting again")
        return [] if self.ending is not None else [e.DialShard(link.index, DIAL_SECONDS)]

    def _welcomed(self, event: e.Welcomed, now: float) -> list[Action]:
        link = self.links[event.link]
        requests = link.requests
        if link.attempt and event.attempt > link.attempt:
            requests.attempt_rose()
        link.attempt, link.welcomed, link.waiting = event.attempt, True, ""
        link.released = max(link.released, self.holding)  # a shard that comes anew knows nothing of that snapshot
        self.term = max(self.term, event.term)
        if not event.serving:
            self.init += 1  # of another shard: what this link has sent may be lost, or of a set-up before this one
        if link.index == 0:
            self.restore_id = event.restore_id
            self.records.relinked()
            if not event.init and not self.joined:
                self.clock, self.residual = event.clock, event.residual
                self.joined = not event.record
        if not requests.begun:
            requests.begun = not event.init
            requests.acked = min((asked.clock for asked in requests.outstanding.values()), default=self.clock)
        again = [] if event.init else requests.again(event.complete, event.opened, self.mode, self.reduces)
        dial = self._dial(self.links, now) if self.joined or event.init else []
        return [
            *dial,
            e.SendHyperparameters(link.index),
            *(e.Resend(link.index, old) for old in again),
            e.AskRows(link.index),
            *self._relinked(link),
        ]

    def _relinked(self, link: ShardLinkState) -> list[Action]:
        """Say again what a shard may have missed."""
        made: list[Action] = []
        if link.index == 0:
            if self.last_record is not None:
                clock, record, idle = self.last_record
                made += self._hand_in(clock, record, False, idle)
            elif not self.records.through:
                made.append(e.SendPieces())
            made += [e.Send(0, kind, body, self.clock) for kind, body in self.told.items()]
        return made + (self._leave_shard(link) if self.leaving else [])

    def _shard_waits(self, event: e.ShardWaits, now: float) -> list[Action]:
        self.links[event.link].waiting = event.text
        if now - self._said <= SAID_SECONDS:
            return []
        self._said = now
        return [e.Log("WARNING", f"psjob: waiting: {event.text}")]

    # -- records -----------------------------------------------------------------------------------------

    def _record_came(self, event: e.RecordReturned, now: float) -> list[Action]:
        if event.clock < 0:
            self.initial = event.record
        else:
            self.record = event.record
        self.joined = True
        return self._dial(self.links, now)

    def _hand_in(self, clock: int, record: bytes, snapshot: bool, idle: tuple[int, int], rides: bool = False) -> list[Action]:
        if len(record) <= PIECE and self.records.through:  # else it would come before one that is older
            return [e.SendRecord(clock, record, idle, rides)]
        self.records.add(clock, record, snapshot, idle)
        return [e.SendPieces()]

    def _record_has(self, event: e.RecordHas, now: float) -> list[Action]:
        self.records.has(event.record, event.count, now)
        return self._leave_shard(self.links[0]) if self.leaving and self.records.through else []

    # -- snapshots and stops ------------------------------------------------------------------------------------

    def _at_step_boundary(self, event: e.AtStepBoundary, now: float) -> list[Action]:
        snapshot = self.snapshot_clock == self.clock
        made: list[Action] = [e.StoreWeights(link.index) for link in self.links if snapshot and self.stores]
        mark = stops = False
        if event.record is not None:
            mark, stops = event.settled and self.mark_wanted > 0, event.settled and self.stops
            self.last_record = self.clock, event.record, event.idle
            wanted = snapshot or stops or mark
            made += self._hand_in(self.clock, event.record, wanted, event.idle, rides=not wanted and not self.standing)
        if mark or self.snapshot_clock > self._wished:
            self.told.pop(Kind.CHECKPOINT, None)
        if mark:
            made += self._mark()
        if stops:
            made += self._ask_stop()
            self.standing, self._stood = True, now
        return made + self._stand_on(now)

    def _mark(self) -> list[Action]:
        """Tell every shard that this worker holds its pushes for the snapshot that wants it."""
        self.holding, self.mark_wanted = self.mark_wanted, 0
        return [e.Send(link.index, Kind.MARK, None, self.clock, self.holding) for link in self.links]

    def _released(self, event: e.Released, now: float) -> list[Action]:
        link = self.links[event.link]
        link.released = max(link.released, event.snapshot)
        if event.link == 0 and self.mark_wanted <= event.snapshot:
            self.mark_wanted = 0
        self._stood = now
        return self._stand_on(now)

    def _stand_on(self, now: float) -> list[Action]:
        """The script may stand at a step boundary to stop: does it mark another snapshot, or continue to a stop clock that is ahead?"""
        if not self.standing or not self.released:
            return []
        if self.mark_wanted:
            self._stood = now
            return self._mark()
        self.standing = self.stop_clock is None or self.clock >= self.stop_clock
        return []

    def _ask_stop(self) -> list[Action]:
        if self._asked_stop:
            return []
        self._asked_stop = True
        return self._say(Kind.STOP, {})

    def _say(self, kind: Kind, body: dict[str, Any]) -> list[Action]:
        """Say it to the coordinator, and again to whoever is the coordinator on the next stream."""
        self.told[kind] = body
        if kind is Kind.CHECKPOINT:
            self._wished = self.clock
        return [e.Send(0, kind, body, self.clock)]

    def _tick(self, now: float) -> list[Action]:
        if self.standing and self.released and now - self._stood > STOP_SECONDS:
            self._end("stopped", f"waited {STOP_SECONDS:.0f} s for the last checkpoint")
        if self._waits is None:
            return []
        what, since, seconds = self._waits
        if seconds is not None and now - since > seconds:
            self._end("stopped", f"waited {seconds:.0f} s for {what}")
        if not self.stop_requested or self._asked_stop:
            return []
        if not self.joined:
            self._end("stopped")
            return []
        self._waits = what, since, now - since + STOP_SECONDS
        return self._ask_stop()

    # -- ends ----------------------------------------------------------------------------------------------

    def _leave(self, event: e.Through) -> list[Action]:
        self.last_record = self.clock, event.record, event.idle
        self.leaving = True
        made = self._hand_in(self.clock, event.record, True, event.idle)
        made += [e.Send(0, kind, body, self.clock) for kind, body in self.told.items()]
        for link in reversed(self.links):  # the coordinator's last: it may act on it at once
            made += self._leave_shard(link)
        return made

    def _leave_shard(self, link: ShardLinkState) -> list[Action]:
        """Say that this worker is through, to the coordinator once it has the last record."""
        if link.index == 0 and not self.records.through:
            return []
        store: list[Action] = [e.StoreWeights(link.index)] if self.reduces else []
        return [*store, e.Send(link.index, Kind.LEAVE, None, self.clock)]

    def _end(self, how: str, message: str = "") -> None:
        """The first ending holds."""
        self.ending = self.ending or WorkerEnding(how, message)


class ShardLinkState:
    """Of shard `index`, which listens at `address`."""

    def __init__(self, index: int, address: str) -> None:
        self.index, self.address = index, address
        self.requests = Requests()
        self.attempt = 0
        """Of the shard that welcomed this worker last; 0: none did."""
        self.welcomed = False
        self.released = 0
        """The newest snapshot that this shard has copied its part of."""
        self.waiting = ""
        """What it said last of why it does not answer."""
        self.since: float | None = None
        """When it was first looked for."""


def newest_attempt(found: Sequence[tuple[int, int]]) -> int:
    """Which of the processes that answer at one name is the newest: `found` are their (term, attempt)."""
    return max(range(len(found)), key=lambda at: (found[at], at))


class Requests:
    """Of one shard."""

    def __init__(self) -> None:
        self.outstanding: dict[int, Header] = {}
        """Pushes and pulls that wait for their answer, by number; what they carry can be gathered again until then."""
        self.unsent = 0
        """Requests of the clock in hand that are still to be made."""
        self.acked = 0
        """Clocks whose pushes have all been answered."""
        self.begun = False
        """Is that counted from where this worker began?"""
        self._number = 0
        self._clock = -1
        self._pushed: dict[int, Header] = {}
        """Every push of the newest clock, answered or not: a shard of a later attempt needs them all."""

    def number(self) -> int:
        """A number for a request."""
        self._number += 1
        return self._number

    def ask(self, header: Header) -> Header:
        """Note a request that is to be answered; the header with its number."""
        header = header._replace(request=self.number())
        self.outstanding[self._number] = header
        self.unsent -= 1
        if header.kind is not Kind.PULL:
            if header.clock != self._clock:
                self._clock, self._pushed = header.clock, {}
            self._pushed[self._number] = header
        return header

    def settle(self, number: int) -> bool:
        """A request is answered; is it the last one that was owed?"""
        request = self.outstanding.pop(number, None)
        if request is not None and not self.outstanding and not self.unsent and request.kind is not Kind.PULL:
            self.acked = request.clock + 1
        return not self.outstanding

    def attempt_rose(self) -> None:
        """Another attempt of the shard has come.

        What the attempt before answered of the open clock is lost with it; without it this clock would never be whole.
        """
        if (self._clock == self.acked and self.unsent) or self._pushed.keys() & self.outstanding.keys():
            self.outstanding |= self._pushed

    def again(self, complete: int, opened: Set[int], mode: ServedMode, reduces: bool) -> list[Header]:
        """What goes out again to a shard that has `complete` clocks, and of the next one the blocks `opened`, in order of its number.

        A push that the shard has is only asked for: as a PULL, or for rows as a LOOKUP of none.
        """
        return [self._anew(old, complete, opened, mode, reduces) for _, old in sorted(self.outstanding.items())]

    @staticmethod
    def _anew(old: Header, complete: int, opened: Set[int], mode: ServedMode, reduces: bool) -> Header:
        taken = old.kind is not Kind.PULL and (old.clock < complete or (old.clock == complete and old.block in opened))
        if not taken:
            return old
        version = (0, mode.version_for(old.clock))
        if old.kind is Kind.ROW_PUSH:
            return old._replace(kind=Kind.LOOKUP, flags=Flag.NONE, block=0, info=0, version=version)
        return old._replace(kind=Kind.PULL, flags=Flag.STORE if reduces else Flag.NONE, version=version)
