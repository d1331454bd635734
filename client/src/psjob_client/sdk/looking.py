"""The verbs that look at jobs and change nothing: a part of `AsyncClient`."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Sequence
from typing import TYPE_CHECKING

from psjob_client.jobs.view import CheckpointView, EventView, HistoryView, JobView, LogLine, SpanView
from psjob_client.problems import DeadlinePassed, JobFailed, Step, call
from psjob_client.sdk.place import Place

if TYPE_CHECKING:
    from psjob_client.sdk.weights import Weights

DAY = 86_400.0
LOOK = {"local": 0.2, "cluster": 1.0}
"""Seconds between two looks at a job that is waited for."""


class Looking(ABC):
    """Asks the place of its jobs."""

    @abstractmethod
    async def place(self) -> Place:
        """What the verbs work on: a source of jobs (jobs/source.py) with the verbs that change something."""

    async def get(self, name: str) -> JobView:
        """A job with everything that is known now: phase, progress, processes, checkpoint, warnings.

        Args:
            name: Of the job; on this machine also of a run. A job's name means its newest run there.

        Returns:
            A frozen model; `to_manifest()` is its JSON.

        Raises:
            NoSuchJob: There is none; the text suggests near names.

        Example:
            >>> client.get("digits").progress.step
            368
        """
        return await (await self.place()).get(name)

    async def list(self) -> Sequence[JobView]:
        """All jobs, the newest first, without their processes.

        Returns:
            As `get`, in short.

        Raises:
            JobProblem: The cluster cannot be asked.

        Example:
            >>> [job.name for job in client.list()]
            ['digits']
        """
        return await (await self.place()).list()

    async def events(self, name: str) -> Sequence[EventView]:
        """What happened to a job, the oldest first: starts, restarts, failures, checkpoints.

        Args:
            name: As for `get`.

        Returns:
            One entry an event. A cluster forgets them after an hour.

        Raises:
            NoSuchJob: There is none.

        Example:
            >>> client.events("digits")[-1].reason
            'Completed'
        """
        return await (await self.place()).events(name)

    async def metrics(self, name: str) -> HistoryView:
        """Loss, steps a second and the script's own numbers over time.

        Args:
            name: As for `get`.

        Returns:
            One series for each number; `to_pandas()` is a table of them. On a cluster it has what this client has seen, and while the job
            runs what shard 0 remembers. `complete` says whether that is all.

        Raises:
            NoSuchJob: There is none.

        Example:
            >>> client.metrics("digits")["loss"].values[-1]
            0.021
        """
        return await (await self.place()).history(name)

    async def timeline(self, name: str) -> Sequence[SpanView]:
        """Phases of a job and starts of its processes, as spans of time.

        Args:
            name: As for `get`.

        Returns:
            Spans by lane: job, shard 0, …, worker 0, ….

        Raises:
            NoSuchJob: There is none.

        Example:
            >>> client.timeline("digits")[0].state
            'Pending'
        """
        return await (await self.place()).timeline(name)

    async def checkpoints(self, name: str) -> Sequence[CheckpointView]:
        """Committed checkpoints, the newest first.

        Args:
            name: As for `get`.

        Returns:
            On a cluster the newest alone: the others are on its volume.

        Raises:
            NoSuchJob: There is none.

        Example:
            >>> client.checkpoints("digits")[0].step
            368
        """
        return await (await self.place()).checkpoints(name)

    async def load_weights(self, name: str) -> Weights:
        """The weights of a job, on the CPU: the final ones, or those of its newest checkpoint.

        Args:
            name: As for `get`.

        Returns:
            A tensor for each name of `model.state_dict()`, so that the plain model takes it: `model.load_state_dict(weights)`. Frozen
            parameters that no optimizer was given are not part of a job, and not of this.

        Raises:
            NoSuchJob: There is none.
            NoWeights: It has no checkpoint yet, or that cannot be read from here.

        Example:
            >>> {name: tuple(tensor.shape) for name, tensor in client.load_weights("digits").items()}
            {'weight': (1, 8), 'bias': (1,)}
        """
        return await (await self.place()).weights(name)

    async def logs(self, name: str, process: str | None = None, *, follow: bool = False, tail: int | None = None) -> AsyncIterator[LogLine]:
        """What processes print.

        Args:
            name: As for `get`.
            process: worker-0, ps-1, or a whole name; None: all of them.
            follow: Go on until the job ends.
            tail: Only so many lines of each process that is there already.

        Returns:
            An iterator of lines; `str()` of one is its text.

        Raises:
            NoSuchJob: There is none.

        Example:
            >>> [line.text for line in client.logs("digits", "worker-0")][-1]
            'accuracy 0.978'
        """
        async for line in (await self.place()).logs(name, process, follow=follow, tail=tail):
            yield line

    async def watch(self, name: str, *, timeout: float = DAY, every: float | None = None) -> AsyncIterator[JobView]:
        """A job whenever it has changed, until it is over or suspended.

        Args:
            name: As for `get`.
            timeout: Seconds after which it ends in any case.
            every: Seconds between two looks; None: 0.2 on this machine, 1 on a cluster.

        Returns:
            An iterator of what `get` returns; the last one is the end.

        Raises:
            NoSuchJob: There is none.
            DeadlinePassed: The job has not ended in time.

        Example:
            >>> [view.progress.step for view in client.watch("digits")][-1]
            368
        """
        until, last = time.monotonic() + timeout, None
        while True:
            job = await self.get(name)
            if job != last:
                last = job
                yield job
            if not job.active:
                return
            if time.monotonic() > until:
                raise DeadlinePassed(f"{name} is {job.phase} at {job.unit} {job.progress.step} after {timeout:g} s; give a longer timeout")
            await asyncio.sleep(LOOK[job.where] if every is None else every)

    async def wait(self, name: str, *, phases: Collection[str] = ("Complete",), timeout: float = DAY) -> JobView:
        """Wait for a job.

        Args:
            name: As for `get`.
            phases: Ends at any of these: Pending, Running, Recovering, Suspended, Complete, Failed.
            timeout: Seconds, a day unless told otherwise.

        Returns:
            The job as it is then.

        Raises:
            JobFailed: It ended in another phase than was waited for.
            DeadlinePassed: It is not there in time.

        Example:
            >>> client.wait("digits", timeout=600).progress.metrics
            {'loss': 0.021, 'test_accuracy': 0.978}
        """
        job = None
        async for job in self.watch(name, timeout=timeout):
            if job.phase in phases:
                return job
        assert job is not None
        ended = "is suspended" if job.phase == "Suspended" else f"ended as {job.phase}"
        why = f" ({f'{job.reason}: ' if job.reason else ''}{job.message})" if job.message else ""
        resume = call("resume", job.id, job.namespace)  # a view names commands
        said = Step(why.replace(resume.terminal, resume.python), why)
        raise JobFailed(f"{job.id} {ended}", said, "; its logs say more: ", call("logs", job.id, job.namespace))
