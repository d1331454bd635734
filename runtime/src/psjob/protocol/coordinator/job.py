"""What the coordinator knows from the start: the job, and a checkpoint as facts. Values alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from psjob.layout.blocks import Layout
from psjob.modes import ServedMode
from psjob.modes.stages import ALL, Stages


@dataclass(frozen=True)
class JobFacts:
    """The job, and which start of shard 0 this is."""

    run: str
    folder: str
    """The run's folder, as messages name it."""
    mode: ServedMode
    workers: int
    shards: int
    view: int
    attempt: int
    """Of shard 0."""
    must_find: bool = False
    """The planner knows of a checkpoint, so that one must be found."""
    interval: float | None = None
    """Seconds between checkpoints; None: not by time."""
    every: int | None = None
    """Steps between checkpoints; None: not by steps."""
    keep: int = 3
    checkpoints: bool = True
    """False: `checkpoint.disabled`; only the first and the last one are made."""
    resume_from: str | None = None
    """Folder of another run that this one goes on from."""
    policy: str = "AllWorkers"
    update_at: str | None = None
    update_rule: str | None = None
    reduction: str = "mean"
    step_timeout: float | None = None
    """Seconds without a step, while others wait for it, after which a worker is to be started again; None: never."""
    stages: Stages = ALL
    request: int | None = None
    """checkpoint.request as this coordinator found it: the first checkpoint of a new run answers it."""
    flushes: bool = True
    """False: stages make their updates without waiting for each other, so that they are several steps apart."""
    stage_names: tuple[str, ...] = ()
    """As the manifest names the stages."""

    @property
    def apart(self) -> int:
        """How many steps a stage may be beyond another, at most."""
        return 0 if self.flushes else self.stages.workers


@dataclass(frozen=True)
class WorkerFacts:
    """A worker in a checkpoint: its clock, its incarnation, and the clock from which on it has left (None: it has not)."""

    clock: int
    start: int = 0
    rewinds: int = 0
    left: int | None = None
    record: int | None = None
    """The clock of its resume record, where that is older than `clock`; else None."""


@dataclass(frozen=True)
class CheckpointFacts:
    """A checkpoint as its manifest tells it, without what lies in its files."""

    folder: str
    name: str
    run: str
    view: int
    step: int
    mode: str
    final: bool
    created: float
    """Unix seconds."""
    bytes: int
    layout: Layout
    rule: str
    workers: tuple[WorkerFacts, ...]
    """By rank."""
    tables: tuple[Mapping[str, Any], ...] = ()
    """Tables of rows, each as its spec's JSON."""
    aliases: tuple[tuple[str, str], ...] = ()
    """Further names of tied parameters."""
    weights_sha256: str | None = None
    request: int | None = None
    """The newest checkpoint.request of its run that had been seen when it was begun."""
