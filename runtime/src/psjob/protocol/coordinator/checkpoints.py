"""A checkpoint from its order to its manifest: ordered to all shards, followed by what they tell, committed once all of it is written.

`schedule` says when, and how far a snapshot has come. A snapshot that cannot be finished is given up: every shard deletes what it has
written, and workers that hold their pushes for it are released.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from psjob.protocol import messages
from psjob.protocol.coordinator import events, updates
from psjob.protocol.coordinator.events import CommitSnapshot, WorkerFacts
from psjob.protocol.coordinator.members import Member
from psjob.protocol.coordinator.schedule import SILENCE_SECONDS, Snapshot
from psjob.protocol.coordinator.state import CoordinatorState
from psjob.protocol.messages import (
    Prepare,
    SnapshotHeld,
    SnapshotLate,
    SnapshotReady,
    SnapshotUnwritten,
    SnapshotWritten,
    TakeSnapshot,
    Void,
)
from psjob.wire.frame import Kind

PATIENCE_SECONDS = 10.0
"""A worker that is away for less, and a snapshot that waits for less, is not told of."""
TOLD_RANKS = 8

# -- ordering ----------------------------------------------------------------------------------------


def begin(state: CoordinatorState, final: bool = False, stop: bool = False, still: bool = False) -> None:
    """Order the next snapshot; nothing where it would be in vain."""
    snapshots, tries = state.snapshots, state.tries
    if snapshots.marks and state.members.missing and not (final or stop or still):
        _away(state)  # the others would hold their pushes for a snapshot that cannot be
        return
    tries.away_since = None
    still = still or state.mode.decided  # between two orders no block moves
    snapshot = snapshots.begin(state.furthest, state.now, final, stop, still, last_reachable(state) if stop else math.inf)
    snapshot.request = state.change.request
    tries.moved = {}
    if stop:
        stop_at(state, snapshot, snapshot.step or 0)
    left = {m.rank: m.left_at for m in state.members.all.values() if m.left_at is not None}
    if state.updates is not None and state.open:
        left = updates.hold(state, state.updates, snapshot)
    step = -1 if snapshot.step is None else snapshot.step
    state.order_all(TakeSnapshot(snapshot.number, step, snapshot.marks, tries.base, snapshot.clocks, left))


def last_reachable(state: CoordinatorState) -> float:
    """The last step that a snapshot can be named at, if no worker that is gone comes back: none makes a step without the others' pushes."""
    members = state.members
    return math.inf if state.snapshots.marks else min((members[rank].clock for rank in members.missing), default=math.inf)


def _away(state: CoordinatorState) -> None:
    tries, now = state.tries, state.now
    if tries.away_since is None:
        tries.away_since = now
    if now - tries.away_since > PATIENCE_SECONDS:
        away = listed(state.members.missing)
        state.progress.checkpoint_problem = f"workers {away} are not here, and a checkpoint needs the mark of each"


def prepare(state: CoordinatorState) -> Prepare:
    """The order to make memory ready."""
    return Prepare(state.snapshots.number, state.tries.base)


def unprepared(state: CoordinatorState, index: int) -> list[Prepare]:
    """What a shard on a new stream is ordered again, where the next snapshot waits for its memory."""
    return [] if state.snapshots.prepared is None or index in state.snapshots.prepared else [prepare(state)]


def stop_at(state: CoordinatorState, snapshot: Snapshot, step: int) -> None:
    """Workers that stand still continue to `step` and end there, with this snapshot."""
    snapshot.stop = True
    state.tell_all(Kind.STOP, clock=step)


def ask_mark(state: CoordinatorState, member: Member) -> None:
    """A worker that comes while the others hold for a marked snapshot must mark too."""
    taken = state.snapshots.current
    if taken is not None and taken.marks and member.rank not in taken.pins and len(taken.ready) == state.job.shards and member.stream:
        state.emit(events.Tell(member.stream.id, Kind.MARK, request=taken.number))


# -- what shards and workers tell ----------------------------------------------------------------------


def heard(state: CoordinatorState, event: events.Event) -> bool:
    """An answer to do with snapshots; False where it is of something else."""
    snapshot = state.snapshots.current
    match event:
        case messages.MemoryReady():
            if state.snapshots.prepared is not None:
                state.snapshots.prepared.add(event.shard)
        case messages.SnapshotVoided():
            _is_gone(state, event)
        case messages.BytesMoved():
            _moved(state, event)
        case SnapshotReady() | SnapshotLate() | SnapshotHeld() | SnapshotUnwritten() | SnapshotWritten():
            if snapshot is not None and event.snapshot == snapshot.number and not snapshot.committing:
                _of_current(state, snapshot, event)
        case _:
            return False
    return True


