"""The coordinator as a pure machine: it knows the members and their records, brings all shards to one term, takes snapshots, and ends it.

Events and the time go in, actions come out. What it knows is one value, `CoordinatorState`. The functions that change it stand in a
module for each subject: `recovery`, `membership`, `checkpoints`, `updates`, `ending`. Here is said which event leads where. Every order
goes to every shard the same way; shard 0 is only the one that answers without a network.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psjob.modes import format_mode
from psjob.protocol import messages
from psjob.protocol.coordinator import checkpoints, ending, events, membership, recovery, updates
from psjob.protocol.coordinator.consistency import Told
from psjob.protocol.coordinator.events import Action, Event, JobFacts, StreamFacts, Tell
from psjob.protocol.coordinator.members import Member
from psjob.protocol.coordinator.state import CoordinatorState
from psjob.protocol.coordinator.step_times import StepTimed
from psjob.wire.frame import Kind

CLAIM_SECONDS = 5.0
"""From one look for a successor's claim to the next."""


class Coordinator:
    """Of one run, in one start of shard 0. `now` is monotonic seconds, and never falls."""

    def __init__(self, job: JobFacts, now: float = 0.0) -> None:
        self.state = CoordinatorState(job, now)

    def handle(self, event: Event, now: float) -> list[Action]:
        """What is to be done about `event`, in order."""
        state = self.state
        state.out = []
        if not state.ended:
            state.now = max(state.now, now)
            _handle(state, event)
        return state.out

    def status(self, now: float, wall: float) -> dict[str, Any]:
        """What the status port tells of the job, at `now` and unix time `wall`. May be called while another thread is in `handle`."""
        state = self.state
        clock = min(member.clock for member in state.members.all.values()) if state.mode.decided else None
        return state.progress.status(wall, clock) | {
            "mode": format_mode(state.mode),
            "workers": state.members.status(),
            "waiting": recovery.reason(state, now),
            "state": state.phase,
            "checkpointProgress": checkpoints.progress(state),
            "hung": membership.hung(state, now),
            "stages": state.stages.told(now),
        }


def _handle(state: CoordinatorState, event: Event) -> None:
    if isinstance(event, events.Tick):
        _tick(state, event)
    elif not (_of_worker(state, event) or checkpoints.heard(state, event) or _of_shard(state, event) or _of_disk(state, event)):
        _of_process(state, event)


def _tick(state: CoordinatorState, event: events.Tick) -> None:
    state.furthest, now = event.furthest, state.now
    if not state.looking and now - state.looked >= CLAIM_SECONDS and state.search.claimed:
        # A coordinator that nobody speaks to any more (its node was cut off, it stood still) finds its successor here.
        state.looked, state.looking = now, True
        state.emit(events.LookForClaim(state.term))
    recovery.tick(state)
    ending.leave(state)
    checkpoints.tick(state)
    membership.tick(state)
    if not state.open or state.ending.over:
        return
    updates.tick(state)
    if state.updates is not None:
        checkpoints.try_commit(state)  # with older records, if newer ones do not come
    if ending.tick(state):
        return
    ending.look_at_config(state)
    step, snapshots = state.progress.step, state.snapshots
    if snapshots.prepares(step, now):
        state.order_all(checkpoints.prepare(state))
    if not snapshots.due(step, now) or snapshots.waits(step, state.job.shards, now):
        return
    if not updates.wait_for_records(state):
        checkpoints.begin(state)


def _of_process(state: CoordinatorState, event: Event) -> None:
    match event:
        case events.ShardRestartedFromKeeper():
            recovery.take_up(state, event)
        case events.Started():
            recovery.start(state)
        case events.StepPassed(step, wall):
            state.progress.passed(step, wall)
            if state.progress.comeback.waits:
                state.progress.comeback.passed(step, state.term, state.members.newest_start(), wall)
        case events.StopAsked() | messages.Terminating():
            ending.stop_job(state)
        case _:
            raise TypeError(f"{event!r} is no event of a coordinator")


def _of_shard(state: CoordinatorState, event: Event) -> bool:
    match event:
        case events.ShardHello():
            recovery.shard_came(state, event)
        case events.ShardAnnounced(term):
            recovery.announced(state, term)
        case events.ShardLost(index, link):
            recovery.shard_lost(state, index, link)
        case messages.Initialised():
            recovery.initialised(state, event)
        case messages.ShardRestored():
            recovery.shard_restored(state, event)
            if state.open:
                state.progress.comeback.interrupted(state.progress.step)
        case messages.Unrestored():
            recovery.shard_unrestored(state, event)
        case messages.AckedDoubted():
            membership.doubted(state, event)
        case messages.WorkerPositions():
            recovery.positions_told(state, event)
            updates.is_beyond(state, event)
        case messages.WorkersAwaited():
            membership.awaited(state, event)
        case messages.PushArrived():
            updates.push_arrived(state, event)
        case messages.NormMeasured():
            updates.norm_measured(state, event)
        case _:
            return False
    return True


