"""What a snapshot says about the job as it is now: which process sits in which seat, and what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from psjob_operator.api.status import TERMINAL, JobStatus
from psjob_operator.plan import fate, naming
from psjob_operator.plan.fate import Fate, read_message
from psjob_operator.plan.snapshot import Process, Refusal, Role, Snapshot
from psjob_operator.plan.text import index_set, starts_map

PATIENCE_SECONDS = 3.0
"""Shard 0 must have been asked so long after a worker's success was stored, so that a late word of it counts."""
SUSPENDING = "Suspending"
"""Reason of Ready and Reconciling while processes end for a suspension."""


@dataclass(frozen=True)
class Seat:
    """One shard or worker of the job, by index, with the process that holds it now."""

    role: Role
    index: int
    number: int
    """Number of the process that should be there: the shard's attempt, the worker's newest start. 0: none was ever given."""
    name: str
    process: Process | None
    fate: Fate
    may_create: bool = False
    """This process of the operator raised the number and has not made the pod yet."""
    refusal: Refusal | None = None

    @property
    def up(self) -> bool:
        """It does its work, or has done it."""
        if self.fate.kind == "done":
            return True
        return self.fate.kind == "running" and (self.role == "worker" or (self.process is not None and self.process.ready))

    def __str__(self) -> str:
        return f"{self.role} {self.index}"


