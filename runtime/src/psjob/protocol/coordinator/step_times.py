"""The parts of a step's time, as workers tell it: the mean over them, and a sentence if they compute for less than half of their time.

Each worker tells seconds by part of the steps since it told last. What it told before counts half after HALF_SECONDS, so that the figure is
mostly of the last minute, and a worker keeps one row however long the job runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from psjob.contract import STEP_PARTS

HALF_SECONDS: Final = 20.0
MOST_SECONDS: Final = 1e9
MOST_STEPS: Final = 1 << 40
LEAST_SECONDS: Final = 5.0
"""Of steps that a sentence is made of: the first ones read data, compile and find their way."""
LEAST_STEPS: Final = 5.0
HALF: Final = 0.5
"""Part of its time for which a worker should compute at least."""


@dataclass(frozen=True)
class StepTimed:
    """Where a worker's time of its last `steps` steps went: seconds by part, in the order of STEP_PARTS."""

    stream: int
    parts: tuple[float, ...]
    steps: int

    @classmethod
    def of(cls, stream: int, body: Mapping[str, Any]) -> StepTimed | None:
        """From a MEASURED; None for one that tells something else, or what nobody can have measured."""
        parts, steps = body.get("parts"), body.get("steps")
        if not isinstance(parts, list) or len(parts) != len(STEP_PARTS) or type(steps) is not int or not 0 < steps < MOST_STEPS:
            return None
        if not all(isinstance(one, int | float) and not isinstance(one, bool) and -1 < one < MOST_SECONDS for one in parts):
            return None
        return cls(stream, tuple(max(0.0, float(one)) for one in parts), steps)


class StepTimes:
    """Of a job. Read by another thread: what is known of a worker is replaced, never changed in place."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[tuple[int, int], float, float, tuple[float, ...]]] = {}
        """By rank: the process that told it, when, and of its steps how many and seconds by part, both less the older they are."""

    def came(self, rank: int, incarnation: tuple[int, int], told: StepTimed, now: float) -> None:
        """A worker tells of its steps, at `now` in seconds."""
        process, at, steps, parts = self._known.get(rank, (incarnation, now, 0.0, (0.0,) * len(STEP_PARTS)))
        keeps = 0.5 ** (max(0.0, now - at) / HALF_SECONDS) if process == incarnation else 0.0
        summed = tuple(keeps * old + new for old, new in zip(parts, told.parts, strict=True))
        self._known[rank] = incarnation, now, keeps * steps + told.steps, summed

    def mean(self) -> dict[str, float] | None:
        """Seconds of a worker's step by part, the mean over the workers; None where none has told yet."""
        known = list(self._known.values())
        if not known:
            return None
        each = [[seconds / steps for seconds in parts] for _, _, steps, parts in known]
        return {name: math.fsum(column) / len(each) for name, column in zip(STEP_PARTS, zip(*each, strict=True), strict=True)}

    def settled(self) -> bool:
        """Is it known well enough for advice?"""
        known = list(self._known.values())
        return bool(known) and all(steps >= LEAST_STEPS and sum(parts) >= LEAST_SECONDS for _, _, steps, parts in known)


@dataclass(frozen=True)
class JobSettings:
    """What of a job decides which advice can help it. `shared`: all blocks go by shared memory. `push`: the codec of gradients."""

    mode: str = "sync"
    workers: int = 1
    shared: bool = False
    push: str = "none"
    stages: bool = False


MOST_NAMED: Final = 3
HIDES: Final = 0.25
"""What computes for at least this part of a step can hide as much of its waits."""
WAITS: Final = {
    "copyOut": "copy gradients out",
    "wire": "wait for the wire",
    "others": "wait for other workers",
    "update": "wait for the update",
    "copyBack": "copy weights back",
    "psjob": "are busy with records and checks of psjob",
}
LARGER: Final = "a larger batch, or several summed before a step: fewer steps a pass"
OVERLAP: Final = "attach(overlap=True), gradients leave while the rest is computed"
DELAY: Final = "training.delay: 1, the next step is computed meanwhile"
LOCAL: Final = "training.mode: local, one exchange in many steps"
CODEC: Final = "training.compression.push: bf16 and pull: bf16, half the bytes"
NEAR: Final = "workers and shards on one host, which share memory (shards.placement: Colocated)"
BACKUP: Final = "training.sync.backupWorkers: 1, the last one is not waited for"
BOUNDED: Final = "training.mode: bounded, a worker may be some steps ahead"
ASYNC: Final = "training.mode: async, nobody waits"
SHARDS: Final = "more shards on other cores, each updates its part of the model"
RARER: Final = "a longer checkpoint.periodSeconds"


def advice(parts: Mapping[str, float], job: JobSettings) -> str | None:
    """A sentence where `parts` have less than HALF of a step for computing: where most of the rest goes, and what helps most."""
    whole = math.fsum(parts.values())
    if whole <= 0 or parts["compute"] >= HALF * whole:
        return None
    most = max(WAITS, key=lambda name: parts[name])
    possible = _possible(job, hides=parts["compute"] >= HIDES * whole)
    helps = [words for words in _REMEDIES[most] if words in possible][:MOST_NAMED]
    return (
        f"workers compute for {parts['compute'] / whole:.0%} of their time: of a step of {_milliseconds(whole)} they {WAITS[most]} for "
        f"{_milliseconds(parts[most])}. What helps most: {'; '.join(helps)}"
    )


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


_REMEDIES: Final = {
    "wire": (OVERLAP, DELAY, CODEC, LARGER, NEAR, LOCAL),
    "others": (BACKUP, BOUNDED, ASYNC, DELAY, LARGER),
    "update": (SHARDS, OVERLAP, DELAY, LARGER, LOCAL),
    "copyOut": (LARGER, LOCAL),
    "copyBack": (LARGER, LOCAL),
    "psjob": (LARGER, RARER),
}
"""By part, what shortens it, the best first. docs/performance/steps.md has what each came to where it was tried."""


def _possible(job: JobSettings, hides: bool) -> set[str]:
    """What the job could still take; `hides`: it computes for long enough to hide a part of its waits."""
    waits = job.mode == "sync" and not job.stages
    several = waits and job.workers > 1
    late = job.mode in ("sync", "bounded", "async") and not job.stages
    return {
        words
        for words, can in (
            (LARGER, True), (RARER, True), (SHARDS, True), (OVERLAP, hides and not job.stages), (DELAY, hides and late), (LOCAL, waits),
            (CODEC, job.push == "none" and not job.shared), (NEAR, not job.shared),
            (BACKUP, several), (BOUNDED, several), (ASYNC, late and job.mode != "async" and job.workers > 1),
        )
        if can
    }  # fmt: skip
