"""The blocking face: `Client`, and `Job`, which is one job. In a notebook a job is an output that is replaced while the job runs.

Each verb is the asyncio one (client.py), run on a loop in a thread of its own, so that it works in notebooks too, whose thread has a loop
already. Docstrings of `Client` are the promise of each verb; those of `Job` are made from them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from psjob_client.jobs.view import CheckpointView, EventView, HistoryView, JobView, LogLine, SpanView, job_html, notebook_board
from psjob_client.sdk.client import DAY, AsyncClient, AsyncJob
from psjob_client.sdk.event_loop import iterate, run
from psjob_client.sdk.manifest import Train
from psjob_operator.api.status import Phase

if TYPE_CHECKING:
    from psjob_client.jobs.verbs import Weights

OnInterrupt = Literal["detach", "suspend", "delete"]
T = TypeVar("T")
Verb = TypeVar("Verb", bound=Callable[..., object])
BOARD_SECONDS = 1.0
"""Seconds between two pictures."""


class Client:
    """Jobs of this machine (`Client.local()`) or of a namespace of a cluster (`Client.kube()`), with the same verbs for both.

    Every call ends: it answers, or raises `psjob.JobProblem`, whose text is one sentence with the next step.

    Example:
        >>> import psjob
        >>> client = psjob.Client.local()
        >>> job = client.train("train.py", workers=4)
        >>> job.wait().phase
        'Complete'
    """

    def __init__(self, core: AsyncClient) -> None:
        self._core = core

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        return cls(AsyncClient.local(folder))

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
        return cls(AsyncClient.kube(context, namespace, kubeconfig))

    def close(self) -> None:
        """Give the connections back. Jobs continue."""
        __tracebackhide__ = True
        run(self._core.close())

    def train(
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
    ) -> Job:
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
        __tracebackhide__ = True
        return Job(run(self._core.train(
            what, args=args, name=name, workers=workers, shards=shards, mode=mode, image=image, resources=resources, env=env,
            packages=packages, spec=spec,
        )))  # fmt: skip

    def submit(self, manifest: Mapping[str, Any] | str | Path) -> Job:
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
        __tracebackhide__ = True
        return Job(run(self._core.submit(manifest)))

    def job(self, name: str) -> Job:
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
        __tracebackhide__ = True
        return Job(run(self._core.job(name)))

    def suspend(self, name: str, *, timeout: float = 120.0, lose_checkpoints: bool = False) -> None:
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
        __tracebackhide__ = True
        run(self._core.suspend(name, timeout=timeout, lose_checkpoints=lose_checkpoints))

    def resume(self, name: str) -> Job:
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
        __tracebackhide__ = True
        return Job(run(self._core.resume(name)))

    def checkpoint(self, name: str, *, timeout: float = 180.0) -> CheckpointView:
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
        __tracebackhide__ = True
        return run(self._core.checkpoint(name, timeout=timeout))

    def delete(self, name: str, *, timeout: float = 60.0) -> None:
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
        __tracebackhide__ = True
        run(self._core.delete(name, timeout=timeout))

    def get(self, name: str) -> JobView:
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
        __tracebackhide__ = True
        return run(self._core.get(name))

    def list(self) -> Sequence[JobView]:
        """All jobs, the newest first, without their processes.

        Returns:
            As `get`, in short.

        Raises:
            JobProblem: The cluster cannot be asked.

        Example:
            >>> [job.name for job in client.list()]
            ['digits']
        """
        __tracebackhide__ = True
        return run(self._core.list())

    def events(self, name: str) -> Sequence[EventView]:
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
        __tracebackhide__ = True
        return run(self._core.events(name))

    def metrics(self, name: str) -> HistoryView:
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
        __tracebackhide__ = True
        return run(self._core.metrics(name))

    def timeline(self, name: str) -> Sequence[SpanView]:
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
        __tracebackhide__ = True
        return run(self._core.timeline(name))

    def checkpoints(self, name: str) -> Sequence[CheckpointView]:
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
        __tracebackhide__ = True
        return run(self._core.checkpoints(name))

    def load_weights(self, name: str) -> Weights:
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
        __tracebackhide__ = True
        return run(self._core.load_weights(name))

    def logs(self, name: str, process: str | None = None, *, follow: bool = False, tail: int | None = None) -> Iterator[LogLine]:
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
        __tracebackhide__ = True
        return iterate(self._core.logs(name, process, follow=follow, tail=tail))

    def watch(self, name: str, *, timeout: float = DAY, every: float | None = None) -> Iterator[JobView]:
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
        __tracebackhide__ = True
        return iterate(self._core.watch(name, timeout=timeout, every=every))

    def wait(self, name: str, *, phases: Collection[str] = ("Complete",), timeout: float = DAY) -> JobView:
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
        __tracebackhide__ = True
        return run(self._core.wait(name, phases=phases, timeout=timeout))


def promised_by_the_client(verb: Verb) -> Verb:
    """Give a verb of `Job` the docstring of the client's verb of that name, without the name of a job. An editor shows its first line."""
    doc = inspect.getdoc(getattr(Client, verb.__name__)) or ""
    doc = re.sub(r"^ +name: .*\n(?: {8}.*\n)*", "", doc, flags=re.MULTILINE)
    doc = re.sub(r"^Args:\n\n", "", doc, flags=re.MULTILINE)
    doc = re.sub(r'\bclient\.(\w+)\("digits"(?:, )?', r"job.\1(", doc)
    verb.__doc__ = re.sub(r"NoSuchJob: There is none.*", "NoSuchJob: It has been deleted.", doc)
    return verb


