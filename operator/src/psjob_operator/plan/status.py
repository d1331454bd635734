"""The status of a job, from what is known of it now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import get_args

from psjob_operator.api.status import JobStatus, Phase, RoleStatus, ShardState, ShardStatus, WorkerProblem, WorkersStatus
from psjob_operator.plan import naming, objects, pins, warnings
from psjob_operator.plan.conditions import Say, conditions, resumed, starting
from psjob_operator.plan.facts import Facts, Seat
from psjob_operator.plan.incidents import counting
from psjob_operator.plan.progress import checkpoint, progress, text
from psjob_operator.plan.restarts import Raising, counted, restarts
from psjob_operator.plan.snapshot import Role
from psjob_operator.plan.stages import stages, stages_ready
from psjob_operator.plan.text import count, index_text, named, short, stamp, starts_text, unix
from psjob_operator.plan.troubles import Trouble, explain

PROBLEMS = 8
CONTENDED_SECONDS = 1800.0
"""So long a word that another operator writes too stands, if nobody says it again."""


def report(facts: Facts, raising: Raising, troubles: tuple[Trouble, ...], blocked: tuple[str, str] | None = None) -> JobStatus:
    """The status of a job that runs. `blocked`: (reason, sentence) why nothing may be created; None when that is not so."""
    up = not raising.raised and not blocked and all(seat.up for seat in facts.shards)
    up = up and (facts.success_met or all(seat.up for seat in facts.workers))
    phase = _phase(facts, raising, up)
    status = describe(facts, raising, phase, _said(facts, raising, troubles, blocked, phase), troubles)
    return status.model_copy(update={"start_time": stamp(facts.now)}) if raising.afresh or not status.start_time else status


def describe(facts: Facts, raising: Raising, phase: Phase, said: Mapping[str, Say], troubles: tuple[Trouble, ...] = ()) -> JobStatus:
    """The whole status of a job in `phase`. `said`: its conditions, without CheckpointReady and those of warnings."""
    spec, stored, generation = facts.snapshot.spec, facts.stored, facts.snapshot.generation
    trains = phase == "Running" and said["Ready"].status == "True"
    beside = {**resumed(stored.conditions, bool(spec.suspend)), **warnings.warnings(facts, trains)}
    return JobStatus(
        observed_generation=generation,
        phase=phase,
        conditions=conditions(
            {**beside, **said, **_checkpoint_said(facts), **_contended_said(facts)}, stored.conditions, generation, facts.now
        ),
        run=facts.snapshot.uid,
        pinned=pins.pinned(facts, raising.afresh),
        view=raising.view or None,
        placement=raising.volume_group,
        shards=_shards(facts, raising),
        roles=(_role("shard", facts.shards, raising), _role("worker", facts.workers, raising)),
        shards_ready=f"{sum(seat.up and not raising.is_raised(seat) for seat in facts.shards)}/{spec.ps.shards}",
        workers=_workers(facts, raising, troubles),
        workers_ready=f"{sum(seat.up and not raising.is_raised(seat) for seat in facts.workers)}/{spec.workers.replicas}",
        stages=(parts := stages(facts, raising)),
        stages_ready=stages_ready(parts),
        checkpoint=checkpoint(facts),
        progress=progress(facts),
        last_recovery=stored.last_recovery,
        restarts=restarts(facts, raising),
        start_time=stored.start_time,
    )


def recovering(facts: Facts, raising: Raising) -> str:
    """What is started again, and why; what was said before holds until something else happens."""
    if not raising.raised:
        kept = facts.stored.condition("Ready")
        return kept.message if kept and kept.reason == "Recovering" else "processes are starting again"
    parts = []
    for role, what in (("shard", "restored from the last checkpoint"), ("worker", "started again")):
        seats = [seat for seat in raising.raised if seat.role == role]
        if seats:
            causes = ", ".join(sorted({_why(seat) for seat in seats}))
            parts.append(f"{named(role, [seat.index for seat in seats])} {'is' if len(seats) == 1 else 'are'} {what} ({causes})")
    failed = [seat for seat in raising.raised if seat.fate.counted]
    if failed:
        which = "" if len(raising.raised) == 1 else f"{failed[0]}, "
        parts.append(which + explain(facts, failed[0], counted(facts) + len(counting(facts, failed).new)))
    return "; ".join(parts)


def _why(seat: Seat) -> str:
    """The cause, and the rule that decided whether it counts."""
    cause = seat.fate.cause or "Finished"
    return cause if seat.fate.rule is None else f"{cause}, failureRules[{seat.fate.rule}]"


def _role(name: Role, seats: Sequence[Seat], raising: Raising) -> RoleStatus:
    kept = [seat for seat in seats if not raising.is_raised(seat)]
    kinds = Counter(seat.fate.kind for seat in kept)
    return RoleStatus(
        name=name,
        desired=len(seats),
        active=kinds["waiting"] + kinds["running"],
        ready=sum(seat.up and seat.fate.kind == "running" for seat in kept),
        succeeded=kinds["done"],
        failed=kinds["lost"] + kinds["fatal"],
    )


def _shards(facts: Facts, raising: Raising) -> tuple[ShardStatus, ...]:
    """One entry a shard, those that the spec no longer has included: the list never shrinks. None for a shard that never had a number."""
    seats, before = {seat.index: seat for seat in facts.shards}, {shard.index: shard for shard in facts.stored.shards}
    entries = []
    for index, attempt in enumerate(raising.attempts):
        seat = seats.get(index)
        state: ShardState = _state(seat, raising) if seat else "Lost"
        kept = before.get(index)
        if kept and kept.attempt == attempt and kept.state not in get_args(ShardState) and state in ("Pending", "Starting"):
            state = kept.state
        if not attempt:
            break
        pod = naming.process(facts.snapshot.name, "shard", index, attempt) if seat else None
        entries.append(ShardStatus(index=index, attempt=attempt, state=state, pod=pod))
    return tuple(entries)


def _workers(facts: Facts, raising: Raising, troubles: tuple[Trouble, ...]) -> WorkersStatus:
    """The workers, counted, and the first problems."""
    job = facts.snapshot.name
    problems = [trouble for trouble in troubles if trouble.seat.role == "worker"][:PROBLEMS]
    return WorkersStatus(
        desired=facts.snapshot.spec.workers.replicas,
        ready=sum(seat.fate.kind == "running" and not raising.is_raised(seat) for seat in facts.workers),
        start=raising.start,
        pending_starts=starts_text(_pending(facts, raising)),
        succeeded_indexes=index_text(seat.index for seat in facts.workers if seat.fate.kind == "done"),
        problems=tuple(
            WorkerProblem(index=it.seat.index, pod=raising.name(job, it.seat), reason=it.reason, message=short(it.message))
            for it in problems
        ),
    )


def _pending(facts: Facts, raising: Raising) -> dict[int, int]:
    """Workers whose present start was not seen yet."""
    unseen = (seat for seat in facts.workers if seat.fate.kind == "absent" or raising.is_raised(seat))
    return {seat.index: raising.number(seat) for seat in unseen}


def _checkpoint_said(facts: Facts) -> dict[str, Say]:
    """CheckpointReady: whether training could go on from disk."""
    if facts.snapshot.spec.checkpoint.disabled:
        return {"CheckpointReady": Say("False", "Disabled", "spec.checkpoint.disabled is true: a lost shard fails the job")}
    if leaving := objects.leaving(facts.snapshot):
        return {"CheckpointReady": Say("False", *leaving)}
    waits = objects.unbound(facts.snapshot)
    if waits:
        return {"CheckpointReady": Say("False", "ClaimPending", waits)}
    problem = text(facts, "checkpointProblem")
    if problem:
        return {"CheckpointReady": Say("False", "CheckpointProblem", problem)}
    kept = facts.stored.condition("CheckpointReady")
    if kept and kept.reason == "CheckpointProblem" and not facts.coordinator:
        return {"CheckpointReady": Say(kept.status, kept.reason, kept.message)}
    if checkpoint(facts) is not None:
        return {"CheckpointReady": Say("True", "Committed", "a lost shard restores the last checkpoint")}
    return {}


def _contended_said(facts: Facts) -> dict[str, Say]:
    """Contended: another operator writes this job's objects. The one whose words stand may not notice, and keeps the other's condition."""
    words, kept = facts.snapshot.contended, facts.stored.condition("Contended")
    since = unix(kept.last_transition_time) if kept is not None else None
    if kept is not None and (words or (since is not None and facts.now < since + CONTENDED_SECONDS)):
        # Unchanged: each of the two may name other objects, and they would write this in turns too.
        return {"Contended": Say(kept.status, kept.reason, kept.message)}
    return {"Contended": Say("True", "OtherWriter", words)} if words else {}


def _phase(facts: Facts, raising: Raising, up: bool) -> Phase:
    if up:
        return "Running"
    if raising.afresh or not facts.has_run:
        return "Pending"
    # A word of a newer operator stands until something is seen that this one has a word for.
    return "Recovering" if raising.raised or facts.stored.phase in (None, "Running") else facts.stored.phase


def _said(facts: Facts, raising: Raising, troubles: tuple[Trouble, ...], blocked: tuple[str, str] | None, phase: Phase) -> dict[str, Say]:
    if blocked:
        return starting(*blocked)
    if phase == "Running":
        return warnings.ready(facts)
    around = objects.refused(facts.snapshot, pins.pinned(facts, raising.afresh))
    if around:
        return starting("CreateRefused", around)
    if troubles:
        first = troubles[0]
        return starting(first.reason, f"{first.seat}: {first.message}" if first.message else str(first.seat))
    if leaving := objects.leaving(facts.snapshot):
        return starting(*leaving)
    waits = objects.unbound(facts.snapshot)
    if waits:
        return starting("ClaimPending", waits)
    if phase == "Recovering":
        return starting("Recovering", recovering(facts, raising))
    spec = facts.snapshot.spec
    return starting("Starting", f"{count(spec.ps.shards, 'shard')} and {count(spec.workers.replicas, 'worker')} are starting")


def _state(seat: Seat, raising: Raising) -> ShardState:
    if raising.is_raised(seat) or seat.fate.kind == "absent":
        return "Pending"
    if seat.fate.kind == "done":
        return "Finished"
    if seat.fate.kind in ("lost", "fatal"):
        return "Lost"
    if seat.fate.kind == "waiting":
        return "Pending"
    return "Serving" if seat.up else "Starting"
