"""The blocking face: each verb is the asyncio one, run on a loop of its own thread, so that it works in notebooks too.

Nothing is written twice: a verb here is one line that names the one of AsyncClient or AsyncJob, with its signature and its docstring.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar

from psjob_client.jobs.view import JobView
from psjob_client.sdk import notebook
from psjob_client.sdk.client import AsyncClient
from psjob_client.sdk.handle import AsyncJob
from psjob_client.sdk.looking import DAY

P = ParamSpec("P")
T = TypeVar("T")
_END = object()
OnInterrupt = Literal["detach", "suspend", "delete"]


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run on the loop's thread and wait. An interrupt (Ctrl-C, a notebook's stop) cancels it."""
    future = asyncio.run_coroutine_threadsafe(work, _loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def blocking(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """The method of the core, awaited."""

    @wraps(method)
    def call(self: Any, /, *args: P.args, **named: P.kwargs) -> T:
        return run(method(self._core, *args, **named))

    return call


def iterating(method: Callable[Concatenate[Any, P], AsyncIterator[T]]) -> Callable[Concatenate[Any, P], Iterator[T]]:
    """The core's iterator, awaited an item at a time."""

    @wraps(method)
    def call(self: Any, /, *args: P.args, **named: P.kwargs) -> Iterator[T]:
        source: Any = method(self._core, *args, **named)

        async def following() -> Any:
            return await anext(source, _END)

        try:
            while (item := run(following())) is not _END:
                yield item
        finally:
            run(source.aclose())

    return call


def handling(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, AsyncJob]]) -> Callable[Concatenate[Any, P], Job]:
    """As `blocking`, for verbs that answer a job's handle."""

    @wraps(method)
    def call(self: Any, /, *args: P.args, **named: P.kwargs) -> Job:
        return Job(run(method(self._core, *args, **named)))

    return call


class Client:
    """Jobs of this machine (`Client.local()`) or of a namespace of a cluster (`Client.kube()`), with the same verbs for both.

    Every call ends: it answers, or raises `psjob_client.jobs.problems.JobProblem`, whose text is one sentence with the next step.

    Example:
        >>> import psjob
        >>> client = psjob.Client.local()
        >>> job = client.train("train.py", workers=4)
        >>> job.wait().phase
        'Complete'
    """

    def __init__(self, core: AsyncClient) -> None:
        self._core = core

    @classmethod
    @wraps(AsyncClient.local.__func__)  # type: ignore[attr-defined]
    def local(cls, folder: str | Path = ".") -> Self:
        return cls(AsyncClient.local(folder))

    @classmethod
    @wraps(AsyncClient.kube.__func__)  # type: ignore[attr-defined]
    def kube(cls, context: str | None = None, namespace: str | None = None, kubeconfig: str | Path | None = None) -> Self:
        return cls(AsyncClient.kube(context, namespace, kubeconfig))

    train = handling(AsyncClient.train)
    submit = handling(AsyncClient.submit)
    job = handling(AsyncClient.job)
    resume = handling(AsyncClient.resume)
    get = blocking(AsyncClient.get)
    list = blocking(AsyncClient.list)
    events = blocking(AsyncClient.events)
    metrics = blocking(AsyncClient.metrics)
    timeline = blocking(AsyncClient.timeline)
    checkpoints = blocking(AsyncClient.checkpoints)
    wait = blocking(AsyncClient.wait)
    suspend = blocking(AsyncClient.suspend)
    checkpoint = blocking(AsyncClient.checkpoint)
    delete = blocking(AsyncClient.delete)
    close = blocking(AsyncClient.close)
    logs = iterating(AsyncClient.logs)
    watch = iterating(AsyncClient.watch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Job:
    """What `Client.train` returns: the client's verbs for one job. In a notebook it shows itself as a table with its loss.

    Example:
        >>> job = client.train(train, args={"lr": 0.1}, workers=2)
        >>> print(job.manifest)
        apiVersion: psjob.dev/v1alpha1
        …
    """

    def __init__(self, core: AsyncJob) -> None:
        self._core = core
        self.id = core.id

    @property
    def manifest(self) -> str:
        """The PSTrainingJob as YAML, for a file, for Git, for `kubectl apply -f -`."""
        return self._core.manifest

    def save(self, path: str | Path) -> Path:
        """Write the manifest to a file; its path. Raises OSError where that cannot be written."""
        return self._core.save(path)

    get = blocking(AsyncJob.get)
    events = blocking(AsyncJob.events)
    metrics = blocking(AsyncJob.metrics)
    suspend = blocking(AsyncJob.suspend)
    checkpoint = blocking(AsyncJob.checkpoint)
    delete = blocking(AsyncJob.delete)
    resume = handling(AsyncJob.resume)
    logs = iterating(AsyncJob.logs)
    watch = iterating(AsyncJob.watch)

    def wait(
        self, *, phases: Collection[str] = ("Complete",), timeout: float = DAY, on_interrupt: OnInterrupt = "detach", show: bool = True
    ) -> JobView:
        """Wait for the job; in a notebook a table and the loss are shown meanwhile, and kept up to date.

        Args:
            phases: Ends at any of these.
            timeout: Seconds, a day unless told otherwise.
            on_interrupt: What becomes of the job when you stop waiting with Ctrl-C or the notebook's stop. With detach it goes on, with
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
        board = notebook.board() if show else None
        try:
            if board is not None:
                for view in self.watch(timeout=timeout, every=notebook.EVERY):
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
                print(f"{self.id} goes on; end it with job.suspend(), which makes a last checkpoint, or with job.delete()")
            raise

    def _repr_html_(self) -> str:
        return notebook.html(self.get(), self.metrics())

    def __repr__(self) -> str:
        return repr(self._core)


class _Background:
    """The loop and its thread; a forked process has one of its own."""

    pid = 0
    loop: asyncio.AbstractEventLoop | None = None
    lock = threading.Lock()


def _loop() -> asyncio.AbstractEventLoop:
    with _Background.lock:
        if _Background.loop is None or _Background.pid != os.getpid():
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="psjob-client", daemon=True).start()
            _Background.loop, _Background.pid = loop, os.getpid()
        return _Background.loop
