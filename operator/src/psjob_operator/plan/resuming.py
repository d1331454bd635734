"""From which run a job goes on: `checkpoint.resumeFrom`. A job's name is looked up once, when the run begins; status.pinned keeps the run.

What is in the way is told and waited for: the other job may come later than this one, as under GitOps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psjob_operator.plan import objects
from psjob_operator.plan.facts import Facts

LOOK_SECONDS = 5.0
"""Until the other job is looked up again."""


def run_of(facts: Facts) -> str | None:
    """The run from whose last checkpoint this one begins. None where it begins anew, and while that run is not known."""
    pinned, asked = facts.stored.pinned, facts.snapshot.spec.checkpoint.resume_from
    if pinned is not None and pinned.resumed_from:
        return pinned.resumed_from
    if asked is None or asked.run:
        return None if asked is None else asked.run
    source = facts.snapshot.resume_source
    return None if source is None or waits(facts) else source.run


def waits(facts: Facts) -> tuple[str, str] | None:
    """(reason, sentence) of what is in the way of a job that goes on from another one by its name; None where nothing is."""
    snapshot, asked = facts.snapshot, facts.snapshot.spec.checkpoint.resume_from
    if asked is None or asked.job is None or (facts.stored.pinned is not None and facts.stored.pinned.resumed_from):
        return None
    source, said = snapshot.resume_source, f"spec.checkpoint.resumeFrom: job {asked.job}"
    if source is None:
        return "WaitingForJob", f"{said} is not there; this job begins when it is and has a checkpoint"
    if source.volume is None:
        return "CheckpointElsewhere", f"{said} keeps no checkpoints (spec.checkpoint.disabled); make this job anew without resumeFrom"
    mine = objects.volume(snapshot.name, snapshot.spec)
    if not _same(mine, source.volume):
        remedy = f"make this job anew with volume: {_written(source.volume)}"
        return "CheckpointElsewhere", f"{said} keeps its checkpoints on {_named(source.volume)}, this job on {_named(mine)}; {remedy}"
    if not source.run or not source.checkpoint:
        return "WaitingForJob", f"{said} has no checkpoint yet; this job begins when it has one"
    return None


def _same(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> bool:
    claims = [objects.claim_of(volume or {}) for volume in (one, other)]
    return claims[0] == claims[1] if all(claims) else one == other


def _named(volume: Mapping[str, Any] | None) -> str:
    if claim := objects.claim_of(volume or {}):
        return f"claim {claim}"
    return f"a volume of kind {', '.join(volume or ()) or 'none'}"


def _written(volume: Mapping[str, Any]) -> str:
    if claim := objects.claim_of(volume):
        return f"{{persistentVolumeClaim: {{claimName: {claim}}}}}"
    return f"{{{', '.join(volume)}: as there}}"
