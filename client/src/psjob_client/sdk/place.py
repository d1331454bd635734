"""Where jobs are trained: everything that a source of jobs reads, and the verbs that change something."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from psjob_client.jobs.source import JobSource
from psjob_client.jobs.view import CheckpointView

if TYPE_CHECKING:
    from psjob_client.sdk.weights import Weights


class Place(JobSource, Protocol):
    """This machine, or a namespace of a cluster. Every call has a deadline and raises `JobProblem` with a sentence."""

    @property
    def once(self) -> bool:
        """A name is that of one job at a time: true on a cluster, while a job has many runs on this machine."""

    async def submit(self, manifest: Mapping[str, Any]) -> str:
        """Start the job; its id. It goes on when this process ends."""

    async def at_risk(self, name: str) -> str:
        """Why a suspension costs the job its checkpoints; empty where it does not."""

    async def suspend(self, name: str, seconds: float | None) -> None:
        """Make a last checkpoint and go down to no process; returns when that is so, or with `seconds` None at once."""

    async def resume(self, name: str) -> str:
        """Go on from the last checkpoint; the id of the job that does, which is a new run on this machine."""

    async def checkpoint(self, name: str, seconds: float) -> CheckpointView:
        """Have a checkpoint made; returns when it is committed."""

    async def weights(self, name: str) -> Weights:
        """The final weights, or those of the newest checkpoint. Raises NoWeights."""

    async def delete(self, name: str, seconds: float) -> None:
        """End the job and forget it. On this machine its checkpoints go too; on a cluster its claim stays if the manifest says so."""
