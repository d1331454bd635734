"""How far one cut of a shard has come. At most one is in flight, and at most one writer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from psjob.protocol.shard import events as e
from psjob.protocol.shard.actions import Action, Answer, AskRecords, Discard, GiveUp, Hold, MakeReady, NoteLeft, Release, Write
from psjob.protocol.shard.orders import Prepare, TakeCut


class Stage(Enum):
    """How far a cut is."""

    MARKING = "marking"
    """Some live workers have not marked."""
    HOLDING = "holding"
    WRITING = "writing"


@dataclass
class ShardCut:
    """The cut in flight. `missing` are workers whose mark it waits for."""

    order: TakeCut
    stage: Stage
    missing: set[int]
    ready: bool = False

    @property
    def number(self) -> int:
        """The cut's number."""
        return self.order.cut


class Cutting:
    """Decides what is held, written, given up and deleted. `workers` is how many ranks the job has."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self.live: set[int] = set(range(workers))
        """Ranks that have not left."""
        self.cut: ShardCut | None = None
        self._writer: int | None = None
        """The cut whose writer runs; it may have been given up."""
        self._next: TakeCut | None = None
        """A cut that begins when that writer, whose cut was given up, has stopped."""
        self._unsettled: set[int] = set()
        """Cuts that were written and are neither committed nor void, as far as this shard knows."""

    @property
    def writing(self) -> int | None:
        """The cut that is being written, or waits for the disk."""
        if self._next is not None:
            return self._next.cut
        return self.cut.number if self.cut is not None and self.cut.stage is Stage.WRITING else None

    def begin(self, left: Iterable[int] = ()) -> None:
        """Blocks were set up or restored: all ranks but `left` are live."""
        self.live = set(range(self._workers)) - set(left)

    def prepare(self, order: Prepare) -> list[Action]:
        """Memory for the next cut; who holds or writes one has it already."""
        if self.cut is not None or self._writer is not None:
            return [Answer({"did": "prepared", "number": order.number})]
        return [MakeReady(order.number, order.base)]

    def order(self, order: TakeCut) -> list[Action]:
        """Begin a cut. One that is still in flight is given up: the coordinator has forgotten it."""
        actions = self._settle(order)
        actions += self.drop()
        if self._writer is not None:
            if order.clocks is not None:  # decisions come before that writer has stopped, and blocks would hold more than these clocks
                why = f"the files of cut {self._writer} are still being given up"
                return [*actions, Answer({"did": "late", "cut": order.cut, "why": why})]
            self._next = order
            return actions
        actions += [AskRecords(order.step), *(NoteLeft(rank, clock) for rank, clock in sorted(order.left.items()))]
        self.live -= set(order.left)
        marks = order.marks and order.step < 0
        self.cut = ShardCut(order, Stage.MARKING if marks else Stage.HOLDING, set(self.live) if marks else set())
        if order.step >= 0:
            return [*actions, self._hold(order)]
        self.cut.ready = True
        actions.append(Answer({"did": "ready", "cut": order.cut}))
        return actions + self._hold_if_marked()

    def marked(self, rank: int, cut: int) -> list[Action]:
        """A worker holds its pushes; a mark that no cut waits for is released at once."""
        if self.cut is None or self.cut.number != cut or self.cut.stage is not Stage.MARKING:
            return [Release(cut)]
        self.cut.missing.discard(rank)
        return self._hold_if_marked()

    def left(self, rank: int) -> list[Action]:
        """A worker has left: no cut waits for its mark."""
        self.live.discard(rank)
        if self.cut is None or self.cut.stage is not Stage.MARKING:
            return []
        self.cut.missing.discard(rank)
        return self._hold_if_marked()

    def result(self, event: e.Armed | e.TooLate | e.Held | e.Wrote | e.Failed | e.GaveUp | e.Discarded) -> list[Action]:
        """What came of an action."""
        if isinstance(event, e.Discarded):
            return [Answer({"did": "voided", "cut": event.cut})]
        if isinstance(event, (e.Wrote, e.Failed, e.GaveUp)) and self._writer == event.cut:
            self._writer = None
            if self._next is not None:
                following, self._next = self._next, None
                return self.order(following)
        cut = self.cut
        if cut is None or cut.number != event.cut:
            return []
        match event:
            case e.Armed():
                return self._tell_ready(cut)
            case e.TooLate():
                self.cut = None
                why = f"blocks are at {event.furthest}, beyond {cut.order.step}"
                return [GiveUp(cut.number), AskRecords(-1), Answer({"did": "late", "cut": cut.number, "why": why})]
            case e.Held() if cut.stage is Stage.HOLDING:
                cut.stage = Stage.WRITING
                self._writer = cut.number
                ready = self._tell_ready(cut)
                return [*ready, Answer({"did": "held", "cut": cut.number}), Release(cut.number), Write(cut.number)]
            case e.Wrote():
                self.cut = None
                self._unsettled.add(cut.number)
                return [Answer({"did": "written", "cut": cut.number, **event.body})]
            case e.Failed():
                self.cut = None
                return [AskRecords(-1), Answer({"did": "unwritten", "cut": cut.number, "why": event.why, "full": event.full})]
            case e.GaveUp():  # blocks were replaced under the writer
                return self.drop()
        return []

    def void(self, number: int) -> list[Action]:
        """The coordinator gives a cut up: nothing of it may stay."""
        self._unsettled.discard(number)
        if self._next is not None and self._next.cut == number:
            self._next = None
        if self.cut is not None and self.cut.number == number:
            return self.drop()
        return [AskRecords(-1), Discard(number)]

    def drop(self) -> list[Action]:
        """Give up the cut in flight."""
        cut, self.cut, self._next = self.cut, None, None
        if cut is None:
            return []
        return [AskRecords(-1), GiveUp(cut.number), Release(cut.number), Discard(cut.number)]

    def committed(self) -> list[Action]:
        """A manifest names what this shard wrote last."""
        self._unsettled.clear()
        return [AskRecords(-1)]

    def _settle(self, order: TakeCut) -> list[Action]:
        """Files of cuts after the one that the newest manifest holds are nobody's: their void was lost with a stream."""
        base, unsettled = order.base, self._unsettled
        self._unsettled = set()
        return [] if base is None else [Discard(number) for number in sorted(unsettled) if base < number < order.cut]

    def _hold(self, order: TakeCut) -> Hold:
        return Hold(order.cut, order.step, order.base, order.clocks)

    def _hold_if_marked(self) -> list[Action]:
        cut = self.cut
        if cut is None or cut.missing:
            return []
        cut.stage = Stage.HOLDING
        return [self._hold(cut.order)]

    def _tell_ready(self, cut: ShardCut) -> list[Action]:
        if cut.ready:
            return []
        cut.ready = True
        return [Answer({"did": "ready", "cut": cut.number})]