def _of_current(
    state: CoordinatorState, snapshot: Snapshot, event: SnapshotReady | SnapshotLate | SnapshotHeld | SnapshotUnwritten | SnapshotWritten
) -> None:
    shard, now = event.shard, state.now
    match event:
        case SnapshotLate():
            void(state, event.why, state.snapshots.late, tell=False)
            return
        case SnapshotUnwritten():
            failed(state, f"shard {shard}: {event.why}", event.full)
            return
        case SnapshotHeld():
            snapshot.held[shard] = now
        case SnapshotWritten():
            snapshot.held[shard] = now
            snapshot.written[shard] = event
    snapshot.ready.add(shard)
    if snapshot.marks and snapshot.asked is None and len(snapshot.ready) == state.job.shards:
        snapshot.asked = now
        for member in state.members.all.values():
            if member.here:
                ask_mark(state, member)
    try_commit(state)


def _moved(state: CoordinatorState, event: messages.BytesMoved) -> None:
    snapshot = state.snapshots.current
    writing = event.doing == "writing"
    if writing and snapshot is not None and event.number == snapshot.number:
        snapshot.held[event.shard] = state.now
    elif writing or event.number != state.restore_id:
        return
    state.tries.moved[event.shard] = event


def _is_gone(state: CoordinatorState, event: messages.SnapshotVoided) -> None:
    told = state.tries.voided.get(event.snapshot)
    if told is None:
        return
    told.add(event.shard)
    if len(told) == state.job.shards:
        del state.tries.voided[event.snapshot]
        state.emit(events.SweepOrphans(state.term, event.snapshot + 1))


def marked(state: CoordinatorState, member: Member, number: int, clock: int) -> None:
    """A worker stands before `clock` and holds its pushes."""
    snapshot = state.snapshots.current
    if snapshot is not None and snapshot.number == number:
        snapshot.pins[member.rank] = clock


def record_came(state: CoordinatorState, member: Member, clock: int, record: bytes) -> None:
    """A worker's record: it is kept for as long as a restore may need it."""
    snapshot = state.snapshots.current
    pinned = None if snapshot is None else snapshot.pins.get(member.rank, snapshot.step)
    member.keep(clock, record, pinned, updates.oldest_needed(state, member.rank), state.mode.delay)
    passed(state, member, clock)
    snapshot = state.snapshots.current
    if snapshot is not None and snapshot.lacking is not None:
        needed = snapshot.pins.get(member.rank, member.clock) if snapshot.step is None else snapshot.step
        if needed in member.records:
            snapshot.lacking.discard(member.rank)
    try_commit(state)


def passed(state: CoordinatorState, member: Member, clock: int) -> None:
    """A worker is beyond the step of a snapshot: where its record for that is not here, it will not come."""
    snapshot = state.snapshots.current
    if snapshot is None or snapshot.step is None or snapshot.final or snapshot.clocks is not None:
        return
    if clock > snapshot.step and snapshot.step not in member.records:
        void(state, f"worker {member.rank} went beyond step {snapshot.step} without a record of it", state.snapshots.failed)


def worker_left(state: CoordinatorState, member: Member) -> None:
    """A worker has left: no record of it is waited for."""
    snapshot = state.snapshots.current
    if snapshot is not None and snapshot.lacking is not None:
        snapshot.lacking.discard(member.rank)


def stream_ended(state: CoordinatorState, member: Member) -> None:
    """A worker's stream is gone: its mark may not have come to every shard, and others hold for it."""
    snapshot = state.snapshots.current
    if snapshot is not None and snapshot.marks and member.left_at is None and len(snapshot.held) < state.job.shards:
        drop(state, f"worker {member.rank} went away before all shards had its mark")


def tick(state: CoordinatorState) -> None:
    """Give up what nobody tells of any more, or what others have waited for too long; tell what a snapshot waits for."""
    snapshots, snapshot, now = state.snapshots, state.snapshots.current, state.now
    if snapshot is None or snapshot.committing:
        return
    silent = snapshot.silent(now)
    if silent is not None:
        void(state, f"shard {silent} has not reported on its writing for {SILENCE_SECONDS:.0f} s", snapshots.failed)
    elif snapshots.expired(now):
        late = listed({m.rank for m in state.members.live()} - snapshot.pins.keys())
        void(state, f"workers {late} did not come to the end of their step while others held their pushes for it", snapshots.timed_out)
    elif now - snapshot.began > PATIENCE_SECONDS and state.progress.checkpoint_problem is None and snapshot.lacking:
        state.progress.checkpoint_problem = f"a checkpoint waits for the records of workers {listed(snapshot.lacking)}"


# -- committing --------------------------------------------------------------------------------------


