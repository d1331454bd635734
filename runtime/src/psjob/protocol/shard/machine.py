"""The control side of one shard as a state machine: setting up, restoring, serving, cutting, ending.

`handle` is all that it does. It knows no clock, socket, disk or thread: `psjob.shard.control` carries its actions out, and so does the
simulator of the protocol.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from psjob import contract, modes
from psjob.modes import ServedMode
from psjob.protocol.shard import actions as a
from psjob.protocol.shard import events as e
from psjob.protocol.shard import orders as o
from psjob.protocol.shard.actions import Action
from psjob.protocol.shard.cutting import Cutting
from psjob.protocol.shard.link import LinkState
from psjob.protocol.shard.phase import Phase

PROGRESS_SECONDS = 1.0
"""So often a shard that writes or reads says how far it is."""
FINISH_SECONDS = 2.0
"""A shard whose run is over stays so long for workers that come to hear it."""
STOP_SECONDS = 26.0
"""A shard that was asked to end waits so long for the coordinator's last cut."""


@dataclass
class Reading:
    """What is read, and for which recovery."""

    number: int
    order: o.Restore


class ShardMachine:
    """Of shard `index`, which serves in `mode`. `link` is None for shard 0: the coordinator is in its process."""

    def __init__(self, index: int, workers: int, view: int, mode: ServedMode, link: LinkState | None = None) -> None:
        self.index, self.view, self.mode, self.link = index, view, mode, link
        self.phase = Phase.BLANK
        self.recovery = self.generation = self.setup = 0
        self.final = False
        self.cutting = Cutting(workers)
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
            case e.TookUp():
                actions += self._take_up(event)
            case e.Misfit():
                actions += self._misfit(event.why, now)
            case e.Initialised() if self.phase is Phase.INIT:
                actions.append(a.Answer({"did": "initialised", "setup": self.setup}))
            case e.Marked():
                actions += self.cutting.marked(event.rank, event.cut)
            case e.Left():
                actions += self.cutting.left(event.rank)
            case e.Prepared():
                actions.append(a.Answer({"did": "prepared", "number": event.number}))
            case e.Armed() | e.TooLate() | e.Held() | e.Wrote() | e.Failed() | e.GaveUp() | e.Discarded():
                actions += self.cutting.result(event)
            case e.Placed():
                actions += self._placed(event)
            case e.Unread():
                actions += self._unread(event)
            case e.Stands():
                rows = [list(row) for row in event.rows]
                actions.append(a.Answer({"did": "where", "ask": event.ask, **_standing(event.standing), "rows": rows}))
            case e.RunIsOver():
                actions += self._finish(now)
            case e.Terminated():
                actions += self._stop(now)
        if self.link is not None and self.link.begun and self.link.stream is None:
            return [action for action in actions if not isinstance(action, a.Answer)]
        return actions

    # -- orders --------------------------------------------------------------------------------

    def _order(self, order: o.Order, now: float) -> list[Action]:
        match order:
            case o.SetUp():
                return self._set_up(order)
            case o.Restore():
                return self._restore(order)
            case o.Bound():
                return [a.SetMost(order.most)]
            case o.Open():
                return self._open(order)
            case o.Adopt():
                self.view = max(self.view, order.view)
                return [a.TakeView(self.view)]
            case o.Prepare():
                return self.cutting.prepare(order)
            case o.TakeCut():
                return self.cutting.order(order)
            case o.Void():
                return self.cutting.void(order.cut)
            case o.Committed():
                return self.cutting.committed()
            case o.Decide():
                return [a.CarryOut(order.body)] if self.phase is Phase.SERVING else []
            case o.Clip():
                return [a.Clip(order.body)] if self.phase is Phase.SERVING else []
            case o.Where():
                return [a.LookUp(order.ask, order.ranks)]
            case o.Finish():
                return self._finish(now)
            case o.Stop():
                return [a.Exit(contract.EXIT_RETRY)] if self.index else []
            case o.Fence():
                text = f"shard {self.index}: a newer process of this shard is here (view {order.view})"
                return [a.Exit(contract.EXIT_FENCED, text, order.view)]
            case o.Unknown():
                return [a.Log("warning", f"an order that this version does not know: {order.word}")]
            case o.Nothing():
                return []

    def _set_up(self, order: o.SetUp) -> list[Action]:
        actions = self.cutting.drop()
        self.cutting.begin()
        self.reading = self._held = None
        self.phase, self.view, self.setup = Phase.INIT, order.view, order.setup
        actions += [a.TakeView(self.view), *self._adopt(order.mode), a.LayOut(order.table, order.rule, order.tables)]
        return [*actions, a.DropSessions(rewind=False)]  # rank 0 may have sent its values already, to a set-up before this one

    def _restore(self, order: o.Restore) -> list[Action]:
        """Read a manifest. What is being read, or was read and not served, is not read again for another recovery."""
        actions = self.cutting.drop()
        adopted = self._adopt(order.mode)
        self.view, self.generation = order.view, self.generation + 1
        drop = a.DropSessions(bool(adopted) or self.mode.rewinds_together)
        if self._held is not None and not adopted and _same(self._held[0], order):
            placed = self._held[1]
            self._held = (order, placed)
            return [*actions, a.Reset(Phase.HELD, self.view, self.generation), drop, *self._tell_restored(order, placed)]
        self.phase, self._held = Phase.BLANK, None
        actions += [a.Reset(Phase.BLANK, self.view, self.generation), *adopted, drop]
        if self.reading is not None and not adopted and _same(self.reading.order, order):
            self.reading.order = order
            return actions
        self._readings += 1
        self.reading = Reading(self._readings, order)
        return [*actions, a.Read(self._readings, order.folder, order.manifest)]

    def _placed(self, event: e.Placed) -> list[Action]:
        if self.reading is None or self.reading.number != event.reading:
            return []
        order, self.reading = self.reading.order, None
        self.phase, self._held = Phase.HELD, (order, event)
        self.cutting.begin(event.left)
        return self._tell_restored(order, event)

    def _unread(self, event: e.Unread) -> list[Action]:
        if self.reading is None or self.reading.number != event.reading:
            return []
        order, self.reading = self.reading.order, None
        return [a.Answer({"did": "unrestored", "recovery": order.recovery, "why": event.why, "damaged": event.damaged})]

    def _tell_restored(self, order: o.Restore, placed: e.Placed) -> list[Action]:
        body = {"did": "restored", "recovery": order.recovery, **_standing(placed.standing), "complete": list(placed.complete)}
        return [a.SetFences(order.fences, order.most), a.Answer(body)]

    def _open(self, order: o.Open) -> list[Action]:
        if self.phase is Phase.BLANK:
            return [a.Log("warning", f"an order to serve view {order.view} came to a shard without blocks; it is left")]
        self.phase, self._held = Phase.SERVING, None
        self.view, self.recovery = order.view, order.recovery
        return [a.Serve(order.view, order.recovery)]

    def _take_up(self, event: e.TookUp) -> list[Action]:
        """To the others a stream broke: what this process says of itself is what the one before it said."""
        self.mode, self.phase = modes.read(event.mode), Phase.SERVING
        self.view, self.recovery, self.generation = event.view, event.recovery, event.generation
        self.cutting.begin(event.left)
        return [a.Serve(event.view, event.recovery)]

    def _adopt(self, mode: str) -> list[Action]:
        if mode == modes.written(self.mode):
            return []
        self.mode = modes.read(mode)
        return [a.AdoptMode(mode)]

    # -- the link, the clock -------------------------------------------------------------------

    def _hello(self, event: e.Connected) -> list[Action]:
        """Say hello. The coordinator has forgotten a cut that was in flight; what it has to hear is said again."""
        serving = self.phase is Phase.SERVING
        said: list[Action] = [
            a.Hello(event.stream, serving, self.view, self.recovery, modes.written(self.mode), event.carried),
            a.TellArrivals(),
        ]
        if self._stopping:
            said.append(a.Answer({"did": "stopping"}))
        return said + self.cutting.drop()

    def _misfit(self, why: str, now: float) -> list[Action]:
        """An order broke off: only a restore brings this shard to where the others are."""
        if self.link is not None and self.link.begun:
            return self.link.hang_up(why, now)
        return [a.Exit(1, why)] if self.index == 0 else [a.Log("warning", why)]

    def _tick(self, event: e.Tick, now: float) -> list[Action]:
        actions: list[Action] = []
        if self._ends is not None and now >= self._ends[0]:
            actions.append(a.Exit(self._ends[1]))
        doing: dict[str, Any] | None = None
        if self.reading is not None:
            doing = {"doing": "reading", "recovery": self.reading.order.recovery}
        elif self.cutting.writing is not None:
            doing = {"doing": "writing", "cut": self.cutting.writing}
        if doing is None:
            self._told = float("-inf")
        elif now - self._told >= PROGRESS_SECONDS:
            self._told = now
            actions.append(a.Answer({"did": "progress", **doing, "done": event.done, "total": event.total}))
        return actions

    # -- ending --------------------------------------------------------------------------------

    def _finish(self, now: float) -> list[Action]:
        """The final manifest is committed: workers hear it here too, then this shard may go."""
        self.final = True
        if self.index and self._ends is None:
            self._ends = (now + FINISH_SECONDS, contract.EXIT_DONE)
        return [a.TellFinished()]

    def _stop(self, now: float) -> list[Action]:
        if self.index == 0:
            return []  # its coordinator hears it
        self._stopping = True
        if self._ends is None:
            self._ends = (now + STOP_SECONDS, contract.EXIT_RETRY)
        return [a.Answer({"did": "stopping"})]


def _same(one: o.Restore, other: o.Restore) -> bool:
    return (one.folder, one.manifest) == (other.folder, other.manifest)


def _standing(found: e.Standing) -> Mapping[str, Any]:
    body = {"lo": found.lo, "hi": found.hi, "owned": found.owned, "stored": found.stored}
    return body | ({"stages": [[own.lo, own.hi, own.owned] for own in found.stages]} if found.stages else {})
