"""`AsyncClient`: train, look at and steer jobs, here and on a cluster; `AsyncJob` has the same verbs for one job.

`Client` (blocking.py) and `Job` (job.py) are the same, called without await.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from psjob_client.jobs.runs import LocalJobs
from psjob_client.jobs.verbs import JobVerbs
from psjob_client.jobs.view import CheckpointView, EventView, HistoryView, JobView, LogLine, SpanView
from psjob_client.problems import Conflict, DeadlinePassed, JobFailed, JobProblem, Step, verb_step
from psjob_client.sdk.manifest import Train, build, checked, read
from psjob_client.text import yaml_text
from psjob_operator.api.status import Phase

if TYPE_CHECKING:
    from psjob_client.jobs.verbs import Weights

DAY = 86_400.0
LOOK = {"local": 0.2, "cluster": 1.0}
"""Seconds between two looks at a job that is waited for."""


class AsyncClient:
    """Jobs of this machine (`AsyncClient.local()`) or of a namespace of a cluster (`AsyncClient.kube()`).

    Every call ends: it answers, or raises `JobProblem`, whose text is one sentence with the next step. Close it with `close()`, or use
    it in `async with`.
    """

    def __init__(self, opening: Callable[[], Awaitable[JobVerbs]]) -> None:
        self._opening = opening
        self._place: JobVerbs | None = None

    @classmethod
    def local(cls, folder: str | Path = ".") -> Self:
        """Jobs of this machine, each shard and worker a process.

        Args:
            folder: Workers start here, and runs lie in its `.psjob`.

        Returns:
            A client.

        Example:
            >>> client = Client.local()
            >>> client.list()
            []
        """
        path = Path(folder).absolute()

        async def opening() -> JobVerbs:
            if not path.is_dir():
                raise JobProblem(f"{path} is no folder; name one that exists")
            return LocalJobs(path)

        return cls(opening)

    @classmethod
    def kube(cls, context: str | None = None, namespace: str | None = None, kubeconfig: str | Path | None = None) -> Self:
        """Jobs of a cluster. It is reached at the first call.

        Args:
            context: Of the kubeconfig; None: the current one, or the pod's own cluster.
            namespace: None: that of the context.
            kubeconfig: None: $KUBECONFIG, or ~/.kube/config.

        Returns:
            A client.

        Example:
            >>> client = Client.kube(namespace="team-a")
        """

        async def opening() -> JobVerbs:
            from psjob_client.jobs.cluster import ClusterJobs, reach

            return ClusterJobs(*await reach(context, namespace, None if kubeconfig is None else str(kubeconfig)))

        return cls(opening)

    async def place(self) -> JobVerbs:
        """What the verbs work on."""
        if self._place is None:
            self._place = await self._opening()
        return self._place

    async def close(self) -> None:
        """Give the connections back. Jobs continue."""
        if self._place is not None:
            await self._place.close()
            self._place = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- beginning -----------------------------------------------------------------------------------------------------------------

    async def train(
        self,
        what: Train,
        *,
        args: Mapping[str, Any] | None = None,
        name: str | None = None,
        workers: int = 2,
        shards: int = 1,
        mode: str = "sync",
        image: str | None = None,
        resources: Mapping[str, Any] | None = None,
        env: Mapping[str, Any] | None = None,
        packages: Sequence[str] = (),
        spec: Mapping[str, Any] | None = None,
    ) -> AsyncJob:
        """Start a job that trains `what`. It continues when this process ends.

        Args:
            what: A function, the path of a script, or a command of the image as a list of words. Functions and scripts travel as text
                in the manifest; a function names only its own variables, its `args`, and modules.
            args: Arguments of the function, by name: numbers, texts, lists and objects.
            name: metadata.name; None: made from the name of `what`.
            workers: Processes that run it.
            shards: Processes that hold the parameters.
            mode: sync, bounded, softsync, async, threshold or local.
            image: Has Python and torch; None: that of the torch that psjob is tested with. Not used on this machine.
            resources: Limits and requests of each worker, such as {"gpu": 1, "memory": "8Gi"}. Not used on this machine.
            env: Environment variables of the workers.
            packages: Requirements that pip installs where they are not met, before the script starts.
            spec: Laid over the manifest's spec: {"training": {"sync": {"maxGradNorm": 1.0}}, "checkpoint": {"everySteps": 100}}.

        Returns:
            A handle; its `manifest` is the YAML that `kubectl apply` takes.

        Raises:
            JobProblem: The function cannot travel, a value is not valid, or the place refuses the job.

        Example:
            >>> job = client.train("train.py", workers=2, shards=1)
            >>> job.wait().phase
            'Complete'
        """
        made = build(
            what, args=args, name=name, workers=workers, shards=shards, mode=mode, image=image, resources=resources, env=env,
            packages=packages, spec=spec, unique=(await self.place()).once,
        )  # fmt: skip
        return await self.submit(made)

    async def submit(self, manifest: Mapping[str, Any] | str | Path) -> AsyncJob:
        """Start the job of a manifest.

        Args:
            manifest: A PSTrainingJob as a mapping, or the path of a YAML file. Workers of this machine start in the client's folder.

        Returns:
            A handle.

        Raises:
            JobProblem: It is not valid, or the place refuses it.

        Example:
            >>> job = client.submit("job.yaml")
        """
        made = read(manifest) if isinstance(manifest, str | Path) else checked(manifest)
        return AsyncJob(self, await (await self.place()).submit(made), made)

    async def job(self, name: str) -> AsyncJob:
        """The handle of a job that is there already.

        Args:
            name: As for `get`.

        Returns:
            What `train` returned when it was started.

        Raises:
            NoSuchJob: There is none.

        Example:
            >>> view = client.job("digits").wait(timeout=600)
        """
        found = await self.get(name)
        return AsyncJob(self, found.id, found.manifest)

    # -- steering ------------------------------------------------------------------------------------------------------------------

    async def suspend(self, name: str, *, timeout: float = 120.0, lose_checkpoints: bool = False) -> None:
        """Make a last checkpoint and end all processes; `resume` continues from it.

        Args:
            name: As for `get`.
            timeout: Seconds until no process is left.
            lose_checkpoints: Suspend it though its claim is being deleted, and goes with its checkpoints as soon as no pod uses it.

        Raises:
            Conflict: Nothing of it runs, or its claim is being deleted.
            DeadlinePassed: It takes longer.

        Example:
            >>> client.suspend("digits")
        """
        place = await self.place()
        if not lose_checkpoints and (risk := await place.at_risk(name)):
            anyway = Step(f"`client.suspend({json.dumps(name)}, lose_checkpoints=True)`", f"`psjob suspend {name} --yes`")
            raise Conflict(f"{risk.rstrip('.')}; to suspend it all the same: ", anyway)
        await place.suspend(name, timeout)

    async def resume(self, name: str) -> AsyncJob:
        """Continue from the last checkpoint.

        Args:
            name: As for `get`.

        Returns:
            The handle of the job that continues. On this machine it is a new run.

        Raises:
            Conflict: It runs, or is complete.

        Example:
            >>> view = client.resume("digits").wait()
        """
        return await self.job(await (await self.place()).resume(name))

    async def checkpoint(self, name: str, *, timeout: float = 180.0) -> CheckpointView:
        """Have a checkpoint made now; training continues.

        Args:
            name: As for `get`.
            timeout: Seconds until it is committed. A cluster brings the request to the job within two minutes.

        Returns:
            The checkpoint.

        Raises:
            Conflict: Nothing of it runs, or it takes no checkpoints.
            DeadlinePassed: None was committed in time.

        Example:
            >>> client.checkpoint("digits").step > 0
            True
        """
        return await (await self.place()).checkpoint(name, timeout)

    async def delete(self, name: str, *, timeout: float = 60.0) -> None:
        """End a job and forget it: on this machine with its checkpoints, on a cluster without those of a claim that is retained.

        Args:
            name: As for `get`.
            timeout: Seconds until it is gone.

        Raises:
            NoSuchJob: There is none.
            DeadlinePassed: It is still there.

        Example:
            >>> client.delete("digits")
        """
        await (await self.place()).delete(name, timeout)

    # -- looking -------------------------------------------------------------------------------------------------------------------

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
            On a cluster only the newest: the others are on its volume.

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
            process: worker-0, shard-1, or a whole name; None: all of them.
            follow: Continue until the job ends.
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
        ended = "is suspended" if job.suspended else f"ended as {job.phase}"
        why = f" ({f'{job.reason}: ' if job.reason else ''}{job.message})" if job.message else ""
        resume = verb_step("resume", job.id, job.namespace)  # a view names commands
        said = Step(why.replace(resume.terminal, resume.python), why)
        raise JobFailed(f"{job.id} {ended}", said, "; its logs say more: ", verb_step("logs", job.id, job.namespace))


class AsyncJob:
    """What `AsyncClient.train` returns. `id` is what the verbs of clients and the command line take."""

    def __init__(self, client: AsyncClient, name: str, manifest: Mapping[str, Any] | None) -> None:
        self._client = client
        self._manifest = manifest
        self.id = name

    @property
    def manifest(self) -> str:
        """The PSTrainingJob as YAML, for a file, for Git, for `kubectl apply -f -`. Raises Conflict if it was not kept."""
        if self._manifest is None:
            raise Conflict(f"{self.id} kept no manifest; it was started by an older psjob")
        return yaml_text(self._manifest)

    def save(self, path: str | Path) -> Path:
        """Write the manifest to a file; its path. Raises OSError if that cannot be written."""
        target = Path(path)
        target.write_text(self.manifest, encoding="utf-8")
        return target

    async def get(self) -> JobView:
        """As `Client.get`."""
        return await self._client.get(self.id)

    async def phase(self) -> Phase:
        """One word: Pending, Running, Recovering, Suspended, Complete or Failed, as it is now."""
        return (await self.get()).phase

    async def wait(self, *, phases: Collection[str] = ("Complete",), timeout: float = DAY) -> JobView:
        """As `Client.wait`."""
        return await self._client.wait(self.id, phases=phases, timeout=timeout)

    async def watch(self, *, timeout: float = DAY, every: float | None = None) -> AsyncIterator[JobView]:
        """As `Client.watch`."""
        async for job in self._client.watch(self.id, timeout=timeout, every=every):
            yield job

    async def logs(self, process: str | None = None, *, follow: bool = False, tail: int | None = None) -> AsyncIterator[LogLine]:
        """As `Client.logs`."""
        async for line in self._client.logs(self.id, process, follow=follow, tail=tail):
            yield line

    async def events(self) -> Sequence[EventView]:
        """As `Client.events`."""
        return await self._client.events(self.id)

    async def metrics(self) -> HistoryView:
        """As `Client.metrics`."""
        return await self._client.metrics(self.id)

    async def load_weights(self) -> Weights:
        """As `Client.load_weights`."""
        return await self._client.load_weights(self.id)

    async def suspend(self, *, timeout: float = 120.0, lose_checkpoints: bool = False) -> None:
        """As `Client.suspend`."""
        await self._client.suspend(self.id, timeout=timeout, lose_checkpoints=lose_checkpoints)

    async def resume(self) -> AsyncJob:
        """As `Client.resume`."""
        return await self._client.resume(self.id)

    async def checkpoint(self, *, timeout: float = 180.0) -> CheckpointView:
        """As `Client.checkpoint`."""
        return await self._client.checkpoint(self.id, timeout=timeout)

    async def delete(self, *, timeout: float = 60.0) -> None:
        """As `Client.delete`."""
        await self._client.delete(self.id, timeout=timeout)

    def __repr__(self) -> str:
        return f"<job {self.id}>"
