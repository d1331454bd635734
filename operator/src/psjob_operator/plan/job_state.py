"""What an observed state says about the job as it is now (JobState), and what shard 0 tells of training.

Each shard and worker has a seat: the process that holds it now, and what became of that. What shard 0 tells comes from a pod, so nothing
of it is believed unread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from psjob_operator.api.status import LARGEST, CheckpointStatus, Internal, JobStatus, ProgressStatus, index_set, stamp, starts_map, unix
from psjob_operator.plan import objects, process_outcome
from psjob_operator.plan.observed_state import ObservedState, Process, Refusal, Role
from psjob_operator.plan.process_outcome import ProcessOutcome, read_message

PATIENCE_SECONDS = 3.0
"""Shard 0 must have been asked so long after a worker's success was stored, so that a late word of it counts."""
SUSPENDING = "Suspending"
"""Reason of Ready and Reconciling while processes end for a suspension."""
PROGRESS_SECONDS = 60.0
"""Progress is asked for, and written, no oftener."""
RUNNING_SECONDS = 10.0
"""After all came up: asked at once, shard 0 would tell of workers that just attach, and that would stand for a minute."""
SAME_SECONDS = 5.0
"""A checkpoint is not told anew because its age was rounded, or took a while to arrive."""
PENDING_SECONDS = 60.0
"""A job of which a part never comes up may train without it."""


@dataclass(frozen=True)
class Seat:
    """One shard or worker of the job, by index, with the process that holds it now."""

    role: Role
    index: int
    number: int
    """Number of the process that should be there: the shard's attempt, the worker's newest start. 0: none was ever given."""
    name: str
    process: Process | None
    outcome: ProcessOutcome
    may_create: bool = False
    """This process of the operator raised the number and has not made the pod yet."""
    refusal: Refusal | None = None

    @property
    def up(self) -> bool:
        """It does its work, or has done it."""
        if self.outcome.kind == "done":
            return True
        return self.outcome.kind == "running" and (self.role == "worker" or (self.process is not None and self.process.ready))

    def __str__(self) -> str:
        return f"{self.role} {self.index}"


