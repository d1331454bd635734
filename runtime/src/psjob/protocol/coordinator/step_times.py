"""Where a step's time goes, as workers tell it: the mean over them, and a sentence where they compute for less than half of their time.

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
    shards: int = 1
    shared: bool = False
    push: str = "none"
    pull: str = "none"
    streams: int = 1
    backup_workers: int = 0
    stages: bool = False
    device: bool = False
    """The model lies on a GPU, as far as that is known."""


MOST_NAMED: Final = 3
WAITS: Final = {
    "copyOut": "copy gradients out",
    "wire": "wait for the wire",
    "others": "wait for other workers",
    "update": "wait for the update",
    "copyBack": "copy weights back",
    "psjob": "are busy with records and checks of psjob",
}


def advice(parts: Mapping[str, float], job: JobSettings) -> str | None:
    """A sentence where `parts` have less than HALF of a step for computing: where most of the rest goes, and what helps most."""
    whole = math.fsum(parts.values())
    if whole <= 0 or parts["compute"] >= HALF * whole:
        return None
    most = max(WAITS, key=lambda name: parts[name])
    helps = [words for words, possible in _remedies(most, job) if possible][:MOST_NAMED]
    said = (
        f"workers compute for {parts['compute'] / whole:.0%} of their time: of a step of {_milliseconds(whole)} they {WAITS[most]} for "
        f"{_milliseconds(parts[most])}"
    )
    return f"{said}. What helps most: {'; '.join(helps)}" if helps else said


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def _remedies(part: str, job: JobSettings) -> list[tuple[str, bool]]:
    """What shortens a part of a step, the best first, each with whether the job could still take it."""
    waits = job.mode == "sync" and not job.stages
    larger = ("a larger batch, or gradients of several batches summed before a step: fewer steps for the same data", True)
    bytes_ = ("training.compression.push: bf16 and pull: bf16, half the bytes", job.push == "none" and not job.shared)
    delay = ("training.delay: 1, the next step computes meanwhile", job.mode in ("sync", "bounded", "async") and not job.stages)
    overlap = ("attach(overlap=True), gradients leave while the rest is computed", not job.stages)
    local = ("training.mode: local, one exchange in many steps", waits)
    more = ("more shards: each updates a part of the model beside the others", True)
    match part:
        case "wire":
            near = ("workers and shards on one host, which share memory (shards.placement: Colocated)", not job.shared)
            return [bytes_, near, overlap, delay, larger, local] if job.push == "none" else [near, overlap, delay, larger, local]
        case "others":
            backup = (
                "training.sync.backupWorkers: 1, the last one is not waited for",
                waits and job.workers > 1 and not job.backup_workers,
            )
            bounded = ("training.mode: bounded, a worker may be some steps ahead", waits and job.workers > 1)
            free = ("training.mode: async, nobody waits", job.mode != "async" and not job.stages and job.workers > 1)
            return [backup, free, bounded, delay, larger]
        case "update":
            return [more, delay, larger, overlap]
        case "copyOut" | "copyBack":
            near = ("workers and shards on one host, which share memory: gradients that a script keeps (zero_grad(set_to_none=False)) lie "
                    "there and are not copied", True)  # fmt: skip
            return [near, larger, overlap]
    return [larger, ("a longer checkpoint.periodSeconds", True)]
