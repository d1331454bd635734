"""Where jobs are read from: runs of this machine, or a cluster. One small protocol, two sources."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from psjob_client.jobs.view import CheckpointView, EventView, HistoryView, JobView, LogLine, SpanView


class JobSource(Protocol):
    """Reads jobs; changes nothing. Every call has a deadline and raises `JobProblem` (problems.py) with a sentence for people."""

    @property
    def title(self) -> str:
        """Where it reads, for a heading: a folder, or context and namespace."""

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

        `process` is `worker-0`, `ps-1` or a whole name; None: all. `follow` goes on until the job ends. `tail`: so many lines a process.
        """

    async def close(self) -> None:
        """Give connections back."""
