"""Which changes of status are worth a write now (facts at once, words seldom, progress once a minute), and when to look next."""

from __future__ import annotations

from typing import Any

from psjob_operator.api.status import JobStatus
from psjob_operator.plan import endings, pairs, volumegroup
from psjob_operator.plan.facts import Facts
from psjob_operator.plan.progress import pull_at
from psjob_operator.plan.text import unix
from psjob_operator.plan.troubles import slow_at
from psjob_operator.plan.warnings import DEGRADED, OF_TRAINING, WAITING

COUNTERS_SECONDS = 10.0
WORDS_SECONDS = 60.0
PROGRESS_SECONDS = 60.0
TOLD = ("CheckpointReady", DEGRADED, *OF_TRAINING)
"""Conditions that come from progress."""
LEAVING = ("ClaimTerminating", "ClaimMissing")
"""Reasons of theirs that come from the API server: people have little time to answer them."""


def settle(facts: Facts, fresh: JobStatus) -> tuple[JobStatus, float | None]:
    """The status to store, which is the stored one while nothing is due, and when the next change is due."""
    stored = facts.snapshot.status
    if stored is None or facts.first_seen or _core(stored) != _core(fresh):
        return fresh, None
    if stored == fresh:
        return stored, None
    written = facts.snapshot.written_at
    dues: list[float] = []
    if _counters(stored) != _counters(fresh):
        dues.append(0.0 if written is None else written + COUNTERS_SECONDS)
    if _words(stored) != _words(fresh):
        dues.append(0.0 if written is None else written + WORDS_SECONDS)
    if _told(stored) != _told(fresh):
        told = unix(stored.progress.time) if stored.progress else None
        dues.append(0.0 if told is None else told + PROGRESS_SECONDS)
    if not dues:
        return stored, None
    due = min(dues)
    return (fresh, None) if due <= facts.now else (stored, due)


def wake_at(facts: Facts, status: JobStatus, *others: float | None) -> float | None:
    """The next unix time at which the plan of a job that has not ended would come out differently though nothing happened.

    It is the least of `others` (None: none) and of all that time alone brings about."""
    times = (
        *others,
        endings.deadline(facts, status.start_time),
        endings.pending_until(facts, status),
        slow_at(facts),
        pull_at(facts, status),
        volumegroup.moves_at(facts),
        pairs.moves_at(facts),
    )
    return min((at for at in times if at is not None and at > facts.now), default=None)


def _core(status: JobStatus) -> Any:
    return (
        status.observed_generation,
        status.phase,
        status.run,
        status.pinned,
        status.view,
        status.start_time,
        status.completion_time,
        status.restarts,
        (status.interruption, status.last_recovery),
        tuple((shard.index, shard.attempt) for shard in status.shards),
        (status.workers.desired, status.workers.start, status.workers.failed_indexes),
        tuple((problem.index, problem.reason) for problem in status.workers.problems),
        tuple((it.type, it.status, it.reason, it.observed_generation) for it in _plain(status)),
        [it.reason for it in status.conditions if it.type in TOLD and it.reason in LEAVING],
        status.checkpoint is None,
        status.checkpoint and status.checkpoint.observed_request,
        status.progress is None,
    )


def _counters(status: JobStatus) -> Any:
    workers = status.workers
    return (
        status.roles,
        status.shards_ready,
        status.workers_ready,
        tuple(stage.workers_ready for stage in status.stages or ()),
        workers.ready,
        workers.pending_starts,
        workers.succeeded_indexes,
        tuple((shard.state, shard.pod) for shard in status.shards),
        tuple(problem.pod for problem in workers.problems),
    )


def _words(status: JobStatus) -> Any:
    return tuple(it.message for it in _plain(status)), tuple(problem.message for problem in status.workers.problems)


def _told(status: JobStatus) -> Any:
    progress = status.progress.model_copy(update={"time": None}) if status.progress else None
    told = tuple((it.type, it.status, it.reason, it.message, it.observed_generation) for it in status.conditions if it.type in TOLD)
    waiting = tuple((it.reason, it.message) for it in status.conditions if it.type == "Ready" and it.reason == WAITING)
    return progress, status.stages, status.checkpoint, told, waiting


def _plain(status: JobStatus) -> list[Any]:
    """Conditions that do not come from progress; a running job that waits for a member is a running job."""
    plain = [it for it in status.conditions if it.type not in TOLD]
    return [it.model_copy(update={"reason": "Running", "message": ""}) if it.reason in (WAITING, "Running") else it for it in plain]
