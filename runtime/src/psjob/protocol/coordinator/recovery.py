"""Bringing all shards and workers to one view: a new run's initialisation, restores, rewinds, and workers that join.

States. `reading`: the view is claimed, the newest manifest looked for. `electing`: not all shards are here. `fresh`: a new run waits for
rank 0. `initialising`: rank 0 sends its values. `restoring`: a manifest is looked for, then shards read it. `open`: training. `finished`.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from psjob import contract
from psjob.layout.blocks import Layout, assign
from psjob.modes import written
from psjob.protocol.coordinator import actions, events
from psjob.protocol.coordinator.beginning import Beginning
from psjob.protocol.coordinator.entrance import Entrance
from psjob.protocol.coordinator.events import CheckpointFacts, Stream
from psjob.protocol.coordinator.finding import Finding
from psjob.protocol.coordinator.joining import Joining
from psjob.wire.frame import Kind

if TYPE_CHECKING:
    from psjob.protocol.coordinator.machine import Coordinator

WAITING_SECONDS = 2.0


@dataclass
class ShardPeer:
    """A shard as the coordinator sees it; orders go down `link`."""

    link: int
    attempt: int
    serving: bool
    recovery: int
    mode: str
    """The one that it serves, as `modes.written` writes it."""
    carried: int | None
    """In a decided mode: the last order that it has carried out; None: one broke off."""


class Recovery:
    """The part that brings shards and workers to one view."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.c = coordinator
        self.view = coordinator.job.view
        self.recovery = self.view << 20
        """Number of the newest restore."""
        self.restores = 0
        """How often shard 0 was restored: what a worker that joined before one says is of steps that are undone."""
        self.state = "reading"
        self.peers: dict[int, ShardPeer] = {}
        self.initial = b""
        self.aliases: tuple[tuple[str, str], ...] = ()
        self.layout: Layout | None = None
        self.assignment: tuple[int, ...] = ()
        """Shard of each block."""
        self.tables: tuple[Mapping[str, Any], ...] = ()
        self.rule = ""
        """The shards' rule, once there is a model."""
        self.source: CheckpointFacts | None = None
        self.waiting: dict[int, Stream] = {}
        self.joining = Joining(self)
        self.finding = Finding(self)
        self.entrance = Entrance(self)
        self.beginning = Beginning(self)
        self._told = 0.0
        self.done: set[int] = set()
        """Shards that have what they were ordered to set up or restore,"""
        self.only: set[int] = set()
        """of these."""
        self.fences: dict[int, tuple[int, int]] = {}
        """By rank, the lowest incarnation that shards let in since the last restore."""
        self.told: dict[int, events.ShardRestored] = {}
        """What each shard said of itself when it was restored."""
        self._blank: set[int] = set()
        """Shards that must be restored, whatever they say that they serve."""
        self.sure = False
        """Has shard 0 all clocks that workers completed, so that they bound what other shards acknowledged?"""
        self._since = coordinator.now
        self._taken: events.TookUp | None = None
        """What shard 0 holds since before this process began."""

    @property
    def open(self) -> bool:
        """Is training on?"""
        return self.state == "open"

    @property
    def fresh(self) -> bool:
        """Does a new run wait for rank 0?"""
        return self.state == "fresh"

    @property
    def initialising(self) -> bool:
        """Does rank 0 give the run's first values?"""
        return self.state == "initialising"

    @property
    def restoring(self) -> bool:
        """Are shards brought back from a manifest?"""
        return self.state == "restoring"

    def take_up(self, event: events.TookUp) -> None:
        """Shard 0 serves already, from memory. If all others serve the same, to them only a stream broke."""
        self._taken = event
        self.view, self.recovery = max(self.view, event.view), max(self.recovery, event.recovery)
        self.c.cutting.cuts.number = max(self.c.cutting.cuts.number, event.cut)
        if event.clip is not None:
            self.c.norms.take_up(event.recovery, *event.clip)

    def begin(self) -> None:
        """Shard 0 has started: it is its own first peer."""
        self._since = self.c.now
        taken = self._taken
        serves = taken is not None
        self.peers[0] = ShardPeer(
            0, self.c.job.attempt, serves, 0 if taken is None else taken.recovery, "" if taken is None else taken.mode, 0
        )
        self.finding.claim()

    def begun(self) -> None:
        """What the newest manifest says of the job is known: go on with who has come meanwhile."""
        waiting, self.waiting = self.waiting, {}
        if self.state == "reading":
            self.enter("electing")
        for stream in waiting.values():
            if self.c.members[stream.rank].stream is stream:
                self.worker(stream)
        if self.state != "finished":
            self.gather()
        else:
            self.order_all({"do": "finish"})

    # -- shards --------------------------------------------------------------------------------

    def shard(self, hello: events.ShardHello) -> None:
        """A shard says hello on a new stream."""
        index, known = hello.index, self.peers.get(hello.index)
        if known is not None and hello.attempt < known.attempt:
            self.c.emit(actions.Order(hello.link, {"do": "fenced", "view": self.view}))
            return
        if known is not None and hello.attempt > known.attempt:  # it may live on behind a node that is cut off, and workers with it
            self.c.emit(actions.Order(known.link, {"do": "fenced", "view": max(self.view, hello.view)}))
        peer = ShardPeer(hello.link, hello.attempt, hello.serving, hello.recovery, hello.mode, hello.carried)
        self.peers[index] = peer
        self._blank.discard(index)
        self.c.cutting.drop(f"shard {index} has connected again")
        if hello.view > self.view:
            self._rise(hello.view)
        if self.state == "finished":
            self.order(index, {"do": "finish"})
        elif self.state == "reading":
            return
        elif not self.open or len(self.peers) < self.c.job.shards:
            self.gather()
        elif (missed := self._missed(index, peer)) is None:
            self._restore({index})
        else:
            for body in ({"do": "adopt", "view": self.view}, *missed, *self.joining.unanswered(index), *self.c.cutting.unprepared(index)):
                self.order(index, body)

    def _missed(self, index: int, peer: ShardPeer) -> list[Mapping[str, Any]] | None:
        """The orders that a shard which serves has lost with its stream; None: only a restore brings it to where the others are."""
        mode = self.c.mode
        if not peer.serving or (mode.rewinds_together and peer.recovery != self.recovery) or peer.mode != written(mode):
            return None
        return [] if self.c.deciding is None else self.c.deciding.missed(index, peer.carried)

    def announced(self, view: int) -> None:
        """A shard that is still starting tells of a higher view: rewind the workers while it imports and restores."""
        if view > self.view and self.state != "finished":
            self._rise(view)
            if self.open and self.c.mode.rewinds_together:
                self.c.cutting.drop("a shard starts again")  # it would commit steps that are undone
                self.enter("electing")
                self._rewind_workers()

    def lost(self, index: int, link: int) -> None:
        """The stream of a shard ended; it may still serve its workers."""
        peer = self.peers.get(index)
        if peer is not None and peer.link == link:
            self.c.cutting.drop(f"shard {index} is out of reach")

    def order(self, index: int, body: Mapping[str, Any]) -> None:
        """Order one shard."""
        self.c.emit(actions.Order(self.peers[index].link, body))

    def order_all(self, body: Mapping[str, Any], but: Set[int] = frozenset()) -> None:
        """Order all shards, shard 0 last: it carries an order out at once."""
        for index in sorted(self.peers, reverse=True):
            if index not in but:
                self.order(index, body)

    def restored(self, event: events.ShardRestored) -> None:
        """A shard has read what it was ordered to."""
        if self.restoring and not self.finding.looking and event.recovery == self.recovery:
            self.done.add(event.shard)
            self.told[event.shard] = event
            if self.done >= self.only:
                self.open_all()

    def unrestored(self, event: events.Unrestored) -> None:
        """A shard could not read what it was ordered to."""
        if self.restoring and not self.finding.looking and event.recovery == self.recovery and self.source is not None:
            self.enter("electing")
            self.finding.unreadable(self.source, event)

    # -- workers -------------------------------------------------------------------------------

    def worker(self, stream: Stream) -> None:
        """A worker said hello: welcome it, make it rewind, or let it wait."""
        if self.state == "finished":
            self.c.emit(actions.Tell(stream.id, Kind.FINISHED))
            self.c.completion.came_back(stream)
            return
        if self.state == "reading":
            self.waiting[stream.rank] = stream  # it is looked at when it is known what the job is
            return
        if self.entrance.refused(stream):
            return
        if self.entrance.behind(stream):
            self.rewind(stream.id)
            return
        if self.open:
            self.joining.join(stream)
            self.joining.ask(self.c.now)
            return
        self.waiting[stream.rank] = stream
        if self.state in ("fresh", "initialising") and stream.rank == 0:
            self.beginning.ask()

    def tick(self, now: float) -> None:
        """Tell those who wait what for; try again what failed."""
        self.finding.tick(now)
        self.joining.ask(now)
        if now - self._told < WAITING_SECONDS:
            return
        self._told = now
        reason = self.reason(now)
        for stream in self.waiting.values():
            self.c.emit(actions.Tell(stream.id, Kind.WAITING, {"reason": reason}))

    def reason(self, now: float) -> str | None:
        """Why nothing goes on, or None while training."""
        seconds = round(now - self._since)
        if self.finding.waits_for is not None:
            return self.finding.waits_for
        if self.state == "electing":
            missing = [i for i in range(self.c.job.shards) if i not in self.peers]
            return f"shards {missing} have not come, for {seconds} s" if missing else None
        if self.state == "fresh":
            return f"worker 0 has not attached its model, for {seconds} s"
        if self.finding.looking:
            return f"the newest checkpoint is looked for, for {seconds} s"
        if self.state in ("initialising", "restoring"):
            waiting = sorted(self.only - self.done)
            if self.initialising and not waiting:
                return f"the checkpoint of step 0 is not written yet, for {seconds} s"
            return f"shards {waiting} are {self.state}, for {seconds} s"
        return None

    # -- steps ---------------------------------------------------------------------------------

    def gather(self) -> None:
        """Go on once every shard is here and the view is claimed."""
        self.finding.stop()
        self.enter("electing")
        if len(self.peers) < self.c.job.shards or not self.finding.claimed:
            return
        if self.source is None and not any(p.serving for p in self.peers.values()):
            self.enter("fresh")
            self.beginning.ask()
            return
        self._restore(set())

    def lay_out(self, layout: Layout) -> None:
        """The parameters' blocks, and where they lie."""
        if layout != self.layout:
            self.layout, self.assignment = layout, assign(layout, self.c.job.shards)

    def is_good(self, made: CheckpointFacts) -> None:
        """A manifest was written anew."""
        self.finding.is_good(made)

    def rewind_all(self, why: str) -> None:
        """Everyone goes back to the last manifest; no shard was lost."""
        self.c.log("info", f"all rewind: {why}")
        self.c.cutting.drop("all rewind")
        self._restore(set(self.peers))

    def _restore(self, blank: set[int]) -> None:
        """Bring shards back from the newest manifest, once that is found."""
        self._blank |= blank
        self.c.cutting.drop("shards are restored")
        self.c.cutting.moved = {}
        self.enter("restoring")
        self.done, self.only = set(), set(self.peers)
        self.finding.look()

    def together(self) -> bool:
        """Must all shards be restored: in sync, after a change of mode, and where none serves?"""
        peers, mode = self.peers.values(), written(self.c.mode)
        other = any(p.serving and p.mode != mode for p in peers)
        return self.c.mode.rewinds_together or other or not any(p.serving for p in peers)

    def reads_records(self) -> bool:
        """Will workers be placed by what the manifest has of them?"""
        return self.together() or 0 in self._blank or not self.peers[0].serving

    def restore_from(self, found: CheckpointFacts, records: Mapping[int, bytes], initial: bytes) -> None:
        """Bring shards back from this manifest: all of them in sync, in async only those that lost their blocks."""
        c = self.c
        self.source = found
        taken, self._taken = self._taken, None
        if taken is not None and self._serve_all(taken, found):
            self._go_on(taken, found, initial)
            return
        together = self.together()
        self.only = set(self.peers) if together else self._blank | {i for i, p in self.peers.items() if not p.serving}
        self._blank, self.told, self.done = set(), {}, set()
        if not self.only:
            self.open_all()
            return
        whole = together or self.only == set(self.peers)
        self.recovery += 1
        self.restores += 0 in self.only
        saved = found.workers
        if found.run != c.job.run:  # another run's processes say nothing about this one's
            saved = tuple(type(worker)(worker.clock, left=worker.left, record=worker.record) for worker in saved)
        self.lay_out(found.layout)
        self.tables, self.rule, self.aliases = found.tables, found.rule, found.aliases
        self.initial = initial or self.initial
        if whole:
            self._rewind_workers()
            c.members.rewound(saved, records)
            c.progress.rewound(found.step)
        elif 0 in self.only:
            c.members.rewound(saved, records)
        self.fences = c.members.fences(set(self.waiting)) if together else {}
        self._order_restores(found)

    def _serve_all(self, taken: events.TookUp, found: CheckpointFacts) -> bool:
        """Does every shard serve what shard 0 had served, and does a checkpoint hold the end of each worker that has left?

        The last record of a worker that has left since may be lost with the process.
        """
        ended = all(worker.left is None or found.workers[rank].left is not None for rank, worker in enumerate(taken.workers))
        same = taken.recovery == self.recovery and taken.mode == written(self.c.mode) and taken.layout == found.layout
        peers = self.peers.values()
        return ended and same and not self._blank and all(p.serving and (p.recovery, p.mode) == (taken.recovery, taken.mode) for p in peers)

    def _go_on(self, taken: events.TookUp, found: CheckpointFacts, initial: bytes) -> None:
        """Nobody goes back: workers say hello again, and are let in where they stand."""
        c = self.c
        self.lay_out(found.layout)
        self.tables, self.rule, self.aliases = found.tables, found.rule, found.aliases
        self.initial = initial or self.initial
        c.members.took_up(taken.workers)
        self.told, self.done, self.only = {}, set(), set()
        c.log("info", f"all shards serve on at view {self.view}; no worker begins again")
        self.order_all({"do": "adopt", "view": self.view})
        self._let_in()
        c.norms.go_on()

    def _order_restores(self, found: CheckpointFacts) -> None:
        c = self.c
        # What a lost shard had answered of a worker's open clock, this one may not have whole; nobody begins another without it.
        # Where shard 0 is restored too, or was before, its own clocks may lag behind.
        self.sure = 0 not in self.only and c.job.attempt == 1 and (bool(self.tables) or 0 in self.assignment)
        body = {
            "do": "restore", "view": self.view, "recovery": self.recovery, "folder": found.folder, "manifest": found.name,
            "mode": written(c.mode), "fences": {str(rank): list(fence) for rank, fence in self.fences.items()}, "most": {},
        }  # fmt: skip
        for index, peer in self.peers.items():
            if index in self.only:
                peer.serving = False
                c.emit(actions.Order(peer.link, body, self.sure))
            else:
                self.order(index, {"do": "adopt", "view": self.view})

    def open_all(self) -> None:
        """Every shard has what it serves: training goes on."""
        c = self.c
        if c.deciding is not None and self.source is not None:
            c.deciding.begin(self.source.step, self.source.workers)
        for index, peer in self.peers.items():
            peer.serving, peer.recovery, peer.mode = True, self.recovery, written(c.mode)
            self.order(index, {"do": "open", "view": self.view, "recovery": self.recovery})
        self._let_in()

    def _let_in(self) -> None:
        """Training is on: who waits joins."""
        c = self.c
        self.enter("open")
        c.cutting.cuts.restart(c.progress.step, c.now)
        waiting = {**self.joining.opened(self.told, len(self.peers)), **self.waiting}
        self.waiting = {}
        for stream in waiting.values():
            member = c.members[stream.rank]
            if member.stream is not stream or not self.open:
                continue
            if self.entrance.behind(stream):  # it was told so before, and may not be gone yet
                self.rewind(stream.id)
            elif not self.entrance.refused(stream):  # it may have come before there was a model
                self.joining.join(stream)
        self.joining.ask(c.now)

    def _rise(self, view: int) -> None:
        self.view = view
        self.recovery = max(self.recovery, view << 20)
        self.finding.claim()

    def rewind(self, stream: int) -> None:
        """Let a worker begin again in the mode of this job."""
        self.c.emit(actions.Tell(stream, Kind.REWIND, {"mode": written(self.c.mode)}))
        self.c.emit(actions.HangUp(stream))

    def _rewind_workers(self) -> None:
        for member in self.c.members.all.values():
            if member.stream is None or not member.here:
                continue
            if member.welcomed:
                self.rewind(member.stream.id)
                member.welcomed = False
            else:
                self.waiting[member.rank] = member.stream

    def enter(self, state: str) -> None:
        """Go over to another state."""
        if state != self.state:
            self._since = self.c.now
        self.state = state

    def finish(self) -> None:
        """The run has its final manifest."""
        self.state = "finished"
        self.finding.stop()

    def leave_lost(self, why: str) -> None:
        """No checkpoint is left to go on from, though there was one."""
        self.c.emit(actions.Leave(contract.EXIT_CHECKPOINT_LOST, why))