@dataclass(frozen=True)
class JobState:
    """An observed state, read once."""

    observed: ObservedState
    now: float
    stored: JobStatus
    """Status of this run; of another run, only the numbers that must be passed."""
    first_seen: bool
    """No operator has stored a status of this run yet."""

    @classmethod
    def of(cls, observed: ObservedState, now: float) -> JobState:
        """Reads an observed state: a status of another run gives no facts, only minimum numbers."""
        status = observed.status or JobStatus()
        if status.run == observed.uid:
            return cls(observed, now, _translated(status), first_seen=False)
        if status.run is None and status.ended:
            return cls(observed, now, status, first_seen=False)
        shards = tuple(shard.model_copy(update={"state": "Pending", "pod": None}) for shard in status.shards)
        numbers = Internal(term=status.internal.term, worker_start=status.internal.worker_start)
        return cls(observed, now, JobStatus(internal=numbers, shards=shards), first_seen=True)

    @property
    def finished(self) -> bool:
        """The job has ended; nothing of it is started again."""
        return self.stored.ended

    @property
    def has_run(self) -> bool:
        """All processes have been there since the job began or was resumed."""
        return self.stored.internal.ready_time is not None

    @cached_property
    def pods(self) -> tuple[Process, ...]:
        """Processes of this run. Those of others are never adopted, never touched."""
        return tuple(process for process in self.observed.processes if process.run == self.observed.uid)

    @cached_property
    def left(self) -> tuple[Process, ...]:
        """Of these, what may still run, or was not told to go. An ended pod that only a finalizer keeps is nobody's process."""
        return tuple(pod for pod in self.pods if pod.deleting is None or not pod.ended)

    @cached_property
    def known(self) -> tuple[Process, ...]:
        """Processes of this run, and those before whose pods were seen to be removed."""
        names = {process.name for process in self.observed.processes}
        return (*self.pods, *(process for process in self.observed.gone if process.run == self.observed.uid and process.name not in names))

    @cached_property
    def seats(self) -> tuple[Seat, ...]:
        """Every shard, then every worker, in index order."""
        return (*self.shards, *self.workers)

    @cached_property
    def attempts(self) -> tuple[int, ...]:
        """Attempt of each shard that the status names; 0 where it names none."""
        known = {shard.index: shard.attempt for shard in self.stored.shards}
        return tuple(known.get(index, 0) for index in range(max([self.observed.spec.shards.replicas, *(index + 1 for index in known)])))

    @cached_property
    def shards(self) -> tuple[Seat, ...]:
        """The shards' seats."""
        there = {(pod.index, pod.number): pod for pod in self.known if pod.role == "shard"}
        finished = {shard.index for shard in self.stored.shards if shard.state == "Finished"}
        seats = []
        for index in range(self.observed.spec.shards.replicas):
            seat = self._seat("shard", index, self.attempts[index], there.get((index, self.attempts[index])))
            # Its last manifest is committed: a collected pod takes nothing away.
            collected = seat.process is None or seat.process.gone
            seats.append(replace(seat, outcome=ProcessOutcome("done")) if collected and index in finished else seat)
        return tuple(seats)

    @cached_property
    def workers(self) -> tuple[Seat, ...]:
        """The workers' seats: the newest start of each index that exists or may still be made."""
        start = self.stored.internal.worker_start
        newest: dict[int, Process] = {}
        for pod in self.known:
            if pod.role == "worker" and pod.number <= start and (pod.index not in newest or newest[pod.index].number < pod.number):
                newest[pod.index] = pod
        seats = []
        for index in range(self.observed.spec.workers.replicas):
            there = newest.get(index)
            number = there.number if there else 0
            if self.pending_starts.get(index, 0) > number:
                number, there = self.pending_starts[index], None
            if index in self.unfinished or index in self.succeeded_before:
                back = index in self.unfinished
                outcome = self._ruled("worker", there, process_outcome.unfinished_exit()) if back else ProcessOutcome("done")
                number = number if back else number or start
                seats.append(Seat("worker", index, number, self._name("worker", index, number), there, outcome))
                continue
            seat = self._seat("worker", index, number or start, there)
            other = process_outcome.hung_worker(self.hung[index][1]) if self.is_hung(seat) else self._stopped(seat)
            seats.append(seat if other is None else replace(seat, outcome=self._ruled("worker", there, other)))
        return tuple(seats)

    @cached_property
    def hung(self) -> Mapping[int, tuple[int, float]]:
        """(start, seconds without a step) by rank, of the workers that shard 0 names as hung. None are asked for without a deadline.

        A pod's word: it is believed of processes that run with the very start that it names.
        """
        asked = self.observed.spec.workers.progress_deadline_seconds is not None
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
        return seat.outcome.kind == "running" and seat.index in self.hung and self.hung[seat.index][0] == seat.number

    def _stopped(self, seat: Seat) -> ProcessOutcome | None:
        """The outcome of a worker that was told to end, if it seems to be done and nobody says that its script was through."""
        if seat.outcome.kind != "done" or seat.process is None or self.shards_done or self._has_left(seat):
            return None
        return process_outcome.stopped_on_request(seat.process)

    def _has_left(self, seat: Seat) -> bool:
        """Shard 0 says that this worker has made its last step."""
        told = self.coordinator.get("workers")
        members = (it for it in told if isinstance(it, Mapping)) if isinstance(told, list | tuple) else ()
        return any(it.get("rank") == seat.index and type(it.get("rank")) is int and it.get("state") == "left" for it in members)

    @cached_property
    def pending_starts(self) -> dict[int, int]:
        """Start number of each worker that was given one and was not seen with it, when the status was written."""
        internal = self.stored.internal
        return starts_map(internal.pending_starts, self.observed.spec.workers.replicas, internal.worker_start)

    @cached_property
    def succeeded_before(self) -> frozenset[int]:
        """Workers whose success the status remembers, whatever became of their pods."""
        if self.observed.spec.checkpoint.disabled and self.resuming:
            # Nothing was kept: training starts anew, with everyone.
            return frozenset()
        return index_set(self.stored.workers.succeeded_indexes, self.observed.spec.workers.replicas)

    @cached_property
    def unfinished(self) -> frozenset[int]:
        """Workers that ended with exit code 0 and of which shard 0 says, asked well after that was stored, that they have not left.

        A worker that leaves waits for a checkpoint that holds its end, so that every later coordinator knows of it too.
        """
        observed, told = self.observed, self.observed.progress
        if observed.spec.checkpoint.disabled or not told or told.get("run") != observed.uid or told.get("state") != "serving":
            return frozenset()
        if not self.attempts or _attempt(told) != self.attempts[0]:
            return frozenset()
        job = told.get("coordinator")
        workers, kept = (job.get("workers"), job.get("checkpoint")) if isinstance(job, Mapping) else (None, None)
        if not isinstance(workers, list | tuple) or (isinstance(kept, Mapping) and kept.get("final")):
            return frozenset()
        states = {worker.get("rank"): worker for worker in workers if isinstance(worker, Mapping)}
        if observed.spec.run_policy.success_policy == "FirstWorker" and states.get(0, {}).get("state") == "left":
            return frozenset()
        return frozenset(pod.index for pod in self._ended_well if self._not_left(states.get(pod.index), pod))

    @property
    def _ended_well(self) -> list[Process]:
        """Workers' newest processes that ended with exit code 0, so long before shard 0 was asked that it had heard of their end."""
        asked, observed = self.observed.progress_at, self.observed
        newest = {pod.index: pod for pod in sorted(self.known, key=lambda pod: pod.number) if pod.role == "worker"}
        found = []
        for pod in newest.values():
            good = pod.exit is not None and pod.exit.code == 0 and not pod.exit.signal and pod.index in self.succeeded_before
            seen = (pod.exit.at if pod.exit else None) if observed.one_machine else observed.written_at
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
        workers = self.workers[:1] if self.observed.spec.run_policy.success_policy == "FirstWorker" else self.workers
        return all(seat.outcome.kind == "done" for seat in workers)

    @cached_property
    def shards_done(self) -> bool:
        """Every shard has ended with exit code 0."""
        return all(seat.outcome.kind == "done" for seat in self.shards)

    @cached_property
    def too_late(self) -> tuple[Seat, ...]:
        """Workers that look for shards that have ended well before they came: nobody is left to tell them that training is done."""
        met = self.met_starts
        if met is None or not self.shards_done:
            return ()
        return tuple(seat for seat in self.workers if seat.outcome.kind == "running" and seat.number > met.get(seat.index, 0))

    @property
    def suspending(self) -> bool:
        """Processes were asked to end for a suspension, and Suspended was not yet written."""
        return any(it.type == "Reconciling" and it.reason == SUSPENDING for it in self.stored.conditions)

    @property
    def suspended(self) -> bool:
        """The status says so."""
        return not self.first_seen and self.stored.suspended

    @property
    def resuming(self) -> bool:
        """The job was suspended, or nearly so, and is to run: everything gets new numbers."""
        stopped = self.suspended or (self.suspending and not self.left)
        return stopped and not self.observed.spec.suspend

    @property
    def afresh(self) -> bool:
        """Everything is started, since nothing of it is there: at first sight, and when a suspension ends."""
        return self.first_seen or self.resuming

    @cached_property
    def ahead(self) -> tuple[Process, ...]:
        """Processes of this run with a number that the status has not given: the status comes from an older backup."""
        attempts = dict(enumerate(self.attempts))
        return tuple(
            pod
            for pod in self.pods
            if pod.number > (attempts.get(pod.index, 0) if pod.role == "shard" else self.stored.internal.worker_start)
        )

    @cached_property
    def coordinator(self) -> Mapping[str, Any]:
        """What shard 0 last told of the job; empty when it is out of reach or speaks of another run."""
        first = self.shards[0].process if self.shards else None
        # Last words are newer than what was pulled before.
        said = _last_words(first)
        if said is not None:
            return said
        progress = self.observed.progress
        mine = progress is not None and progress.get("run") == self.observed.uid
        gone = self.observed.farewell
        if gone is not None and gone.run == self.observed.uid and not (mine and progress and _attempt(progress) > gone.number):
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
        return starts_map(met, self.observed.spec.workers.replicas, self.stored.internal.worker_start) if isinstance(met, str) else None

    def _seat(self, role: Role, index: int, number: int, there: Process | None) -> Seat:
        name, outcome = self._name(role, index, number), self._ruled(role, there, process_outcome.outcome_of(there))
        return Seat(role, index, number, name, there, outcome, there is None and name in self.observed.granted, self._refusals.get(name))

    def _ruled(self, role: Role, there: Process | None, found: ProcessOutcome) -> ProcessOutcome:
        return process_outcome.apply_failure_rules(self.observed.spec.run_policy.failure_rules, role, there, found)

    def _name(self, role: Role, index: int, number: int) -> str:
        return objects.process_name(self.observed.name, role, index, number)

    @cached_property
    def _refusals(self) -> dict[str, Refusal]:
        return {refusal.name: refusal for refusal in self.observed.refusals}


