"""The conditions of a job, in a fixed order, in the ways that kstatus, Argo CD and `kubectl wait` read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from psjob_operator.api.status import Condition
from psjob_operator.plan.text import short, stamp

ORDER = (
    "Ready",
    "Reconciling",
    "Stalled",
    "Suspended",
    "Complete",
    "Failed",
    "CheckpointReady",
    "Degraded",
    "Diverged",
    "WorkersDiffer",
    "BuffersDiffer",
    "DataNotSharded",
    "NonFiniteGradients",
    "LargePushes",
    "LearningRateHigh",
    "Contended",
)
OF_THE_PHASE = ("Ready", "Reconciling", "Stalled", "Complete", "Failed")
"""Types that are told anew each time: absent means False. All others stay, once they were told."""


@dataclass(frozen=True)
class Say:
    """One condition without its times."""

    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str


def starting(reason: str, message: str) -> dict[str, Say]:
    """Processes are made, start, restore or wait for something."""
    return {"Ready": Say("False", reason, message), "Reconciling": Say("True", reason, message)}


def running(reason: str, message: str) -> dict[str, Say]:
    """All that was declared is there."""
    return {"Ready": Say("True", reason, message)}


def suspended(message: str) -> dict[str, Say]:
    """Suspended, with no process left."""
    return {"Ready": Say("False", "Suspended", message), "Suspended": Say("True", "Suspended", message)}


def resumed(before: tuple[Condition, ...], wanted: bool) -> dict[str, Say]:
    """Suspended of a job that has processes or has ended, and was suspended once; nothing of any other. `wanted`: the spec asks for it."""
    if not any(condition.type == "Suspended" for condition in before):
        return {}
    if wanted:
        return {"Suspended": Say("False", "NotSuspended", "spec.suspend is true, and processes of it are there, or it has ended")}
    return {"Suspended": Say("False", "Resumed", "it goes on from its last checkpoint")}


def complete(reason: str, message: str) -> dict[str, Say]:
    """Done."""
    return {"Ready": Say("True", reason, message), "Complete": Say("True", reason, message)}


def failed(reason: str, message: str) -> dict[str, Say]:
    """Failed for good."""
    return {kind: Say("False" if kind == "Ready" else "True", reason, message) for kind in ("Ready", "Stalled", "Failed")}


def conditions(said: Mapping[str, Say], before: tuple[Condition, ...], generation: int, now: float) -> tuple[Condition, ...]:
    """What is said, as conditions: the time of a status that did not change is kept."""
    known = {condition.type: condition for condition in before}
    made = []
    for kind in ORDER:
        if kind not in said:
            continue
        say, old = said[kind], known.get(kind)
        since = old.last_transition_time if old and old.status == say.status else stamp(now)
        made.append(
            Condition(
                type=kind,
                status=say.status,
                reason=say.reason,
                message=short(say.message),
                last_transition_time=since,
                observed_generation=generation,
            )
        )
    # Aspects that only a newer operator tells are its own.
    return (*made, *(condition for condition in before if condition.type not in ORDER))