@dataclass(frozen=True)
class Facts:
    """A snapshot, read once."""

    snapshot: Snapshot
    now: float
    stored: JobStatus
    """Status of this run; of another run, only the numbers that must be passed."""
    first_seen: bool
    """No operator has stored a status of this run yet."""

    @classmethod
    def of(cls, snapshot: Snapshot, now: float) -> Facts:
        """Reads a snapshot: a status of another run gives no facts, only minimum numbers."""
        status = snapshot.status or JobStatus()
        if status.run == snapshot.uid:
            return cls(snapshot, now, status, first_seen=False)
        if status.run is None and status.phase in TERMINAL:
            return cls(snapshot, now, status, first_seen=False)
        shards = tuple(shard.model_copy(update={"state": "Pending", "pod": None}) for shard in status.shards)
        workers = JobStatus().workers.model_copy(update={"start": status.workers.start})
        return cls(snapshot, now, JobStatus(view=status.view, shards=shards, workers=workers), first_seen=True)

    @property
    def finished(self) -> bool:
        """The job has ended; nothing of it is started again."""
        return self.stored.ended

    @property
    def has_run(self) -> bool:
        """All processes have been there since the job began or was resumed; so it is taken to be in a phase of a newer operator."""
        return self.stored.phase not in (None, "Pending", "Suspended")

    @cached_property
    def pods(self) -> tuple[Process, ...]:
        """Processes of this run. Those of others are never adopted, never touched."""
        return tuple(process for process in self.snapshot.processes if process.run == self.snapshot.uid)

    @cached_property
    def left(self) -> tuple[Process, ...]:
        """Of these, what may still run, or was not told to go. An ended pod that only a finalizer keeps is nobody's process."""
        return tuple(pod for pod in self.pods if pod.deleting is None or not pod.ended)

    @cached_property
    def known(self) -> tuple[Process, ...]:
        """Processes of this run, and those before whose pods were seen to be removed."""
        names = {process.name for process in self.snapshot.processes}
        return (*self.pods, *(process for process in self.snapshot.gone if process.run == self.snapshot.uid and process.name not in names))

    @cached_property
    def seats(self) -> tuple[Seat, ...]:
        """Every shard, then every worker, in index order."""
        return (*self.shards, *self.workers)

    @cached_property
    def attempts(self) -> tuple[int, ...]:
        """Attempt of each shard that the status names; 0 where it names none."""
        known = {shard.index: shard.attempt for shard in self.stored.shards}
        return tuple(known.get(index, 0) for index in range(max([self.snapshot.spec.ps.shards, *(index + 1 for index in known)])))

    @cached_property
    def shards(self) -> tuple[Seat, ...]:
        """The shards' seats."""
        there = {(pod.index, pod.number): pod for pod in self.known if pod.role == "shard"}
        finished = {shard.index for shard in self.stored.shards if shard.state == "Finished"}
        seats = []
        for index in range(self.snapshot.spec.ps.shards):
            seat = self._seat("shard", index, self.attempts[index], there.get((index, self.attempts[index])))
            # Its last manifest is committed: a collected pod takes nothing away.
            collected = seat.process is None or seat.process.gone
            seats.append(replace(seat, fate=Fate("done")) if collected and index in finished else seat)
        return tuple(seats)

    @cached_property
    def workers(self) -> tuple[Seat, ...]:
        """The workers' seats: the newest start of each index that exists or may still be made."""
        start = self.stored.workers.start
        newest: dict[int, Process] = {}
        for pod in self.known:
            if pod.role == "worker" and pod.number <= start and (pod.index not in newest or newest[pod.index].number < pod.number):
                newest[pod.index] = pod
        seats = []
        for index in range(self.snapshot.spec.workers.replicas):
            there = newest.get(index)
            number = there.number if there else 0
            if self.pending_starts.get(index, 0) > number:
                number, there = self.pending_starts[index], None
            if index in self.unfinished:
                seats.append(
                    Seat(
                        "worker", index, number, self._name("worker", index, number), there, self._ruled("worker", there, fate.unfinished())
                    )
                )
            elif index in self.succeeded_before:
                seats.append(Seat("worker", index, number or start, self._name("worker", index, number or start), there, Fate("done")))
            else:
                seat = self._seat("worker", index, number or start, there)
                other = fate.hung(self.hung[index][1]) if self.is_hung(seat) else self._stopped(seat)
                seats.append(seat if other is None else replace(seat, fate=self._ruled("worker", there, other)))
        return tuple(seats)

    @cached_property
    def hung(self) -> Mapping[int, tuple[int, float]]:
        """(start, seconds without a step) by rank, of the workers that shard 0 names as hung; empty without workers.stepTimeoutSeconds.

        A pod's word: it is believed of processes that run with the very start that it names.
        """
        asked = self.snapshot.spec.workers.step_timeout_seconds is not None
        told = self.coordinator.get("hung") if asked else None
        found = {}
        for entry in told if isinstance(told, list) else ():
            if isinstance(entry, Mapping):
                rank, start, seconds = entry.get("rank"), entry.get("start"), entry.get("seconds")
                if type(rank) is int and type(start) is int and isinstance(seconds, int | float) and not isinstance(seconds, bool):
                    found[rank] = (start, float(seconds))
        return found

    def is_hung(self, seat: Seat) -> bool:
        """Is this the process that shard 0 names?"""
        return seat.fate.kind == "running" and seat.index in self.hung and self.hung[seat.index][0] == seat.number

    def _stopped(self, seat: Seat) -> Fate | None:
        """The fate of a worker that was told to end, if it seems to be done and nobody says that its script was through."""
        if seat.fate.kind != "done" or seat.process is None or self.shards_done or self._has_left(seat):
            return None
        return fate.stopped(seat.process)

    def _has_left(self, seat: Seat) -> bool:
        """Shard 0 says that this worker has made its last step."""
        told = self.coordinator.get("workers")
        members = (it for it in told if isinstance(it, Mapping)) if isinstance(told, list | tuple) else ()
        return any(it.get("rank") == seat.index and type(it.get("rank")) is int and it.get("state") == "left" for it in members)

    @cached_property
    def pending_starts(self) -> dict[int, int]:
        """Start number of each worker that was given one and was not seen with it, when the status was written."""
        workers = self.stored.workers
        return starts_map(workers.pending_starts, self.snapshot.spec.workers.replicas, workers.start)

    @cached_property
    def succeeded_before(self) -> frozenset[int]:
        """Workers whose success the status remembers, whatever became of their pods."""
        if self.snapshot.spec.checkpoint.disabled and self.resuming:
            # Nothing was kept: training starts anew, with everyone.
            return frozenset()
        return index_set(self.stored.workers.succeeded_indexes, self.snapshot.spec.workers.replicas)

    @cached_property
    def unfinished(self) -> frozenset[int]:
        """Workers that ended with exit code 0 and of which shard 0 says, asked well after that was stored, that they have not left.

        A worker that leaves waits for a checkpoint that holds its end, so that every later coordinator knows of it too.
        """
        snapshot, told = self.snapshot, self.snapshot.progress
        if snapshot.spec.checkpoint.disabled or not told or told.get("run") != snapshot.uid or told.get("state") != "serving":
            return frozenset()
        if not self.attempts or _attempt(told) != self.attempts[0]:
            return frozenset()
        job = told.get("coordinator")
        workers, kept = (job.get("workers"), job.get("checkpoint")) if isinstance(job, Mapping) else (None, None)
        if not isinstance(workers, list | tuple) or (isinstance(kept, Mapping) and kept.get("final")):
            return frozenset()
        states = {worker.get("rank"): worker for worker in workers if isinstance(worker, Mapping)}
        if snapshot.spec.run_policy.success_policy == "FirstWorker" and states.get(0, {}).get("state") == "left":
            return frozenset()
        return frozenset(pod.index for pod in self._ended_well if self._not_left(states.get(pod.index), pod))

    @property
    def _ended_well(self) -> list[Process]:
        """Workers' newest processes that ended with exit code 0, so long before shard 0 was asked that it had heard of their end."""
        asked, snapshot = self.snapshot.progress_at, self.snapshot
        newest = {pod.index: pod for pod in sorted(self.known, key=lambda pod: pod.number) if pod.role == "worker"}
        found = []
        for pod in newest.values():
            good = pod.exit is not None and pod.exit.code == 0 and not pod.exit.signal and pod.index in self.succeeded_before
            seen = (pod.exit.at if pod.exit else None) if snapshot.one_machine else snapshot.written_at
            if good and asked is not None and seen is not None and asked >= seen + PATIENCE_SECONDS:
                found.append(pod)
        return found

    @staticmethod
    def _not_left(member: Mapping[str, Any] | None, pod: Process) -> bool:
        """Does shard 0 still count with this process, which has no stream to it any more?"""
        if member is None or member.get("here") is not False or member.get("state") not in ("absent", "joined", "lost"):
            return False
        return type(member.get("start")) is int and member["start"] <= pod.number

    @cached_property
    def success_met(self) -> bool:
        """The success policy is met: no worker is started again."""
        if self.first_seen:
            return False
        workers = self.workers[:1] if self.snapshot.spec.run_policy.success_policy == "FirstWorker" else self.workers
        return all(seat.fate.kind == "done" for seat in workers)

    @cached_property
    def shards_done(self) -> bool:
        """Every shard has ended with exit code 0."""
        return all(seat.fate.kind == "done" for seat in self.shards)

    @cached_property
    def too_late(self) -> tuple[Seat, ...]:
        """Workers that look for shards that have ended well before they came: nobody is left to tell them that training is done."""
        met = self.met_starts
        if met is None or not self.shards_done:
            return ()
        return tuple(seat for seat in self.workers if seat.fate.kind == "running" and seat.number > met.get(seat.index, 0))

    @property
    def suspending(self) -> bool:
        """Processes were told to end for a suspension, and Suspended was not yet told."""
        return any(it.type == "Reconciling" and it.reason == SUSPENDING for it in self.stored.conditions)

    @property
    def resuming(self) -> bool:
        """The job was suspended, or nearly so, and is to run: everything gets new numbers."""
        stopped = self.stored.phase == "Suspended" or (self.suspending and not self.left)
        return stopped and not self.snapshot.spec.suspend

    @property
    def afresh(self) -> bool:
        """Everything is started, since nothing of it is there: at first sight, and when a suspension ends."""
        return self.first_seen or self.resuming

    @cached_property
    def ahead(self) -> tuple[Process, ...]:
        """Processes of this run with a number that the status has not given: the status comes from an older backup."""
        attempts = dict(enumerate(self.attempts))
        return tuple(
            pod for pod in self.pods if pod.number > (attempts.get(pod.index, 0) if pod.role == "shard" else self.stored.workers.start)
        )

    @cached_property
    def coordinator(self) -> Mapping[str, Any]:
        """What shard 0 last told of the job; empty when it is out of reach or speaks of another run."""
        first = self.shards[0].process if self.shards else None
        # Last words are newer than what was pulled before.
        said = _last_words(first)
        if said is not None:
            return said
        progress = self.snapshot.progress
        mine = progress is not None and progress.get("run") == self.snapshot.uid
        gone = self.snapshot.farewell
        if gone is not None and gone.run == self.snapshot.uid and not (mine and progress and _attempt(progress) > gone.number):
            said = _last_words(gone)
            if said is not None:
                return said
        told = progress.get("coordinator") if mine and progress else None
        return told if isinstance(told, Mapping) else {}

    @cached_property
    def met_starts(self) -> Mapping[int, int] | None:
        """Start by rank of the workers that shard 0 had met when it ended; None where it does not say."""
        first = self.shards[0].process if self.shards else None
        met = None if first is None or first.exit is None else read_message(first.exit).get("met")
        return starts_map(met, self.snapshot.spec.workers.replicas, self.stored.workers.start) if isinstance(met, str) else None

    def _seat(self, role: Role, index: int, number: int, there: Process | None) -> Seat:
        name = self._name(role, index, number)
        may_create = there is None and name in self.snapshot.granted
        return Seat(role, index, number, name, there, self._ruled(role, there, fate.fate(there)), may_create, self._refusals.get(name))

    def _ruled(self, role: Role, there: Process | None, found: Fate) -> Fate:
        return fate.ruled(self.snapshot.spec.run_policy.failure_rules or (), role, there, found)

    def _name(self, role: Role, index: int, number: int) -> str:
        return naming.process(self.snapshot.name, role, index, number)

    @cached_property
    def _refusals(self) -> dict[str, Refusal]:
        return {refusal.name: refusal for refusal in self.snapshot.refusals}


def _last_words(shard: Process | None) -> Mapping[str, Any] | None:
    """What shard 0 told of the job when it ended; None where it did not end, or said nothing."""
    if shard is None or shard.exit is None:
        return None
    status = read_message(shard.exit).get("status")
    told = status.get("coordinator") if isinstance(status, Mapping) else None
    return told if isinstance(told, Mapping) else None


def _attempt(progress: Mapping[str, Any]) -> int:
    attempt = progress.get("attempt")
    return attempt if isinstance(attempt, int) and not isinstance(attempt, bool) else 0