def try_commit(state: CoordinatorState) -> None:
    """Commit once every shard has written and every worker's record for the snapshot is here."""
    snapshot = state.snapshots.current
    if snapshot is None or snapshot.committing or len(snapshot.written) < state.job.shards:
        return
    if snapshot.clocks is not None:
        if state.updates is not None and not snapshot.final and not updates.has_records(state, snapshot):
            return
    elif not snapshot.final:
        if snapshot.lacking is None:
            snapshot.lacking = state.members.missing_records(snapshot.step, snapshot.pins)
        # at step 0 of a new run nobody has asked for a batch yet
        if snapshot.lacking and not (state.initialising and all(not state.members[rank].records for rank in snapshot.lacking)):
            return
    try:
        made = assemble(state, snapshot)
    except Inconsistent as problem:
        failed(state, str(problem), False)
        return
    snapshot.committing = True
    state.emit(made)


def committed(state: CoordinatorState, event: events.ManifestCommitted) -> Snapshot | None:
    """A snapshot is a checkpoint: show it. Returns the snapshot in flight, if it is that one: what waited for it continues."""
    snapshot, made, tries, progress = state.snapshots.current, event.made, state.tries, state.progress
    tries.base, tries.tries, tries.full = event.snapshot, 0, None
    progress.checkpoint_problem = None
    progress.committed += made.step > 0
    progress.adopt(made)
    tries.moved = {}
    state.search.damaged.pop(made.name, None)  # a manifest of that name was written anew
    state.search.failed.pop(made.name, None)
    return snapshot if snapshot is not None and snapshot.number == event.snapshot else None


def uncommitted(state: CoordinatorState, event: events.ManifestUncommitted) -> bool:
    """A snapshot did not become a checkpoint; True if it is the one in flight."""
    snapshot = state.snapshots.current
    if snapshot is None or snapshot.number != event.snapshot:
        return False
    snapshot.committing = False
    failed(state, event.why, event.full)
    return True


class Inconsistent(Exception):
    """The shards' parts are not of one moment; the text says where they differ."""


def assemble(state: CoordinatorState, snapshot: Snapshot) -> CommitSnapshot:
    """What a snapshot that is written comes to: each worker's clock, the step, the records that are saved with it. Raises Inconsistent."""
    members = state.members
    assert state.layout is not None
    clocks = snapshot.clocks or _clocks(state, snapshot.written)
    left = _left(_told(state, snapshot.written))
    workers = tuple(WorkerFacts(clocks[rank], *members[rank].incarnation, left=left.get(rank)) for rank in range(state.job.workers))
    live = [worker.clock for worker in workers if worker.left is None]
    step = min(live) if live else max(clocks.values())
    if snapshot.clocks is not None:
        step = max((part.furthest for part in snapshot.written.values()), default=0)  # updates, whoever made them
    taken = {rank: at for rank, worker in enumerate(workers) if (at := _record(members[rank], worker, snapshot)) is not None}
    records = {rank: members[rank].records[at] for rank, at in taken.items()}
    older = {rank: at for rank, at in taken.items() if at != workers[rank].clock}
    workers = tuple(replace(worker, record=older.get(rank)) for rank, worker in enumerate(workers))
    unrecorded = len(live) > len(records)
    initial = step == 0 or (unrecorded and snapshot.clocks is not None)
    return CommitSnapshot(
        snapshot.number, state.term, step, state.mode.name, snapshot.final, state.layout, state.assignment, state.rule, state.tables,
        workers, {shard: part.content for shard, part in sorted(snapshot.written.items())}, records, state.initial if initial else b"",
        _buffers(state, workers), state.aliases, snapshot.request,
    )  # fmt: skip


def _record(member: Member, worker: WorkerFacts, snapshot: Snapshot) -> int | None:
    """The clock of the record that is saved of a worker: in a decided mode the newest that is not beyond its clock."""
    at = worker.clock if snapshot.clocks is None else member.newest(worker.clock)
    return at if worker.left is None and at in member.records else None


def _clocks(state: CoordinatorState, written: Mapping[int, SnapshotWritten]) -> dict[int, int]:
    """Each worker's clock at the snapshot: the step where versions are clocks, else the one clock that all shards have of it."""
    ranks = range(state.job.workers)
    if state.mode.ahead == 0:
        return dict.fromkeys(ranks, max((part.furthest for part in written.values()), default=0))
    told = [part.complete for part in _told(state, written)]
    if not told:
        return dict.fromkeys(ranks, 0)
    for other in told:
        if other != told[0]:
            rank = next(rank for rank in ranks if other[rank] != told[0][rank])
            seen = sorted({complete[rank] for complete in told})
            raise Inconsistent(f"shards disagree on worker {rank}'s step at a snapshot, a stream broke in it: {seen}")
    return dict(enumerate(told[0]))


