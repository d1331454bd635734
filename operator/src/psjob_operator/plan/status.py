"""The status of a job from what is known of it now, and which of its changes are worth a write.

`running_status` makes the status. `with_recovery` adds how long training was interrupted, from the loss to the first step that all pass.
`settle` decides about the write: facts at once, words seldom, progress once a minute. `wake_at` says when to look next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from psjob_operator.api.status import (
    LARGEST,
    Internal,
    Interruption,
    JobStatus,
    Recovery,
    RoleStatus,
    ShardState,
    ShardStatus,
    StageStatus,
    WorkerProblem,
    WorkersStatus,
    index_text,
    named_indexes,
    plural,
    short,
    stamp,
    stamp_exact,
    starts_text,
    unix,
    with_phase,
)
from psjob_operator.plan import objects, placement, pods
from psjob_operator.plan.actions import Event
from psjob_operator.plan.conditions import (
    DEGRADED,
    OF_TRAINING,
    WAITING,
    Say,
    Trouble,
    explain_failure,
    ready_condition,
    resumed_conditions,
    slow_at,
    starting_conditions,
    warning_conditions,
    with_times,
)
from psjob_operator.plan.job_state import (
    PROGRESS_SECONDS,
    JobState,
    Seat,
    current_checkpoint,
    current_progress,
    pull_at,
    told_integer,
    told_number,
    told_text,
)
from psjob_operator.plan.observed_state import Role
from psjob_operator.plan.restarts import RestartDecision, cause, counted, counting, restarts

PROBLEMS = 8
CONTENDED_SECONDS = 1800.0
"""So long a word that another operator writes too stands, if nobody says it again."""


STAGE_WAITS, STAGE_WAIT_LENGTH = 8, 160
"""The first stages that wait say for what, each in so many characters: a job has up to 64."""
COUNTERS_SECONDS = 10.0
WORDS_SECONDS = 60.0
TOLD = ("CheckpointReady", DEGRADED, *OF_TRAINING)
"""Conditions that come from progress."""
LEAVING = ("ClaimTerminating", "ClaimMissing")
"""Reasons of theirs that come from the API server: people have little time to answer them."""
EACH_ITS_OWN = ("async", "bounded")
"""Modes in which workers do not go back together: what a lost shard had applied since the checkpoint is gone, and no step is done again."""
RECOVERED = "Recovered"
TOLD_SECONDS = 1.0
"""After the first step, until which all shards have told the coordinator what they lost."""
SLACK_SECONDS = 0.5
"""The first step is dated by the age that shard 0 tells, and the answer took a while."""


def running_status(
    state: JobState, decision: RestartDecision, troubles: tuple[Trouble, ...], blocked: tuple[str, str] | None = None
) -> JobStatus:
    """The status of a job that runs. `blocked`: (reason, sentence) why nothing may be created; None when that is not so."""
    up = not decision.raised and not blocked and all(seat.up for seat in state.shards)
    up = up and (state.success_met or all(seat.up for seat in state.workers))
    status = describe(state, decision, _said(state, decision, troubles, blocked, up), troubles)
    internal = status.internal.model_copy(update=_ready_and_lost(state, decision, up))
    started = stamp(state.now) if decision.afresh or not status.start_time else status.start_time
    return status.model_copy(update={"internal": internal, "start_time": started})


def describe(state: JobState, decision: RestartDecision, said: Mapping[str, Say], troubles: tuple[Trouble, ...] = ()) -> JobStatus:
    """The whole status of a job but for its phase. `said`: its conditions, without CheckpointReady and those of warnings."""
    spec, stored, generation = state.observed.spec, state.stored, state.observed.generation
    trains = said["Ready"].status == "True" and "Complete" not in said
    beside = {**resumed_conditions(stored.conditions, bool(spec.suspend)), **warning_conditions(state, trains)}
    return JobStatus(
        observed_generation=generation,
        conditions=with_times(
            {**beside, **said, **_checkpoint_said(state), **_contended_said(state)}, stored.conditions, generation, state.now
        ),
        run=state.observed.uid,
        internal=Internal(
            term=decision.term or None,
            placed_term=decision.volume_group,
            worker_start=decision.start,
            pending_starts=starts_text(_pending(state, decision)),
            ready_time=stored.internal.ready_time,
            lost_time=stored.internal.lost_time,
            pinned=pods.pinned(state, decision.afresh),
        ),
        shards=_shards(state, decision),
        roles=(_role("shard", state.shards, decision), workers := _role("worker", state.workers, decision)),
        replicas=workers.active,
        selector=None if state.observed.one_machine else objects.worker_selector(state.observed),
        shards_ready=f"{sum(seat.up and not decision.is_raised(seat) for seat in state.shards)}/{spec.shards.replicas}",
        workers=_workers(state, decision, troubles),
        workers_ready=f"{sum(seat.up and not decision.is_raised(seat) for seat in state.workers)}/{spec.workers.replicas}",
        stages=(parts := stage_entries(state, decision)),
        stages_ready=stages_ready(parts),
        checkpoint=current_checkpoint(state),
        progress=current_progress(state),
        last_recovery=stored.last_recovery,
        restarts=restarts(state, decision),
        start_time=stored.start_time,
    )


def recovering(state: JobState, decision: RestartDecision) -> str:
    """What is started again, and why; what was said before holds until something else happens."""
    if not decision.raised:
        kept = state.stored.condition("Ready")
        return kept.message if kept and kept.reason == "Recovering" else "processes are starting again"
    parts = []
    for role, what in (("shard", "restored from the last checkpoint"), ("worker", "started again")):
        seats = [seat for seat in decision.raised if seat.role == role]
        if seats:
            causes = ", ".join(sorted({_why(seat) for seat in seats}))
            parts.append(f"{named_indexes(role, [seat.index for seat in seats])} {'is' if len(seats) == 1 else 'are'} {what} ({causes})")
    failed = [seat for seat in decision.raised if seat.outcome.counted]
    if failed:
        which = "" if len(decision.raised) == 1 else f"{failed[0]}, "
        parts.append(which + explain_failure(state, failed[0], counted(state) + len(counting(state, failed).new)))
    return "; ".join(parts)


def _why(seat: Seat) -> str:
    """The cause, and the rule that decided whether it counts."""
    cause = seat.outcome.cause or "Finished"
    return cause if seat.outcome.rule is None else f"{cause}, podFailurePolicy.rules[{seat.outcome.rule}]"


def _role(name: Role, seats: Sequence[Seat], decision: RestartDecision) -> RoleStatus:
    kept = [seat for seat in seats if not decision.is_raised(seat)]
    kinds = Counter(seat.outcome.kind for seat in kept)
    return RoleStatus(
        name=name,
        desired=len(seats),
        active=kinds["waiting"] + kinds["running"],
        ready=sum(seat.up and seat.outcome.kind == "running" for seat in kept),
        succeeded=kinds["done"],
        failed=kinds["lost"] + kinds["fatal"],
    )


def _shards(state: JobState, decision: RestartDecision) -> tuple[ShardStatus, ...]:
    """One entry a shard, those that the spec no longer has included: the list never shrinks. None for a shard that never had a number."""
    seats, before = {seat.index: seat for seat in state.shards}, {shard.index: shard for shard in state.stored.shards}
    entries = []
    for index, attempt in enumerate(decision.attempts):
        seat = seats.get(index)
        shard_state: ShardState = _state(seat, decision) if seat else "Lost"
        kept = before.get(index)
        if kept and kept.attempt == attempt and kept.state not in get_args(ShardState) and shard_state in ("Pending", "Starting"):
            shard_state = kept.state
        if not attempt:
            break
        pod = objects.process_name(state.observed.name, "shard", index, attempt) if seat else None
        entries.append(ShardStatus(index=index, attempt=attempt, state=shard_state, pod=pod))
    return tuple(entries)


def _workers(state: JobState, decision: RestartDecision, troubles: tuple[Trouble, ...]) -> WorkersStatus:
    """The workers, counted, and the first problems."""
    job = state.observed.name
    problems = [trouble for trouble in troubles if trouble.seat.role == "worker"][:PROBLEMS]
    return WorkersStatus(
        desired=state.observed.spec.workers.replicas,
        ready=sum(seat.outcome.kind == "running" and not decision.is_raised(seat) for seat in state.workers),
        succeeded_indexes=index_text(seat.index for seat in state.workers if seat.outcome.kind == "done"),
        problems=tuple(
            WorkerProblem(index=it.seat.index, pod=decision.name(job, it.seat), reason=it.reason, message=short(it.message))
            for it in problems
        ),
    )


def _pending(state: JobState, decision: RestartDecision) -> dict[int, int]:
    """Workers whose present start was not seen yet."""
    unseen = (seat for seat in state.workers if seat.outcome.kind == "absent" or decision.is_raised(seat))
    return {seat.index: decision.number(seat) for seat in unseen}


def _checkpoint_said(state: JobState) -> dict[str, Say]:
    """CheckpointReady: whether training could continue from disk."""
    if state.observed.spec.checkpoint.disabled:
        return {"CheckpointReady": Say("False", "Disabled", "spec.checkpoint.disabled is true: a lost shard fails the job")}
    if leaving := objects.leaving(state.observed):
        return {"CheckpointReady": Say("False", *leaving)}
    waits = objects.unbound(state.observed)
    if waits:
        return {"CheckpointReady": Say("False", "ClaimPending", waits)}
    problem = told_text(state, "checkpointProblem")
    if problem:
        return {"CheckpointReady": Say("False", "CheckpointProblem", problem)}
    kept = state.stored.condition("CheckpointReady")
    if kept and kept.reason == "CheckpointProblem" and not state.coordinator:
        return {"CheckpointReady": Say(kept.status, kept.reason, kept.message)}
    if current_checkpoint(state) is not None:
        return {"CheckpointReady": Say("True", "Committed", "a lost shard restores the last checkpoint")}
    return {}


def _contended_said(state: JobState) -> dict[str, Say]:
    """Contended: another operator writes this job's objects. The one whose words stand may not notice, and keeps the other's condition."""
    words, kept = state.observed.contended, state.stored.condition("Contended")
    since = unix(kept.last_transition_time) if kept is not None else None
    if kept is not None and (words or (since is not None and state.now < since + CONTENDED_SECONDS)):
        # Unchanged: each of the two may name other objects, and they would write this in turns too.
        return {"Contended": Say(kept.status, kept.reason, kept.message)}
    return {"Contended": Say("True", "OtherWriter", words)} if words else {}


def _ready_and_lost(state: JobState, decision: RestartDecision, up: bool) -> dict[str, str | None]:
    """The two times of `internal`. `up`: all processes are there."""
    stored, now = state.stored.internal, stamp(state.now)
    if up:
        return {"ready_time": stored.ready_time or now, "lost_time": None}
    if decision.afresh or not state.has_run:
        return {"ready_time": None, "lost_time": None}
    return {"ready_time": stored.ready_time, "lost_time": stored.lost_time or now}


def _said(
    state: JobState, decision: RestartDecision, troubles: tuple[Trouble, ...], blocked: tuple[str, str] | None, up: bool
) -> dict[str, Say]:
    if blocked:
        return starting_conditions(*blocked)
    if up:
        return ready_condition(state)
    around = objects.object_refusal(state.observed, pods.pinned(state, decision.afresh))
    if around:
        return starting_conditions("CreateRefused", around)
    if troubles:
        first = troubles[0]
        return starting_conditions(first.reason, f"{first.seat}: {first.message}" if first.message else str(first.seat))
    if leaving := objects.leaving(state.observed):
        return starting_conditions(*leaving)
    waits = objects.unbound(state.observed)
    if waits:
        return starting_conditions("ClaimPending", waits)
    if state.has_run and not decision.afresh:
        return starting_conditions("Recovering", recovering(state, decision))
    spec = state.observed.spec
    return starting_conditions(
        "Starting", f"{plural(spec.shards.replicas, 'shard')} and {plural(spec.workers.replicas, 'worker')} are starting"
    )


def _state(seat: Seat, decision: RestartDecision) -> ShardState:
    if decision.is_raised(seat) or seat.outcome.kind == "absent":
        return "Pending"
    if seat.outcome.kind == "done":
        return "Finished"
    if seat.outcome.kind in ("lost", "fatal"):
        return "Lost"
    if seat.outcome.kind == "waiting":
        return "Pending"
    return "Serving" if seat.up else "Starting"


def stage_entries(state: JobState, decision: RestartDecision) -> tuple[StageStatus, ...] | None:
    """One entry a stage, None of a job without stages; of one that shard 0 does not tell now, the stored numbers, and no wait."""
    told, before = _told_stages(state), {stage.name: stage for stage in state.stored.stages or ()}
    entries: list[StageStatus] = []
    first = 0
    for place, stage in enumerate(state.observed.spec.stages or ()):
        seats = state.workers[first : first + stage.replicas]
        first += stage.replicas
        ready = f"{sum(seat.up and not decision.is_raised(seat) for seat in seats)}/{stage.replicas}"
        said = told[place] if place < len(told) else None
        if said is not None and said.get("name") == stage.name:
            waits = sum(entry.waiting is not None for entry in entries) < STAGE_WAITS
            entries.append(_measured(stage.name, ready, said, waits))
        else:
            kept = before.get(stage.name, StageStatus(name=stage.name))
            entries.append(kept.model_copy(update={"workers_ready": ready, "waiting": None}))
    return tuple(entries) or None


def stages_ready(parts: Sequence[StageStatus] | None) -> str | None:
    """How many of them have all their workers; None of a job without stages."""
    if not parts:
        return None
    whole = [ready for ready, _, wanted in (part.workers_ready.partition("/") for part in parts) if ready == wanted]
    return f"{len(whole)}/{len(parts)}"


def _told_stages(state: JobState) -> list[Mapping[str, Any] | None]:
    told = state.coordinator.get("stages")
    return [one if isinstance(one, Mapping) else None for one in told] if isinstance(told, list) else []


def _measured(name: str, ready: str, said: Mapping[str, Any], waits: bool) -> StageStatus:
    """`waits`: what it waits for is told too. Nothing that a pod says is believed unread."""
    idle, delay, waiting = told_number(said, "idle"), told_number(said, "delay"), said.get("waiting")
    return StageStatus(
        name=name,
        workers_ready=ready,
        step=told_integer(said, "step"),
        staleness=None if delay is None or delay < 0 else round(delay, 2),
        idle_fraction=None if idle is None else round(min(1.0, max(0.0, idle)), 3),
        memory_bytes=told_integer(said, "rssBytes"),
        peak_memory_bytes=told_integer(said, "peakBytes"),
        peak_device_bytes=told_integer(said, "devicePeakBytes"),
        waiting=short(waiting, STAGE_WAIT_LENGTH) if waits and isinstance(waiting, str) and waiting.strip() else None,
    )


def settle(state: JobState, fresh: JobStatus) -> tuple[JobStatus, float | None]:
    """The status to store, which is the stored one while nothing is due, and when the next change is due."""
    stored, fresh = state.observed.status, with_phase(fresh)
    if stored is None or state.first_seen or _core(stored) != _core(fresh):
        return fresh, None
    if stored == fresh:
        return stored, None
    written = state.observed.written_at
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
    return (fresh, None) if due <= state.now else (stored, due)


def wake_at(state: JobState, status: JobStatus, *others: float | None) -> float | None:
    """The next unix time at which the plan of a job that has not ended would come out differently though nothing happened.

    It is the least of `others` (None: none) and of all that only time brings about."""
    times = (
        *others,
        deadline(state, status.start_time),
        pending_until(state, status),
        slow_at(state),
        pull_at(state, status),
        placement.group_moves_at(state),
        placement.pair_moves_at(state),
    )
    return min((at for at in times if at is not None and at > state.now), default=None)


def deadline(state: JobState, start_time: str | None) -> float | None:
    """Unix time at which activeDeadlineSeconds ends a job active since `start_time`; None without one, or while it is not active."""
    seconds = state.observed.spec.run_policy.active_deadline_seconds
    begun = unix(start_time)
    return begun + seconds if seconds is not None and begun is not None else None


def pending_until(state: JobState, status: JobStatus) -> float | None:
    """Unix time at which pendingTimeoutSeconds ends a job that lacks processes; None without one, or while it has them all."""
    seconds, ready = state.observed.spec.run_policy.pending_timeout_seconds, status.condition("Ready")
    since = unix(ready.last_transition_time) if ready is not None and ready.status == "False" else None
    if seconds is None or since is None or status.running or status.suspended:
        return None
    return since + seconds


def _core(status: JobStatus) -> Any:
    return (
        status.observed_generation,
        status.phase,
        status.run,
        (status.internal.pinned, status.internal.term, status.internal.worker_start),
        (status.internal.ready_time, status.internal.lost_time),
        status.start_time,
        status.completion_time,
        status.restarts,
        (status.interruption, status.last_recovery),
        tuple((shard.index, shard.attempt) for shard in status.shards),
        (status.workers.desired, status.workers.failed_indexes),
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
        status.internal.pending_starts,
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


def with_recovery(state: JobState, decision: RestartDecision, status: JobStatus) -> JobStatus:
    """The status of a job that runs, with the interruption that begins, lasts or is over."""
    began = decision.raised and not decision.afresh and state.has_run
    interruption = _begun(state, decision) if began else None if decision.afresh else state.stored.interruption
    if interruption is None or not status.running:
        return status.model_copy(update={"interruption": interruption})
    resumed = _Resumed.read(state)
    if resumed is None or not resumed.is_after(interruption, decision):
        untold = bool(state.coordinator) and "resumed" not in state.coordinator
        return status.model_copy(update={"interruption": None if untold else interruption})
    return _over(state, decision, status, interruption, resumed)


def recovered(before: JobStatus, status: JobStatus) -> tuple[Event, ...]:
    """The Event of a recovery that is over now."""
    last = status.last_recovery
    if last is None or last == before.last_recovery:
        return ()
    cost = (
        f"{plural(last.steps_lost, 'step')} done again"
        if last.steps_lost is not None
        else f"{plural(last.updates_lost or 0, 'update')} lost"
    )
    return (Event("Normal", RECOVERED, f"training continues {last.duration_seconds:g} s after the loss was seen ({last.cause}), {cost}"),)


def _begun(state: JobState, decision: RestartDecision) -> Interruption:
    """A second loss before the first step is of the same interruption, as far as shard 0 could be asked for that step."""
    known, asked = state.stored.interruption, state.observed.progress_at
    if known is not None:
        since = unix(known.since) or state.now
        if state.stored.internal.lost_time is not None or (asked is not None and asked > since):
            return known
    ready = state.stored.condition("Ready")
    waited = unix(ready.last_transition_time) if ready is not None and ready.status == "False" else None
    step = told_integer(state.coordinator, "step")
    before = state.stored.progress.step if state.stored.progress is not None else None
    return Interruption(
        since=stamp_exact(state.now if waited is None else min(waited, state.now)),
        cause=cause(decision.raised[0]),
        step=before if step is None else step,
        attempt=state.attempts[0],
        steps_lost=told_integer(state.coordinator, "stepsLost") or 0,
        updates_lost=told_integer(state.coordinator, "updatesLost") or 0,
    )


@dataclass(frozen=True)
class _Resumed:
    """The first step after the last interruption that shard 0 has seen."""

    term: int
    start: int
    from_step: int
    at: float
    """Unix time, by our clock."""

    @classmethod
    def read(cls, state: JobState) -> _Resumed | None:
        """What a pod says; None where it is not told, or not in shape."""
        told, asked = state.coordinator.get("resumed"), state.observed.progress_at
        ended = state.shards[0].process is None or state.shards[0].process.exit is not None
        if not isinstance(told, Mapping) or asked is None or ended:
            return None
        term, start, from_step, age = (
            told_integer(told, "term"),
            told_integer(told, "start"),
            told_integer(told, "from"),
            told_number(told, "age"),
        )
        if term is None or start is None or from_step is None or age is None or age < 0:
            return None
        return cls(term, start, from_step, asked - age) if age >= TOLD_SECONDS else None

    def is_after(self, interruption: Interruption, decision: RestartDecision) -> bool:
        """Were all processes there that were started again?"""
        since = unix(interruption.since)
        return self.term >= decision.term and self.start >= decision.start and since is not None and self.at >= since - SLACK_SECONDS


def _over(state: JobState, decision: RestartDecision, status: JobStatus, interruption: Interruption, resumed: _Resumed) -> JobStatus:
    same = interruption.attempt == decision.attempts[0]  # another process of shard 0 counts from 0
    steps = (told_integer(state.coordinator, "stepsLost") or 0) - (interruption.steps_lost if same else 0)
    updates = (told_integer(state.coordinator, "updatesLost") or 0) - (interruption.updates_lost if same else 0)
    together = told_text(state, "mode").partition(":")[0] not in EACH_ITS_OWN
    # Where all processes went at once nobody is left who knows how far they were, but for whoever asked before.
    steps = max(steps, 0 if interruption.step is None else interruption.step - resumed.from_step, 0) if together else 0
    updates = 0 if together else max(updates, 0)
    last = Recovery(
        cause=interruption.cause,
        duration_seconds=round(max(0.0, resumed.at - (unix(interruption.since) or resumed.at)), 1),
        steps_lost=steps if together else None,
        updates_lost=None if together else updates,
        time=stamp(resumed.at),
    )
    restarts = status.restarts
    # Shard 0 says how many; the sum stays one that the status can hold.
    total = {"steps_lost": min(restarts.steps_lost + steps, LARGEST), "updates_lost": min(restarts.updates_lost + updates, LARGEST)}
    return status.model_copy(update={"interruption": None, "last_recovery": last, "restarts": restarts.model_copy(update=total)})
