"""What a cut that is written comes to: each worker's clock, the step, and which records are saved with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from psjob.protocol.coordinator.actions import CommitCut
from psjob.protocol.coordinator.events import CutWritten, WorkerFacts
from psjob.protocol.coordinator.members import Member
from psjob.protocol.coordinator.schedule import Cut

if TYPE_CHECKING:
    from psjob.protocol.coordinator.machine import Coordinator


class Inconsistent(Exception):
    """The shards' parts are not of one moment; the text says where they differ."""


def assemble(c: Coordinator, cut: Cut) -> CommitCut:
    """The manifest of a cut, in the words of who writes it. Raises Inconsistent."""
    recovery, members = c.recovery, c.members
    assert recovery.layout is not None
    clocks = cut.clocks or _clocks(c, cut.written)
    left = _left(_told(c, cut.written))
    workers = tuple(
        WorkerFacts(clocks[rank], *members[rank].incarnation, left=left.get(rank)) for rank in range(c.job.workers)
    )  # fmt: skip
    live = [worker.clock for worker in workers if worker.left is None]
    step = min(live) if live else max(clocks.values())
    if cut.clocks is not None:
        step = max((part.furthest for part in cut.written.values()), default=0)  # updates, whoever made them
    taken = {rank: at for rank, worker in enumerate(workers) if (at := _record(members[rank], worker, cut)) is not None}
    records = {rank: members[rank].records[at] for rank, at in taken.items()}
    older = {rank: at for rank, at in taken.items() if at != workers[rank].clock}
    workers = tuple(replace(worker, record=older.get(rank)) for rank, worker in enumerate(workers))
    unrecorded = len(live) > len(records)
    initial = step == 0 or (unrecorded and cut.clocks is not None)
    return CommitCut(
        cut.number, recovery.view, step, c.mode.name, cut.final, recovery.layout, recovery.assignment, recovery.rule, recovery.tables,
        workers, {shard: part.content for shard, part in sorted(cut.written.items())}, records, recovery.initial if initial else b"",
        _buffers(c, workers), recovery.aliases, cut.request,
    )  # fmt: skip


def _record(member: Member, worker: WorkerFacts, cut: Cut) -> int | None:
    """The clock of the record that is saved of a worker: in a decided mode the newest that is not beyond its clock."""
    at = worker.clock if cut.clocks is None else member.newest(worker.clock)
    return at if worker.left is None and at in member.records else None


def _clocks(c: Coordinator, written: Mapping[int, CutWritten]) -> dict[int, int]:
    """Each worker's clock at the cut: the step where versions are clocks, else the one clock that all shards have of it."""
    ranks = range(c.job.workers)
    if c.mode.ahead == 0:
        return dict.fromkeys(ranks, max((part.furthest for part in written.values()), default=0))
    told = [part.complete for part in _told(c, written)]
    if not told:
        return dict.fromkeys(ranks, 0)
    for other in told:
        if other != told[0]:
            rank = next(rank for rank in ranks if other[rank] != told[0][rank])
            seen = sorted({complete[rank] for complete in told})
            raise Inconsistent(f"shards disagree on worker {rank}'s step at a cut, a stream broke in it: {seen}")
    return dict(enumerate(told[0]))


def _told(c: Coordinator, written: Mapping[int, CutWritten]) -> list[CutWritten]:
    """The parts of shards that hold blocks or rows: no push tells any other how far the workers are."""
    owning = set(range(c.job.shards)) if c.recovery.tables else set(c.recovery.assignment)
    return [part for shard, part in sorted(written.items()) if shard in owning]


def _left(parts: Sequence[CutWritten]) -> dict[int, int]:
    """From which clock on a worker has left, if every one of these shards knew so at the cut."""
    ranks = set.intersection(*(set(part.left) for part in parts)) if parts else set()
    return {rank: max(part.left[rank] for part in parts) for rank in ranks}


def _buffers(c: Coordinator, workers: Sequence[WorkerFacts]) -> tuple[bytes, ...]:
    """The model's buffers are rank 0's, in its record at the cut (its last one when it has left); those of a stage its first worker's."""
    found: list[bytes] = []
    for ranks in c.job.stages.all() or [range(1)]:
        records = c.members[ranks[0]].records
        found.append(records.get(workers[ranks[0]].clock) or (records[max(records)] if records else b""))
    return tuple(record for record in ([] if all(found) else [c.recovery.initial]) + found if record)
