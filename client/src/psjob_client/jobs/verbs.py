"""The verbs over jobs, the same for runs of this machine (`LocalJobs` in runs.py) and for a namespace (`ClusterJobs` in cluster.py).

A request for a checkpoint is a number above all before it, in `spec.checkpoint.request`; a checkpoint says which number it answers.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from psjob_client.jobs.view import CheckpointView, EventView, HistoryView, JobView, LogLine, SpanView
from psjob_client.problems import BadManifest
from psjob_operator.api.spec import PSTrainingJob
from psjob_operator.api.validate import every_problem

if TYPE_CHECKING:
    import torch

    Weights: TypeAlias = dict[str, torch.Tensor]


class JobVerbs(Protocol):
    """Every call has a deadline and raises `JobProblem` (problems.py) with a sentence for people."""

    @property
    def title(self) -> str:
        """If it reads, for a heading: a folder, or context and namespace."""

    async def list(self) -> Sequence[JobView]:
        """All jobs, the newest first. Processes may be left out of these."""

    async def get(self, name: str) -> JobView:
        """One job with everything that is known now.

        `name` is an id or, for runs of this machine, also a job's name: the newest run of it. Raises NoSuchJob.
        """

    async def history(self, name: str, most: int | None = None) -> HistoryView:
        """Loss, steps a second and own numbers over time. `most`: of a long record no more lines than that, evenly chosen."""

    async def events(self, name: str) -> Sequence[EventView]:
        """What happened, the oldest first."""

    async def timeline(self, name: str) -> Sequence[SpanView]:
        """Phases of the job and starts of its processes, by lane and then by time."""

    async def checkpoints(self, name: str) -> Sequence[CheckpointView]:
        """Those that can be seen, the newest first."""

    def logs(self, name: str, process: str | None = None, *, follow: bool = False, tail: int | None = None) -> AsyncIterator[LogLine]:
        """What processes print, oldest line first.

        `process` is `worker-0`, `shard-1` or a whole name; None: all. `follow` continues until the job ends. `tail`: so many lines each.
        """

    @property
    def once(self) -> bool:
        """A name is that of one job at a time: true on a cluster, while a job has many runs on this machine."""

    async def submit(self, manifest: Mapping[str, Any]) -> str:
        """Start the job; its id. It continues when this process ends."""

    async def at_risk(self, name: str) -> str:
        """Why a suspension costs the job its checkpoints; empty where it does not."""

    async def suspend(self, name: str, seconds: float | None) -> None:
        """Make a last checkpoint and go down to no process; returns when that is so, or with `seconds` None at once."""

    async def resume(self, name: str) -> str:
        """Continue from the last checkpoint; the id of the job that does, which is a new run on this machine."""

    async def checkpoint(self, name: str, seconds: float) -> CheckpointView:
        """Have a checkpoint made; returns when it is committed."""

    async def weights(self, name: str) -> Weights:
        """The final weights, or those of the newest checkpoint. Raises NoWeights."""

    async def delete(self, name: str, seconds: float) -> None:
        """End the job and forget it. On this machine its checkpoints go too; on a cluster its claim stays if the manifest says so."""

    async def close(self) -> None:
        """Give connections back."""


def checked_job(manifest: Mapping[str, Any]) -> PSTrainingJob:
    """The manifest, read. Raises BadManifest with every problem."""
    job, problems = every_problem(dict(manifest))
    if job is None:
        raise BadManifest("\n".join(str(problem) for problem in problems))
    return job


def next_request(saved: Mapping[str, Any], newest: CheckpointView | None) -> int:
    """The time, or more: above the request of `saved` (spec.checkpoint, as it is) and above the one that is answered."""
    answered = newest.observed_request if newest is not None else None
    return max(int(time.time()), asked(saved) + 1, (answered or 0) + 1)


def asked(saved: Mapping[str, Any]) -> int:
    """The request of spec.checkpoint; 0 where there is none."""
    found = saved.get("request")
    return found if isinstance(found, int) else 0


def answers_request(made: CheckpointView | None, number: int, saved: Mapping[str, Any]) -> bool:
    """Was this checkpoint begun after the job had read request `number`, or one that somebody has made of it since?"""
    answered = made.observed_request if made is not None else None
    return answered is not None and (answered >= number or answered == asked(saved))
