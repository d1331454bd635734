"""Carrying a cut out: ordered to all shards, followed by what they tell, committed once all of it is written."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from psjob.protocol.coordinator import actions, events
from psjob.protocol.coordinator.assembly import Inconsistent, assemble
from psjob.protocol.coordinator.members import Member
from psjob.protocol.coordinator.schedule import SILENCE_SECONDS, Cut, Cuts
from psjob.wire.frame import Kind

if TYPE_CHECKING:
    from psjob.protocol.coordinator.machine import Coordinator

PATIENCE_SECONDS = 10.0
"""A worker that is away for less, and a cut that waits for less, is not told of."""
TOLD_RANKS = 8


class Cutting:
    """`base` is the cut that the newest manifest of this coordinator holds: what has not changed since need not be written again."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.c = coordinator
        job = coordinator.job
        places = coordinator.mode.marks() or coordinator.mode.decided  # it is taken where the workers are, not at a step ahead of them
        ahead = job.apart or coordinator.mode.ahead
        self.cuts = Cuts(job.interval if job.checkpoints else None, job.every if job.checkpoints else None, places, job.view, ahead)
        self.base: int | None = None
        self.moved: dict[int, events.BytesMoved] = {}
        """By shard: how far it has written the cut in flight, or read the restore."""
        self._away_since: float | None = None
        self._voided: dict[int, set[int]] = {}
        """By cut that was given up: the shards that have nothing of it any more."""
        self._tries = 0
        """Cuts in a row that came to nothing."""
        self._full: tuple[str, float] | None = None
        """Why there is no room, and how often it is tried."""

    # -- ordering ------------------------------------------------------------------------------

    def begin(self, final: bool = False, stop: bool = False, still: bool = False) -> None:
        """Order the next cut; nothing where it would be in vain."""
        c, now = self.c, self.c.now
        if self.cuts.marks and c.members.missing and not (final or stop or still):
            self._away(now)  # the others would hold their pushes for a cut that cannot be
            return
        self._away_since = None
        still = still or c.mode.decided  # between two orders no block moves
        cut = self.cuts.begin(c.furthest, now, final, stop, still, self.last_reachable if stop else math.inf)
        cut.request = c.switching.request
        self.moved = {}
        if stop:
            self.stop_at(cut, cut.step or 0)
        held = {"left": {str(m.rank): m.left_at for m in c.members.all.values() if m.left_at is not None}}
        if c.deciding is not None and c.recovery.open:
            held = c.deciding.hold(cut)
        step = -1 if cut.step is None else cut.step
        c.recovery.order_all({"do": "cut", "cut": cut.number, "step": step, "marks": cut.marks, "base": self.base, **held})

    @property
    def last_reachable(self) -> float:
        """The last step that a cut can be named at, if no worker that is gone comes back: none makes a step without the others' pushes."""
        missing = self.c.members.missing
        return math.inf if self.cuts.marks else min((self.c.members[rank].clock for rank in missing), default=math.inf)

    def _away(self, now: float) -> None:
        if self._away_since is None:
            self._away_since = now
        if now - self._away_since > PATIENCE_SECONDS:
            away = listed(self.c.members.missing)
            self.c.progress.checkpoint_problem = f"workers {away} are not here, and a checkpoint needs the mark of each"

    def prepare(self) -> dict[str, Any]:
        """The order to make memory ready."""
        return {"do": "prepare", "number": self.cuts.number, "base": self.base}

    def unprepared(self, index: int) -> list[dict[str, Any]]:
        """What a shard on a new stream is ordered again, where the next cut waits for its memory."""
        return [] if self.cuts.prepared is None or index in self.cuts.prepared else [self.prepare()]

    def stop_at(self, cut: Cut, step: int) -> None:
        """Workers that stand still go on to `step` and end there, with this cut."""
        cut.stop = True
        self.c.tell_all(Kind.STOP, clock=step)

    def ask_mark(self, member: Member) -> None:
        """A worker that comes while the others hold for a marked cut must mark too."""
        cut = self.cuts.current
        if cut is not None and cut.marks and member.rank not in cut.pins and len(cut.ready) == self.c.job.shards and member.stream:
            self.c.emit(actions.Tell(member.stream.id, Kind.MARK, request=cut.number))

    # -- giving up -----------------------------------------------------------------------------

    def void(self, why: str, again: Callable[[float], object], tell: bool = True) -> None:
        """Give the cut in flight up, unless its manifest is being written. `tell`: the user is to know at once, not at the second time."""
        cut, c = self.cuts.current, self.c
        if cut is None or cut.committing:
            return
        c.log("info", f"checkpoint {cut.number} is void: {why}")
        self._tries += 1
        if tell or self._tries > 1:
            c.progress.checkpoint_problem = why
        self._voided = {number: told for number, told in self._voided.items() if number > cut.number - 8} | {cut.number: set()}
        c.recovery.order_all({"do": "void", "cut": cut.number})
        if cut.marks:
            c.tell_all(Kind.RELEASE, request=cut.number)
        again(c.now)

    def drop(self, why: str) -> None:
        """A cut in flight is void; when the next one is due stays as it was."""
        self.void(why, lambda now: self.cuts.drop(), tell=False)

    def stream_ended(self, member: Member) -> None:
        """A worker's stream is gone: its mark may not have come to every shard, and others hold for it."""
        cut = self.cuts.current
        if cut is not None and cut.marks and member.left_at is None and len(cut.held) < self.c.job.shards:
            self.drop(f"worker {member.rank} went away before all shards had its mark")

    def passed(self, member: Member, clock: int) -> None:
        """A worker is beyond the step of a cut: where its record for that is not here, it will not come."""
        cut = self.cuts.current
        if cut is None or cut.step is None or cut.final or cut.clocks is not None:
            return
        if clock > cut.step and cut.step not in member.records:
            self.void(f"worker {member.rank} went beyond step {cut.step} without a record of it", self.cuts.failed)

    def tick(self, now: float) -> None:
        """Give up what nobody tells of any more, or what others have waited for too long; tell what a cut waits for."""
        cut = self.cuts.current
        if cut is None or cut.committing:
            return
        silent = cut.silent(now)
        if silent is not None:
            self.void(f"shard {silent} has not reported on its writing for {SILENCE_SECONDS:.0f} s", self.cuts.failed)
        elif self.cuts.expired(now):
            late = listed({m.rank for m in self.c.members.live()} - cut.pins.keys())
            self.void(f"workers {late} did not come to the end of their step while others held their pushes for it", self.cuts.timed_out)
        elif now - cut.began > PATIENCE_SECONDS and self.c.progress.checkpoint_problem is None and cut.lacking:
            self.c.progress.checkpoint_problem = f"a checkpoint waits for the records of workers {listed(cut.lacking)}"

    # -- what shards tell ----------------------------------------------------------------------

    def heard(self, event: events.Event) -> bool:
        """An answer to do with cuts; False where it is of something else."""
        cut = self.cuts.current
        match event:
            case events.MemoryReady():
                if self.cuts.prepared is not None:
                    self.cuts.prepared.add(event.shard)
            case events.CutVoided():
                self._is_gone(event)
            case events.BytesMoved():
                self._moved(event)
            case events.CutReady() | events.CutLate() | events.CutHeld() | events.CutUnwritten() | events.CutWritten():
                if cut is not None and event.cut == cut.number and not cut.committing:
                    self._of(cut, event)
            case _:
                return False
        return True

    def _of(self, cut: Cut, event: events.CutReady | events.CutLate | events.CutHeld | events.CutUnwritten | events.CutWritten) -> None:
        shard, now = event.shard, self.c.now
        match event:
            case events.CutLate():
                self.void(event.why, self.cuts.late, tell=False)
                return
            case events.CutUnwritten():
                self.failed(f"shard {shard}: {event.why}", event.full)
                return
            case events.CutHeld():
                cut.held[shard] = now
            case events.CutWritten():
                cut.held[shard] = now
                cut.written[shard] = event
        cut.ready.add(shard)
        if cut.marks and cut.asked is None and len(cut.ready) == self.c.job.shards:
            cut.asked = now
            for member in self.c.members.all.values():
                if member.here:
                    self.ask_mark(member)
        self.try_commit()

    def _moved(self, event: events.BytesMoved) -> None:
        cut = self.cuts.current
        if event.writing and cut is not None and event.number == cut.number:
            cut.held[event.shard] = self.c.now
        elif event.writing or event.number != self.c.recovery.recovery:
            return
        self.moved[event.shard] = event

    def _is_gone(self, event: events.CutVoided) -> None:
        told = self._voided.get(event.cut)
        if told is None:
            return
        told.add(event.shard)
        if len(told) == self.c.job.shards:
            del self._voided[event.cut]
            self.c.emit(actions.SweepOrphans(self.c.recovery.view, event.cut + 1))

    # -- committing ----------------------------------------------------------------------------

    def recorded(self, member: Member) -> None:
        """A worker's record came."""
        cut = self.cuts.current
        if cut is not None and cut.lacking is not None:
            clock = cut.pins.get(member.rank, member.clock) if cut.step is None else cut.step
            if clock in member.records:
                cut.lacking.discard(member.rank)
        self.try_commit()

    def left(self, member: Member) -> None:
        """A worker has left: no record of it is waited for."""
        cut = self.cuts.current
        if cut is not None and cut.lacking is not None:
            cut.lacking.discard(member.rank)

    def try_commit(self) -> None:
        """Commit once every shard has written and every worker's record for the cut is here."""
        cut, c = self.cuts.current, self.c
        if cut is None or cut.committing or len(cut.written) < c.job.shards:
            return
        if cut.clocks is not None:
            if c.deciding is not None and not cut.final and not c.deciding.complete(cut):
                return
        elif not cut.final:
            if cut.lacking is None:
                cut.lacking = c.members.missing_records(cut.step, cut.pins)
            # at step 0 of a new run nobody has asked for a batch yet
            if cut.lacking and not (c.recovery.initialising and all(not c.members[rank].records for rank in cut.lacking)):
                return
        try:
            made = assemble(c, cut)
        except Inconsistent as problem:
            self.failed(str(problem), False)
            return
        cut.committing = True
        c.emit(made)

    def committed(self, event: events.ManifestCommitted) -> None:
        """A cut is a checkpoint: what waited for it goes on."""
        c, cut, made = self.c, self.cuts.current, event.made
        self.base, self._tries, self._full = event.cut, 0, None
        c.progress.checkpoint_problem = None
        c.progress.committed += made.step > 0
        c.adopt(made)
        self.moved = {}
        c.recovery.is_good(made)
        if cut is None or cut.number != event.cut:
            return
        if c.recovery.source is None:
            c.recovery.beginning.first_committed(made)
        self.cuts.committed(made.step, c.now)
        if c.deciding is not None:
            c.deciding.over()
        c.completion.committed(cut, made)
        c.switching.committed(cut, made)

    def uncommitted(self, event: events.ManifestUncommitted) -> None:
        """A cut did not become a checkpoint."""
        cut = self.cuts.current
        if cut is not None and cut.number == event.cut:
            cut.committing = False
            self.failed(event.why, event.full)
            self.c.recovery.beginning.ask()

    def failed(self, why: str, full: bool) -> None:
        """The cut in flight cannot be written: for want of room, checkpoints pause; else it is tried again soon."""
        if not full:
            self.void(why, self.cuts.failed)
            return
        delay = 0.0

        def pause(now: float) -> None:
            nonlocal delay
            delay = self.cuts.full(now)

        self.void(why, pause)
        self._full = why, delay
        self._tell_full(None)
        self.c.emit(actions.MeasureRoom())

    def measured(self, event: events.RoomMeasured) -> None:
        """How much room there is, where that was asked for."""
        if self._full is not None:
            self._tell_full(event.free)

    def _tell_full(self, free: int | None) -> None:
        assert self._full is not None
        why, delay = self._full
        c = self.c
        whole = [told.total for told in self.moved.values() if told.writing]
        last = (c.progress.checkpoint or {}).get("bytes")
        needed = sum(whole) if len(whole) == c.job.shards else last
        numbers = [f"a checkpoint needs about {needed} bytes" if needed else "", "" if free is None else f"{free} are free"]
        said = ", ".join(part for part in numbers if part)
        c.progress.checkpoint_problem = (
            f"checkpoints pause, the volume of {c.job.folder} is full{': ' if said else ''}{said}; "
            f"free space or ask for a larger one; the next try is in {delay:.0f} s ({why})"
        )

    # -- what is told --------------------------------------------------------------------------

    def told(self) -> dict[str, Any] | None:
        """`checkpointProgress` of the status port: what is written, or read, and how far; None where nothing is."""
        cut = self.cuts.current
        moved = dict(self.moved)
        if not moved or (cut is None and not self.c.recovery.restoring):
            return None
        done = {} if cut is None else dict(cut.written)
        shards = [
            {"index": i, "doing": "writing" if m.writing else "reading", "done": m.total if i in done else m.done, "total": m.total}
            for i, m in sorted(moved.items())
        ]
        return {
            "doing": "reading" if cut is None else "writing",
            "shards": shards,
            "done": sum(int(str(shard["done"])) for shard in shards),
            "total": sum(int(str(shard["total"])) for shard in shards),
        }


def listed(ranks: set[int]) -> str:
    """Ranks for a sentence: the first ones, and how many more there are."""
    first = sorted(ranks)[:TOLD_RANKS]
    return f"{first}" + (f" and {len(ranks) - TOLD_RANKS} more" if len(ranks) > TOLD_RANKS else "")
