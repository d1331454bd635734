"""What ends a job as Failed, apart from its deadline."""

from __future__ import annotations

from psjob_operator.plan import success
from psjob_operator.plan.backoff import counted
from psjob_operator.plan.ending import Ending
from psjob_operator.plan.explain import explain
from psjob_operator.plan.facts import Facts, Seat
from psjob_operator.plan.progress import progress

TEMPLATE_REFUSED = (400, 422)


def invalid(facts: Facts) -> Ending | None:
    """A new job whose spec has a fault that only the operator can see."""
    if facts.first_seen and facts.snapshot.spec_problems:
        return Ending("Failed", "TemplateInvalid", "; ".join(facts.snapshot.spec_problems))
    return None


def fatal(facts: Facts) -> Ending | None:
    """The first of: a template that the API server refuses, a process that says going on is no use, a shard lost without
    checkpoints, a worker that ended too late without them, one counted failure more than backoffLimit."""
    if facts.first_seen:
        return None
    for seat in facts.shards if success.met(facts) else facts.seats:
        if seat.may_create and seat.refusal is not None and seat.refusal.code in TEMPLATE_REFUSED:
            return Ending("Failed", "TemplateInvalid", f"the API server refuses the pod of {seat}: {seat.refusal.message}")
        if seat.fate.kind == "fatal":
            return Ending("Failed", seat.fate.cause, f"{seat}: {seat.fate.message or 'said so by its exit code'}")
    return _lost_for_good(facts) or _too_often(facts)


def _lost_for_good(facts: Facts) -> Ending | None:
    if not facts.snapshot.spec.checkpoint.disabled:
        return None
    ran = facts.stored.phase in ("Running", "Recovering") or progress(facts) is not None
    for seat in facts.shards:
        began = seat.process is not None and seat.process.started is not None
        lost = seat.fate.kind == "lost" and (began or ran)
        vanished = seat.fate.kind == "absent" and not seat.may_create and ran and facts.snapshot.live
        if lost or vanished:
            words = f"{seat} was lost ({_why(seat)}) and spec.checkpoint.disabled is true: its parameters are gone"
            return Ending("Failed", "ShardLost", words)
    late = [*(seat for seat in facts.workers if seat.fate.kind == "lost"), *success.too_late(facts)] if success.shards_done(facts) else []
    if late:
        words = f"{late[0]} ({_why(late[0]) or 'started again'}) is not through, the shards are, and spec.checkpoint.disabled is true: "
        return Ending("Failed", "WorkerFailed", words + "nothing is left that could tell it so")
    return None


def _too_often(facts: Facts) -> Ending | None:
    limit = facts.snapshot.spec.run_policy.backoff_limit
    failed = [seat for seat in facts.seats if seat.fate.counted and not (seat.role == "worker" and success.met(facts))]
    total = counted(facts) + len(failed)
    if not failed or total <= limit:
        return None
    last = failed[-1]
    return Ending("Failed", "BackoffLimitExceeded", f"{last}, {explain(facts, last, total)}")


def _why(seat: Seat) -> str:
    return seat.fate.message or seat.fate.cause
