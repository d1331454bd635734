"""The coordinator as a pure machine: it knows the members and their records, brings all shards to one view, cuts, and ends the job.

Events and the time go in, actions come out. Its parts stand beside it, one idea each, and speak to each other through it. Every order
goes to every shard the same way; shard 0 is only the one that answers without a network.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psjob.modes import written
from psjob.protocol.coordinator import actions, events
from psjob.protocol.coordinator.actions import Action, Log, Tell
from psjob.protocol.coordinator.completion import Completion
from psjob.protocol.coordinator.consistency import Told
from psjob.protocol.coordinator.cutting import Cutting
from psjob.protocol.coordinator.deciding import Deciding
from psjob.protocol.coordinator.events import CheckpointFacts, Event, JobFacts, Stream
from psjob.protocol.coordinator.hanging import Hanging
from psjob.protocol.coordinator.members import Member, Members
from psjob.protocol.coordinator.norms import Norms
from psjob.protocol.coordinator.recovery import Recovery
from psjob.protocol.coordinator.report import JobProgress, StageReport
from psjob.protocol.coordinator.switching import Switching
from psjob.wire.frame import Kind

CLAIM_SECONDS = 5.0
"""From one look for a successor's claim to the next."""


class Coordinator:
    """Of one run, in one start of shard 0. `now` is monotonic seconds, and never falls."""

    def __init__(self, job: JobFacts, now: float = 0.0) -> None:
        self.job, self.now = job, now
        self.mode = job.mode
        self.furthest = 0
        """The highest step that shard 0 has seen."""
        self.members = Members(job.workers)
        self.progress = JobProgress()
        self.deciding = Deciding(self) if self.mode.decided else None
        self.norms = Norms(self)
        self.cutting = Cutting(self)
        self.recovery = Recovery(self)
        self.completion = Completion(self)
        self.switching = Switching(self)
        self.hanging = Hanging(self)
        self.stages = StageReport(job, self.members)
        self.ended = False
        """This process was told to end: nothing is decided any more."""
        self._looked = now
        self._looking = False
        self._out: list[Action] = []

    def handle(self, event: Event, now: float) -> list[Action]:
        """What is to be done about `event`, in order."""
        self._out = []
        if not self.ended:
            self.now = max(self.now, now)
            self._handle(event)
        return self._out

    # -- what the parts use ----------------------------------------------------------------------

    def emit(self, action: Action) -> None:
        """Do this, after what was said before. Nothing follows the end of the process."""
        if not self.ended:
            self._out.append(action)
            self.ended = isinstance(action, actions.Leave | actions.LeaveFenced)

    def log(self, level: str, text: str) -> None:
        """Write a line."""
        self.emit(Log(level, text))

    def tell(self, rank: int, kind: Kind, **fields: Any) -> None:
        """Tell a worker that has said hello."""
        stream = self.members[rank].stream
        if stream is not None:
            self.emit(Tell(stream.id, kind, **fields))

    def tell_all(self, kind: Kind, **fields: Any) -> None:
        """Tell every worker that is there."""
        for member in self.members.all.values():
            if member.here:
                self.tell(member.rank, kind, **fields)

    def left(self, rank: int) -> None:
        """A worker is through, and waits until a manifest holds its end."""
        if self.deciding is None:
            self.completion.left(rank)
        else:
            self.deciding.left(rank)

    def adopt(self, made: CheckpointFacts) -> None:
        """This manifest is the newest: show it."""
        self.progress.checkpoint = {
            "step": made.step, "view": made.view, "time": made.created, "bytes": made.bytes,
            "path": made.name, "final": made.final, "observedRequest": made.request,
        }  # fmt: skip
        if made.final:
            self.progress.weights_sha256 = made.weights_sha256

    # -- events ------------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        if isinstance(event, events.Tick):
            self._tick(event)
        elif not (self._of_worker(event) or self.cutting.heard(event) or self._of_shard(event) or self._of_disk(event)):
            self._of_process(event)

    def _of_process(self, event: Event) -> None:
        match event:
            case events.TookUp():
                self.recovery.take_up(event)
            case events.Started():
                self.recovery.begin()
            case events.StepPassed(step, wall):
                self.progress.passed(step, wall)
                if self.progress.comeback.waits:
                    self.progress.comeback.passed(step, self.recovery.view, self.members.newest_start(), wall)
            case events.StopAsked():
                self.completion.stop_job()
            case _:
                raise TypeError(f"{event!r} is no event of a coordinator")

    def _of_shard(self, event: Event) -> bool:
        recovery = self.recovery
        match event:
            case events.ShardHello():
                recovery.shard(event)
            case events.ShardAnnounced(view):
                recovery.announced(view)
            case events.ShardLost(index, link):
                recovery.lost(index, link)
            case events.Initialised():
                recovery.beginning.initialised(event)
            case events.ShardRestored():
                recovery.restored(event)
                if recovery.open:
                    self.progress.comeback.interrupted(self.progress.step)
            case events.Unrestored():
                recovery.unrestored(event)
            case events.AckedDoubted():
                recovery.joining.doubted(event)
            case events.StandsAt():
                recovery.joining.where(event)
                self.norms.where(event)
            case events.WorkersAwaited():
                self.hanging.awaited(event)
            case events.PushArrived():
                if self.deciding is not None:
                    self.deciding.arrived(event)
            case events.NormMeasured():
                self.norms.measured(event)
            case _:
                return False
        return True

    def _of_disk(self, event: Event) -> bool:
        finding = self.recovery.finding
        match event:
            case events.ViewClaimed():
                finding.view_claimed(event)
            case events.ViewUnclaimed():
                finding.unclaimed(event)
            case events.ClaimSeen():
                self._looking = False
            case events.ViewFenced(view, why):
                self.emit(actions.LeaveFenced(view, why))
            case events.NewestRead():
                finding.newest(event)
            case events.ManifestCommitted():
                self.cutting.committed(event)
            case events.ManifestUncommitted():
                self.cutting.uncommitted(event)
            case events.RoomMeasured():
                self.cutting.measured(event)
            case events.ModeWished():
                self.switching.wished(event)
            case _:
                return False
        return True

    def _of_worker(self, event: Event) -> bool:
        match event:
            case events.WorkerHello(stream):
                self._hello(stream)
            case events.StreamEnded(ended):
                member = self.members.ended(ended)
                if member is not None:
                    self.cutting.stream_ended(member)
            case events.NotJoined():
                self.recovery.joining.not_joined(event)
            case (
                events.RecordCame() | events.Marked() | events.WorkerLeft() | events.Reported() | events.CheckpointAsked()
                | events.WorkerStops() | events.Heartbeat() | events.InputsSeen() | events.StepLost() | events.Measured()
                | events.DigestCame() | events.DataSeen()
            ):  # fmt: skip
                member = self.members.of(event.stream)
                # What a process says that joined before a restore is of steps that are undone; it begins again.
                if member is not None and member.joined_in in (-1, self.recovery.restores):
                    self._said(member, event)
            case _:
                return False
        return True

    def _hello(self, stream: Stream) -> None:
        newest = self.members[stream.rank].incarnation
        if stream.incarnation < newest:
            if stream.fresh and stream.incarnation[0] == newest[0]:  # no process of its start came after it: it has missed a restore
                self.recovery.rewind(stream.id)
                return
            problem = f"worker {stream.rank}: a newer process of this rank is here"
            self.emit(Tell(stream.id, Kind.ERROR, {"code": "fenced", "error": problem, "start": newest[0]}))
            self.emit(actions.HangUp(stream.id))
            return
        if stream.incarnation > newest:
            self.hanging.stirred(stream.rank)
            self.progress.comeback.interrupted(self.progress.step)
        if self.mode.rewinds_together and not stream.fresh and stream.recovery < self.recovery.recovery:
            self.progress.comeback.heard(stream.acked)
        self.members.came(stream)
        self.recovery.worker(stream)

    def _said(self, member: Member, event: Event) -> None:
        if isinstance(event, events.RecordCame | events.Marked | events.Heartbeat):
            self.hanging.stirred(member.rank)
        match event:
            case events.RecordCame(_, clock, record, idle):
                if clock < 0:
                    self.recovery.beginning.gives(member.rank, record)
                    return
                if idle is not None:
                    member.idle = idle
                cut = self.cutting.cuts.current
                since = None if self.deciding is None else self.deciding.needed(member.rank)
                member.keep(clock, record, None if cut is None else cut.pins.get(member.rank, cut.step), since)
                self.cutting.passed(member, clock)
                self.cutting.recorded(member)
            case events.Marked(_, number, clock):
                cut = self.cutting.cuts.current
                if cut is not None and cut.number == number:
                    cut.pins[member.rank] = clock
            case events.WorkerLeft(_, clock):
                self.members.left(member.rank, clock)
                self.cutting.left(member)
                self._say(self.progress.drift.settled(self.members.alive))
                self.left(member.rank)
            case events.Reported(_, numbers):
                self.progress.report(member.rank, numbers)
            case events.InputsSeen(_, sums):
                said = self.progress.see_inputs(member.rank, sums, len(self.members.live()))
                if said is not None:
                    self.log("info", said)
            case events.DigestCame(_, digest):
                self._say(self.progress.drift.came(member.rank, digest, self.members.alive))
            case events.DataSeen(stream, told):
                self._see_data(member.rank, stream, told)
            case events.Measured():
                self.stages.measured(member, event, self.now)
            case events.StepLost(_, rank, step):
                if self.recovery.open:
                    self.recovery.rewind_all(
                        f"worker {member.rank} needs what only a lost process of worker {rank} had made in step {step}"
                    )
            case events.Heartbeat(_, passes):
                member.passes_again += passes
            case events.CheckpointAsked():
                self.cutting.cuts.ask(self.now)
            case events.WorkerStops():
                self.completion.stop_worker(member.rank)

    def _say(self, found: Sequence[str]) -> None:
        for sentence in found:
            self.log("warning", sentence)

    def _see_data(self, rank: int, stream: int, told: Told) -> None:
        found = self.progress.data.see(rank, told)
        if found is None:
            return
        self.log("warning", found.sentence)
        self.progress.data_problem = found.sentence
        if found.sure:
            self.emit(Tell(stream, Kind.ERROR, {"code": "refused", "error": found.sentence}))
            self.emit(actions.HangUp(stream))

    # -- time ------------------------------------------------------------------------------------

    def _tick(self, event: events.Tick) -> None:
        self.furthest, now = event.furthest, self.now
        if not self._looking and now - self._looked >= CLAIM_SECONDS and self.recovery.finding.claimed:
            # A coordinator that nobody speaks to any more (its node was cut off, it stood still) finds its successor here.
            self._looked, self._looking = now, True
            self.emit(actions.LookForClaim(self.recovery.view))
        self.recovery.tick(now)
        self.recovery.beginning.check()
        self.completion.go(now)
        self.cutting.tick(now)
        self.hanging.tick(now)
        if not self.recovery.open or self.completion.over:
            return
        self.norms.tick(now)
        if self.deciding is not None:
            self.deciding.tick(now)
        if self.completion.tick(now):
            return
        self.switching.tick(now)
        step, cuts = self.progress.step, self.cutting.cuts
        if cuts.prepares(step, now):
            self.recovery.order_all(self.cutting.prepare())
        if not cuts.due(step, now) or cuts.waits(step, self.job.shards, now):
            return
        if self.deciding is None or not self.deciding.waits(now):
            self.cutting.begin()

    # -- what is told ----------------------------------------------------------------------------

    def status(self, now: float, wall: float) -> dict[str, Any]:
        """What the status port tells of the job, at `now` and unix time `wall`. May be called while another thread is in `handle`."""
        clock = min(member.clock for member in self.members.all.values()) if self.mode.decided else None
        return self.progress.status(wall, clock) | {
            "mode": written(self.mode),
            "workers": self.members.status(),
            "waiting": self.recovery.reason(now),
            "state": self.recovery.state,
            "checkpointProgress": self.cutting.told(),
            "hung": self.hanging.status(now),
            "stages": self.stages.told(now),
        }
