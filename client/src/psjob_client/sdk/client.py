"""`AsyncClient`: train, look at and steer jobs, here and on a cluster; `AsyncJob` has the same verbs for one job.

`Client` and `Job` (blocking.py) are the same, called without await. They promise what each verb does, for both.
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
from psjob_client.sdk.manifest import Train, build, checked, read_manifest_file
from psjob_client.text import yaml_text
from psjob_operator.api.status import Phase

if TYPE_CHECKING:
    from psjob_client.jobs.verbs import Weights

DAY = 86_400.0
LOOK = {"local": 0.2, "cluster": 1.0}
"""Seconds between two looks at a job that is waited for."""


class AsyncClient:
    """Jobs of this machine (`AsyncClient.local()`) or of a namespace of a cluster (`AsyncClient.kube()`).

    It has the verbs of `Client`, each to be awaited. Close it with `close()`, or use it in `async with`.
    """

    def __init__(self, opening: Callable[[], Awaitable[JobVerbs]]) -> None:
        self._opening = opening
        self._place: JobVerbs | None = None

    @classmethod
    def local(cls, folder: str | Path = ".") -> Self:
        """As `Client.local`."""
        path = Path(folder).absolute()

        async def opening() -> JobVerbs:
            if not path.is_dir():
                raise JobProblem(f"{path} is no folder; name one that exists")
            return LocalJobs(path)

        return cls(opening)

    @classmethod
    def kube(cls, context: str | None = None, namespace: str | None = None, kubeconfig: str | Path | None = None) -> Self:
        """As `Client.kube`."""

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
        """As `Client.train`."""
        made = build(
            what, args=args, name=name, workers=workers, shards=shards, mode=mode, image=image, resources=resources, env=env,
            packages=packages, spec=spec, unique=(await self.place()).once,
        )  # fmt: skip
        return await self.submit(made)

    async def submit(self, manifest: Mapping[str, Any] | str | Path) -> AsyncJob:
        """As `Client.submit`."""
        made = read_manifest_file(manifest) if isinstance(manifest, str | Path) else checked(manifest)
        return AsyncJob(self, await (await self.place()).submit(made), made)

    async def job(self, name: str) -> AsyncJob:
        """As `Client.job`."""
        found = await self.get(name)
        return AsyncJob(self, found.id, found.manifest)

    async def suspend(self, name: str, *, timeout: float = 120.0, lose_checkpoints: bool = False) -> None:
        """As `Client.suspend`."""
        place = await self.place()
        if not lose_checkpoints and (risk := await place.at_risk(name)):
            anyway = Step(f"`client.suspend({json.dumps(name)}, lose_checkpoints=True)`", f"`psjob suspend {name} --yes`")
            raise Conflict(f"{risk.rstrip('.')}; to suspend it all the same: ", anyway)
        await place.suspend(name, timeout)

    async def resume(self, name: str) -> AsyncJob:
        """As `Client.resume`."""
        return await self.job(await (await self.place()).resume(name))

    async def checkpoint(self, name: str, *, timeout: float = 180.0) -> CheckpointView:
        """As `Client.checkpoint`."""
        return await (await self.place()).checkpoint(name, timeout)

    async def delete(self, name: str, *, timeout: float = 60.0) -> None:
        """As `Client.delete`."""
        await (await self.place()).delete(name, timeout)

    async def get(self, name: str) -> JobView:
        """As `Client.get`."""
        return await (await self.place()).get(name)

    async def list(self) -> Sequence[JobView]:
        """As `Client.list`."""
        return await (await self.place()).list()

    async def events(self, name: str) -> Sequence[EventView]:
        """As `Client.events`."""
        return await (await self.place()).events(name)

    async def metrics(self, name: str) -> HistoryView:
        """As `Client.metrics`."""
        return await (await self.place()).history(name)

    async def timeline(self, name: str) -> Sequence[SpanView]:
        """As `Client.timeline`."""
        return await (await self.place()).timeline(name)

    async def checkpoints(self, name: str) -> Sequence[CheckpointView]:
        """As `Client.checkpoints`."""
        return await (await self.place()).checkpoints(name)

    async def load_weights(self, name: str) -> Weights:
        """As `Client.load_weights`."""
        return await (await self.place()).weights(name)

    async def logs(self, name: str, process: str | None = None, *, follow: bool = False, tail: int | None = None) -> AsyncIterator[LogLine]:
        """As `Client.logs`."""
        async for line in (await self.place()).logs(name, process, follow=follow, tail=tail):
            yield line

    async def watch(self, name: str, *, timeout: float = DAY, every: float | None = None) -> AsyncIterator[JobView]:
        """As `Client.watch`."""
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
        """As `Client.wait`."""
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
