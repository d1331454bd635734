"""`AsyncClient`: train, look at and steer jobs, here and on a cluster. `Client` (blocking.py) is the same, called without await."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from psjob_client.jobs.view import CheckpointView
from psjob_client.problems import Conflict, JobProblem, Step
from psjob_client.sdk import building
from psjob_client.sdk.building import Train
from psjob_client.sdk.handle import AsyncJob
from psjob_client.sdk.looking import Looking
from psjob_client.sdk.machine import Machine
from psjob_client.sdk.place import Place


class AsyncClient(Looking):
    """Jobs of this machine (`AsyncClient.local()`) or of a namespace of a cluster (`AsyncClient.kube()`).

    Every call ends: it answers, or raises `JobProblem`, whose text is one sentence with the next step. Close it with `close()`, or use
    it in `async with`.
    """

    def __init__(self, opening: Callable[[], Awaitable[Place]]) -> None:
        self._opening = opening
        self._place: Place | None = None

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

        async def opening() -> Place:
            if not path.is_dir():
                raise JobProblem(f"{path} is no folder; name one that exists")
            return Machine(path)

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

        async def opening() -> Place:
            from psjob_client.jobs.kube import reach
            from psjob_client.sdk.namespace import Namespace

            return Namespace(*await reach(context, namespace, None if kubeconfig is None else str(kubeconfig)))

        return cls(opening)

    async def place(self) -> Place:
        """What the verbs work on."""
        if self._place is None:
            self._place = await self._opening()
        return self._place

    async def close(self) -> None:
        """Give the connections back. Jobs go on."""
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
        """Start a job that trains `what`. It goes on when this process ends.

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
            spec: Laid over the manifest's spec: {"training": {"maxGradNorm": 1.0}, "checkpoint": {"everySteps": 100}}.

        Returns:
            A handle; its `manifest` is the YAML that `kubectl apply` takes.

        Raises:
            JobProblem: The function cannot travel, a value is not valid, or the place refuses the job.

        Example:
            >>> job = client.train("train.py", workers=2, shards=1)
            >>> job.wait().phase
            'Complete'
        """
        made = building.build(
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
        made = building.read(manifest) if isinstance(manifest, str | Path) else building.checked(manifest)
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
        """Make a last checkpoint and end all processes; `resume` goes on from it.

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
        """Go on from the last checkpoint.

        Args:
            name: As for `get`.

        Returns:
            The handle of the job that goes on. On this machine it is a new run.

        Raises:
            Conflict: It runs, or is complete.

        Example:
            >>> view = client.resume("digits").wait()
        """
        return await self.job(await (await self.place()).resume(name))

    async def checkpoint(self, name: str, *, timeout: float = 180.0) -> CheckpointView:
        """Have a checkpoint made now; training goes on.

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