def _translated(status: JobStatus) -> JobStatus:
    """A status of the version before, which had no `internal.ready_time`, with that of a job that is ready."""
    ready = status.condition("Ready")
    if status.internal.ready_time is not None or status.ended or ready is None or ready.status != "True":
        return status
    internal = status.internal.model_copy(update={"ready_time": ready.last_transition_time})
    return status.model_copy(update={"internal": internal})


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


def current_progress(state: JobState) -> ProgressStatus | None:
    """How far training is; the stored numbers where shard 0 is out of reach."""
    step = told_integer(state.coordinator, "step")
    if step is None:
        return state.stored.progress
    told = state.coordinator
    at = state.observed.progress_at
    return ProgressStatus(
        step=step,
        mode=told_text(state, "mode") or None,
        loss=told_number(told, "loss"),
        steps_per_second=told_number(told, "rate"),
        eta_seconds=told_number(told, "eta"),
        codecs=told_text(state, "codecs") or None,
        transport=told_text(state, "transport") or None,
        time=stamp(state.now if at is None else at),
    )


def current_checkpoint(state: JobState) -> CheckpointStatus | None:
    """The last committed checkpoint; the stored one where shard 0 is out of reach."""
    told = state.coordinator.get("checkpoint")
    if not isinstance(told, Mapping):
        return state.stored.checkpoint
    step, time, path = told_integer(told, "step"), _made_at(state, told), told.get("path")
    if step is None or time is None:
        return state.stored.checkpoint
    kept = state.stored.checkpoint
    before = unix(kept.time) if kept is not None and kept.step == step else None
    if before is not None and abs(before - time) < SAME_SECONDS:
        time = before
    return CheckpointStatus(
        step=step,
        time=stamp(time),
        bytes=told_integer(told, "bytes"),
        path=path[:1024] if isinstance(path, str) else None,
        observed_request=told_integer(told, "observedRequest"),
    )


