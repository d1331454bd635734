"""What is wrong with a job that trains on. Each matter has a condition of its own, so that none hides another; Ready names the first.

A condition appears when its matter is first seen, and is False from when it is over. While shard 0 is out of reach, what it said holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from psjob_operator.plan import objects, pins
from psjob_operator.plan.conditions import Say, running
from psjob_operator.plan.facts import Facts
from psjob_operator.plan.progress import text
from psjob_operator.plan.text import unix

ATTACH_SECONDS = 20.0
"""A process that is waited for within this time after all came up is just starting."""
DEGRADED = "Degraded"
WAITING = "WaitingForMember"
OF_TRAINING: Mapping[str, str] = {
    "LearningRateHigh": "warning",
    "NonFiniteGradients": "nonFinite",
    "LargePushes": "largePush",
    "Diverged": "diverged",
    "WorkersDiffer": "drift",
    "DataNotSharded": "dataProblem",
    "BuffersDiffer": "buffersDiffer",
}
"""Type of a condition, and its reason, by the word of shard 0 that tells it."""
CLEARED = Say("False", "Cleared", "it is over, or was of processes that have been replaced since")


def ready(facts: Facts) -> dict[str, Say]:
    """Ready of a job of which all is up: the first thing that is wrong, or that it runs."""
    before, after = list(_around(facts)), list(_unread(facts))
    of_training = [(kind, words) for kind, key in OF_TRAINING.items() if (words := text(facts, key))]
    for reason, words in (*before, *of_training, *after):
        return running(reason, words)
    kept = facts.stored.condition("Ready")
    if kept and kept.reason in (WAITING, *OF_TRAINING) and not facts.coordinator:
        return running(kept.reason, kept.message)
    return running("Running", "all shards and workers are running")


def warnings(facts: Facts, trains: bool) -> dict[str, Say]:
    """Degraded, of a job that `trains`, and the conditions of training; those that are over, too."""
    said = {kind: Say("True", kind, words) for kind, key in OF_TRAINING.items() if (words := told(facts, kind, key))}
    around = [*_around(facts), *_unread(facts)] if trains else []
    if around:
        said[DEGRADED] = Say("True", around[0][0], "; ".join(words for _, words in around))
    elif trains and not facts.coordinator and (kept := facts.stored.condition(DEGRADED)) and kept.reason == WAITING:
        said[DEGRADED] = Say(kept.status, kept.reason, kept.message)
    over = {kind: CLEARED for kind in (DEGRADED, *OF_TRAINING) if kind not in said and facts.stored.condition(kind)}
    return said | over


def told(facts: Facts, kind: str, key: str) -> str:
    """What shard 0 says of a matter of training; what was said before holds where it says nothing any more."""
    if facts.coordinator:
        return text(facts, key)
    for kept in (facts.stored.condition(kind), facts.stored.condition("Ready")):
        if kept is not None and kept.status == "True" and kept.reason == kind:
            return kept.message
    return ""


def _around(facts: Facts) -> Iterator[tuple[str, str]]:
    """(reason, words) of what is wrong beside the training itself."""
    if around := objects.refused(facts.snapshot, pins.pinned(facts, afresh=False)):
        yield "CreateRefused", around
    crashing = [(seat, seat.process.sidecar_crash) for seat in facts.seats if seat.process is not None and seat.process.sidecar_crash]
    if crashing:
        seat, sidecar = crashing[0]
        yield "SidecarCrashing", f"{seat}: sidecar {sidecar}"
    waiting = text(facts, "waiting")
    kept = facts.stored.condition("Ready")
    since = unix(kept.last_transition_time) if kept and kept.status == "True" else None
    if waiting and since is not None and since + ATTACH_SECONDS <= facts.now:
        yield WAITING, waiting


def _unread(facts: Facts) -> Iterator[tuple[str, str]]:
    if facts.snapshot.progress_problem:
        yield "ProgressUnknown", facts.snapshot.progress_problem
