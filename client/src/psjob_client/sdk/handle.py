"""A job that was started from Python: the client's verbs, and its manifest. `Job` (job.py) is the same, called without await."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from psjob_client.jobs.view import CheckpointView, EventView, HistoryView, JobView, LogLine
from psjob_client.problems import Conflict
from psjob_client.sdk.looking import DAY
from psjob_client.text import as_yaml
from psjob_operator.api.status import Phase

if TYPE_CHECKING:
    from psjob_client.sdk.client import AsyncClient
    from psjob_client.sdk.weights import Weights


class AsyncJob:
    """What `AsyncClient.train` returns. `id` is what the verbs of clients and the command line take."""

    def __init__(self, client: AsyncClient, name: str, manifest: Mapping[str, Any] | None) -> None:
        self._client = client
        self._manifest = manifest
        self.id = name

    @property
    def manifest(self) -> str:
        """The PSTrainingJob as YAML, for a file, for Git, for `kubectl apply -f -`. Raises Conflict where it was not kept."""
        if self._manifest is None:
            raise Conflict(f"{self.id} kept no manifest; it was started by an older psjob")
        return as_yaml(self._manifest)

    def save(self, path: str | Path) -> Path:
        """Write the manifest to a file; its path. Raises OSError where that cannot be written."""
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