def _made_at(state: JobState, told: Mapping[str, Any]) -> float | None:
    """When a checkpoint was committed, by our clock: that of shard 0's node may be minutes ahead, and backoff counts from commits."""
    age, time = told_number(told, "age"), told_number(told, "time")
    if age is not None and 0 <= age < 1e11:
        first = state.shards[0].process if state.shards else None
        ended = first.exit.at if first is not None and first.exit is not None else state.observed.progress_at
        return max(0.0, min(state.now, state.now if ended is None else ended) - age)
    return min(time, state.now) if time is not None and 0 <= time < 1e11 else None


def checkpoint_unanswered(told: Mapping[str, Any] | None, request: int | None) -> bool:
    """Is a checkpoint asked for that shard 0's last answer does not tell of? False of a shard 0 that tells of no request at all."""
    job = (told or {}).get("coordinator")
    kept = job.get("checkpoint") if isinstance(job, Mapping) else None
    return request is not None and isinstance(kept, Mapping) and "observedRequest" in kept and kept["observedRequest"] != request


def checkpoint_known(state: JobState) -> bool:
    """A checkpoint beyond the first step was seen: a shard that finds none must say so, never start anew."""
    return any(kept is not None and kept.step > 0 for kept in (state.stored.checkpoint, current_checkpoint(state)))


def last_commit(state: JobState) -> float | None:
    """Unix time of the last commit."""
    kept = current_checkpoint(state)
    return unix(kept.time) if kept else None


def told_text(state: JobState, key: str) -> str:
    """A sentence of the coordinator, on one line; empty where it has none."""
    told = state.coordinator.get(key)
    return " ".join(told.split())[:200] if isinstance(told, str) else ""


def told_number(told: Mapping[str, Any], key: str) -> float | None:
    """A finite number of a report; None where it is none."""
    value = told.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or abs(value) > 1e300:
        return None
    return float(value)


def told_integer(told: Mapping[str, Any], key: str) -> int | None:
    """A whole number of a report; None where it is none."""
    value = told.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST else None


def pull_due(state: JobState, status: JobStatus) -> bool:
    """Shard 0 is worth asking now; how often is the backend's choice."""
    since = _pull_from(state, status)
    return since is not None and since <= state.now


def pull_at(state: JobState, status: JobStatus) -> float | None:
    """Unix time of the next question; None while shard 0 does not serve."""
    since = _pull_from(state, status)
    if since is None or since > state.now:
        return since
    pulled = (state.observed.progress_at or 0.0) + PROGRESS_SECONDS
    return pulled if pulled > state.now else state.now + PROGRESS_SECONDS


def _pull_from(state: JobState, status: JobStatus) -> float | None:
    first = state.shards[0] if state.shards else None
    if first is None or first.outcome.kind != "running" or not first.up:
        return None
    limited = state.observed.spec.workers.progress_deadline_seconds is not None
    if limited or status.internal.lost_time is not None or status.interruption is not None:
        return 0.0  # with a limit for steps it is asked again soon anyway
    ready = status.condition("Ready")
    since = unix(ready.last_transition_time) if ready else None
    return (since or 0.0) + (RUNNING_SECONDS if status.running else PENDING_SECONDS)