def _of_disk(state: CoordinatorState, event: Event) -> bool:
    match event:
        case events.TermClaimed():
            recovery.term_claimed(state, event)
        case events.TermUnclaimed():
            recovery.term_unclaimed(state, event)
        case events.ClaimSeen():
            state.looking = False
        case events.TermFenced(term, why):
            state.emit(events.LeaveFenced(term, why))
        case events.NewestRead():
            recovery.newest_read(state, event)
        case events.ManifestCommitted():
            _committed(state, event)
        case events.ManifestUncommitted():
            if checkpoints.uncommitted(state, event):
                recovery.ask_first_values(state)
        case events.RoomMeasured():
            checkpoints.room_measured(state, event)
        case events.ModeWished():
            ending.wished(state, event)
        case _:
            return False
    return True


def _committed(state: CoordinatorState, event: events.ManifestCommitted) -> None:
    """A snapshot is a checkpoint: what waited for it continues."""
    snapshot, made = checkpoints.committed(state, event), event.made
    if snapshot is None:
        return
    if state.source is None:
        recovery.first_committed(state, made)
    state.snapshots.committed(made.step, state.now)
    if state.updates is not None:
        updates.snapshot_is_over(state, state.updates)
    ending.committed(state, snapshot, made)
    why = ending.change_mode(state, snapshot, made)
    if why is not None:
        recovery.rewind_all(state, why)


# -- workers -----------------------------------------------------------------------------------------


def _of_worker(state: CoordinatorState, event: Event) -> bool:
    match event:
        case events.WorkerHello(stream):
            _hello(state, stream)
        case events.WorkerStreamEnded(ended):
            member = state.members.ended(ended)
            if member is not None:
                checkpoints.stream_ended(state, member)
        case events.NotJoined():
            membership.not_joined(state, event)
        case (
            events.RecordCame() | events.WorkerMarked() | events.WorkerLeft() | events.Reported() | events.CheckpointAsked()
            | events.WorkerStops() | events.Heartbeat() | events.InputsSeen() | events.StepLost() | events.Measured() | StepTimed()
            | events.DigestCame() | events.DataSeen()
        ):  # fmt: skip
            member = state.members.of(event.stream)
            # What a process says that joined before a restore is of steps that are undone; it begins again.
            if member is not None and member.joined_in in (-1, state.restored_by):
                _said(state, member, event)
        case _:
            return False
    return True


def _hello(state: CoordinatorState, stream: StreamFacts) -> None:
    newest = state.members[stream.rank].incarnation
    if stream.incarnation < newest:
        if stream.fresh and stream.incarnation[0] == newest[0]:  # no process of its start came after it: it has missed a restore
            state.rewind(stream.id)
            return
        problem = f"worker {stream.rank}: a newer process of this rank is here"
        state.emit(Tell(stream.id, Kind.ERROR, {"code": "fenced", "error": problem, "start": newest[0]}))
        state.emit(events.CloseWorkerStream(stream.id))
        return
    if stream.incarnation > newest:
        membership.heartbeat(state, stream.rank)
        state.progress.comeback.interrupted(state.progress.step)
    if state.mode.rewinds_together and not stream.fresh and stream.restore_id < state.restore_id:
        state.progress.comeback.heard(stream.acked)
    state.members.came(stream)
    recovery.worker_came(state, stream)


def _said(state: CoordinatorState, member: Member, event: Event) -> None:
    rank, progress = member.rank, state.progress
    if isinstance(event, events.RecordCame | events.WorkerMarked | events.Heartbeat):
        membership.heartbeat(state, rank)
    match event:
        case events.RecordCame(_, clock, record, idle):
            if clock < 0:
                recovery.first_buffers(state, rank, record)
                return
            if idle is not None:
                member.idle = idle
            checkpoints.record_came(state, member, clock, record)
        case events.WorkerMarked(_, number, clock):
            checkpoints.marked(state, member, number, clock)
        case events.WorkerLeft(_, clock):
            state.members.left(rank, clock)
            checkpoints.worker_left(state, member)
            _warn(state, progress.drift.settled(state.members.alive))
            updates.worker_left(state, rank)
        case events.Reported(_, numbers):
            progress.report(rank, numbers)
        case events.InputsSeen(_, sums):
            said = progress.see_inputs(rank, sums, len(state.members.live()))
            if said is not None:
                state.log("info", said)
        case events.DigestCame(_, digest):
            _warn(state, progress.drift.came(rank, digest, state.members.alive))
        case events.DataSeen(stream, told):
            _see_data(state, rank, stream, told)
        case StepTimed():
            progress.times.came(rank, member.incarnation, event, state.now)
        case events.Measured():
            state.stages.measured(member, event, state.now)
        case events.StepLost(_, lost, step):
            if state.open:
                recovery.rewind_all(state, f"worker {rank} needs what only a lost process of worker {lost} had made in step {step}")
        case events.Heartbeat(_, passes):
            member.passes_again += passes
        case events.CheckpointAsked():
            state.snapshots.ask(state.now)
        case events.WorkerStops():
            ending.stop_worker(state, rank)


def _warn(state: CoordinatorState, found: Sequence[str]) -> None:
    for sentence in found:
        state.log("warning", sentence)


def _see_data(state: CoordinatorState, rank: int, stream: int, told: Told) -> None:
    found = state.progress.data.see(rank, told)
    if found is None:
        return
    state.log("warning", found.sentence)
    state.progress.data_problem = found.sentence
    if found.sure:
        state.refuse(stream, found.sentence)