class Job:
    """What `Client.train` returns: the client's verbs for one job. In a notebook it shows itself as a table with its loss.

    Example:
        >>> job = client.train(train, args={"lr": 0.1}, workers=2)
        >>> print(job.manifest)
        apiVersion: psjob.dev/v1alpha1
        …
    """

    id: str
    """What the verbs of clients and the command line take."""

    def __init__(self, core: AsyncJob) -> None:
        self._core = core
        self.id = core.id

    @property
    def phase(self) -> Phase:
        """One word: Pending, Running, Recovering, Suspended, Complete or Failed, as it is now."""
        __tracebackhide__ = True
        return run(self._core.phase())

    @property
    def manifest(self) -> str:
        """The PSTrainingJob as YAML, for a file, for Git, for `kubectl apply -f -`. Raises Conflict if it was not kept."""
        return self._core.manifest

    def save(self, path: str | Path) -> Path:
        """Write the manifest to a file.

        Args:
            path: Of the file; one that is there is replaced.

        Returns:
            The path.

        Raises:
            OSError: It cannot be written.

        Example:
            >>> job.save("job.yaml")
            PosixPath('job.yaml')
        """
        return self._core.save(path)

    def wait(
        self, *, phases: Collection[str] = ("Complete",), timeout: float = DAY, on_interrupt: OnInterrupt = "detach", show: bool = True
    ) -> JobView:
        """Wait for the job; in a notebook a table and the loss are shown meanwhile, and kept up to date.

        Args:
            phases: Ends at any of these: Pending, Running, Recovering, Suspended, Complete, Failed.
            timeout: Seconds, a day unless told otherwise.
            on_interrupt: What becomes of the job when you stop waiting with Ctrl-C or the notebook's stop. With detach it continues, with
                suspend it makes a last checkpoint and ends, with delete it is removed. KeyboardInterrupt is raised in each case.
            show: Show it in a notebook.

        Returns:
            The job as it is then.

        Raises:
            JobFailed: It ended in another phase.
            DeadlinePassed: It is not there in time.

        Example:
            >>> job.wait(timeout=600).phase
            'Complete'
        """
        __tracebackhide__ = True
        board = notebook_board() if show else None
        try:
            if board is not None:
                for view in self.watch(timeout=timeout, every=BOARD_SECONDS):
                    board(view, self.metrics())
                    if view.phase in phases:
                        return view
            return run(self._core.wait(phases=phases, timeout=timeout))
        except KeyboardInterrupt:
            if on_interrupt == "suspend":
                self.suspend()
            elif on_interrupt == "delete":
                self.delete()
            else:
                print(f"{self.id} continues; end it with job.suspend(), which makes a last checkpoint, or with job.delete()")
            raise

    def _repr_html_(self) -> str:
        return job_html(self.get(), self.metrics())

    def __repr__(self) -> str:
        return repr(self._core)

    @promised_by_the_client
    def get(self) -> JobView:
        """A job with everything that is known now: phase, progress, processes, checkpoint, warnings."""
        __tracebackhide__ = True
        return run(self._core.get())

    @promised_by_the_client
    def watch(self, *, timeout: float = DAY, every: float | None = None) -> Iterator[JobView]:
        """A job whenever it has changed, until it is over or suspended."""
        __tracebackhide__ = True
        return iterate(self._core.watch(timeout=timeout, every=every))

    @promised_by_the_client
    def logs(self, process: str | None = None, *, follow: bool = False, tail: int | None = None) -> Iterator[LogLine]:
        """What processes print."""
        __tracebackhide__ = True
        return iterate(self._core.logs(process, follow=follow, tail=tail))

    @promised_by_the_client
    def events(self) -> Sequence[EventView]:
        """What happened to a job, the oldest first: starts, restarts, failures, checkpoints."""
        __tracebackhide__ = True
        return run(self._core.events())

    @promised_by_the_client
    def metrics(self) -> HistoryView:
        """Loss, steps a second and the script's own numbers over time."""
        __tracebackhide__ = True
        return run(self._core.metrics())

    @promised_by_the_client
    def load_weights(self) -> Weights:
        """The weights of a job, on the CPU: the final ones, or those of its newest checkpoint."""
        __tracebackhide__ = True
        return run(self._core.load_weights())

    @promised_by_the_client
    def suspend(self, *, timeout: float = 120.0, lose_checkpoints: bool = False) -> None:
        """Make a last checkpoint and end all processes; `resume` continues from it."""
        __tracebackhide__ = True
        run(self._core.suspend(timeout=timeout, lose_checkpoints=lose_checkpoints))

    @promised_by_the_client
    def resume(self) -> Job:
        """Continue from the last checkpoint."""
        __tracebackhide__ = True
        return Job(run(self._core.resume()))

    @promised_by_the_client
    def checkpoint(self, *, timeout: float = 180.0) -> CheckpointView:
        """Have a checkpoint made now; training continues."""
        __tracebackhide__ = True
        return run(self._core.checkpoint(timeout=timeout))

    @promised_by_the_client
    def delete(self, *, timeout: float = 60.0) -> None:
        """End a job and forget it: on this machine with its checkpoints, on a cluster without those of a claim that is retained."""
        __tracebackhide__ = True
        run(self._core.delete(timeout=timeout))