def _told(state: CoordinatorState, written: Mapping[int, SnapshotWritten]) -> list[SnapshotWritten]:
    """The parts of shards that hold blocks or rows: no push tells any other how far the workers are."""
    owning = set(range(state.job.shards)) if state.tables else set(state.assignment)
    return [part for shard, part in sorted(written.items()) if shard in owning]


def _left(parts: Sequence[SnapshotWritten]) -> dict[int, int]:
    """From which clock on a worker has left, if every one of these shards knew so at the snapshot."""
    ranks = set.intersection(*(set(part.left) for part in parts)) if parts else set()
    return {rank: max(part.left[rank] for part in parts) for rank in ranks}


def _buffers(state: CoordinatorState, workers: Sequence[WorkerFacts]) -> tuple[bytes, ...]:
    """The model's buffers are rank 0's, in its record at the snapshot, or its last one if it has left. A stage's are its first worker's."""
    found: list[bytes] = []
    for ranks in state.job.stages.all() or [range(1)]:
        records = state.members[ranks[0]].records
        found.append(records.get(workers[ranks[0]].clock) or (records[max(records)] if records else b""))
    return tuple(record for record in ([] if all(found) else [state.initial]) + found if record)


# -- giving up ---------------------------------------------------------------------------------------


def void(state: CoordinatorState, why: str, again: Callable[[float], object], tell: bool = True) -> None:
    """Give the snapshot in flight up, unless its manifest is being written. `tell`: the user is to know at once, not at the second time."""
    snapshot, tries = state.snapshots.current, state.tries
    if snapshot is None or snapshot.committing:
        return
    state.log("info", f"checkpoint {snapshot.number} is void: {why}")
    tries.tries += 1
    if tell or tries.tries > 1:
        state.progress.checkpoint_problem = why
    tries.voided = {number: told for number, told in tries.voided.items() if number > snapshot.number - 8} | {snapshot.number: set()}
    state.order_all(Void(snapshot.number))
    if snapshot.marks:
        state.tell_all(Kind.RELEASE, request=snapshot.number)
    again(state.now)


def drop(state: CoordinatorState, why: str) -> None:
    """A snapshot in flight is void; when the next one is due stays as it was."""
    void(state, why, lambda now: state.snapshots.drop(), tell=False)


def failed(state: CoordinatorState, why: str, full: bool) -> None:
    """The snapshot in flight cannot be written: for want of room, checkpoints pause; else it is tried again soon."""
    if not full:
        void(state, why, state.snapshots.failed)
        return
    delay = 0.0

    def pause(now: float) -> None:
        nonlocal delay
        delay = state.snapshots.full(now)

    void(state, why, pause)
    state.tries.full = why, delay
    _tell_full(state, None)
    state.emit(events.MeasureRoom())


def room_measured(state: CoordinatorState, event: events.RoomMeasured) -> None:
    """How much room there is, where that was asked for."""
    if state.tries.full is not None:
        _tell_full(state, event.free)


def _tell_full(state: CoordinatorState, free: int | None) -> None:
    assert state.tries.full is not None
    why, delay = state.tries.full
    whole = [told.total for told in state.tries.moved.values() if told.doing == "writing"]
    last = (state.progress.checkpoint or {}).get("bytes")
    needed = sum(whole) if len(whole) == state.job.shards else last
    numbers = [f"a checkpoint needs about {needed} bytes" if needed else "", "" if free is None else f"{free} are free"]
    said = ", ".join(part for part in numbers if part)
    state.progress.checkpoint_problem = (
        f"checkpoints pause, the volume of {state.job.folder} is full{': ' if said else ''}{said}; "
        f"free space or ask for a larger one; the next try is in {delay:.0f} s ({why})"
    )


# -- what is told ------------------------------------------------------------------------------------


def progress(state: CoordinatorState) -> dict[str, Any] | None:
    """`checkpointProgress` of the status port: what is written, or read, and how far; None where nothing is."""
    snapshot = state.snapshots.current
    moved = dict(state.tries.moved)
    if not moved or (snapshot is None and not state.restoring):
        return None
    done = {} if snapshot is None else dict(snapshot.written)
    shards = [{"index": i, "doing": m.doing, "done": m.total if i in done else m.done, "total": m.total} for i, m in sorted(moved.items())]
    return {
        "doing": "reading" if snapshot is None else "writing",
        "shards": shards,
        "done": sum(int(str(shard["done"])) for shard in shards),
        "total": sum(int(str(shard["total"])) for shard in shards),
    }


def listed(ranks: set[int]) -> str:
    """Ranks for a sentence: the first ones, and how many more there are."""
    first = sorted(ranks)[:TOLD_RANKS]
    return f"{first}" + (f" and {len(ranks) - TOLD_RANKS} more" if len(ranks) > TOLD_RANKS else "")
