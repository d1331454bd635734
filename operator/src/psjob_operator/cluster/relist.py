"""Keeps the store whole: a list of each watched kind at the start, whenever kopf had to list again, and once in ten minutes.

kopf tells what it finds in a list, never what has vanished since the one before; a list of our own, made after kopf's, does.
"""

from __future__ import annotations

import asyncio
import logging
import random

from psjob_operator.cluster.client import ApiError, Client
from psjob_operator.cluster.kinds import JOBS, WATCHED, ResourceKind
from psjob_operator.cluster.queue import Key, Queue
from psjob_operator.cluster.store import JobStore
from psjob_operator.render.names import LABEL_JOB

_log = logging.getLogger(__name__)
RETRY_SECONDS = 2.0


async def take(client: Client, store: JobStore, kind: ResourceKind, namespace: str, labels: str, job: Key | None = None) -> set[Key]:
    """Reads a whole list into the store, a page at a time: of 10,000 pods no more than a page is held as it came.

    Answers the jobs for which it was news. Raises ApiError; what was read before it stays.
    """
    news: set[Key] = set()
    present: set[str] = set()
    version = 0
    async for page in client.pages(kind, namespace, labels):
        news |= {found for raw in page.items if (found := store.put(kind, raw)) is not None}
        present |= {raw["metadata"]["uid"] for raw in page.items}
        version = page.version
    return news | store.sweep(kind, namespace, present, version, job)


class Relist:
    """`run()` does the lists; `listed()` is kopf's word that it has listed a kind."""

    def __init__(self, client: Client, store: JobStore, queue: Queue, namespaces: tuple[str, ...], every: float, seed: int) -> None:
        self._client = client
        self._store = store
        self._queue = queue
        self._places = namespaces or ("",)
        self._every = every
        self._random = random.Random(seed)
        self._wanted: set[tuple[ResourceKind, str]] = set()
        self._missing = {(kind, place) for kind in WATCHED for place in self._places}
        self._changed = asyncio.Event()
        self.synced = asyncio.Event()
        """Set once every kind was listed after kopf's watch of it had begun."""

    def listed(self, kind: ResourceKind, namespace: str) -> None:
        """kopf has (re-)listed: what it did not find must go from the store."""
        self._wanted.add((kind, namespace))
        self._changed.set()

    def missing(self) -> list[str]:
        """Kinds that were not listed yet."""
        return sorted({kind.plural for kind, _ in self._missing})

    async def run(self) -> None:
        """Serve the wishes until cancelled."""
        loop = asyncio.get_running_loop()
        due = loop.time() + self._interval()
        while True:
            try:
                async with asyncio.timeout_at(due):
                    await self._changed.wait()
            except TimeoutError:
                due = loop.time() + self._interval()
                self._wanted |= {(kind, place) for kind in WATCHED for place in self._places}
                await self._serve(everybody=True)
            else:
                await self._serve(everybody=False)

    async def _serve(self, everybody: bool) -> None:
        self._changed.clear()
        wanted, self._wanted = self._wanted, set()
        for kind, place in sorted(wanted, key=lambda pair: (WATCHED.index(pair[0]), pair[1])):
            try:
                self._wake(await take(self._client, self._store, kind, place, labels="" if kind == JOBS else LABEL_JOB))
            except ApiError as error:
                _log.warning("listing %s failed, again in %g s: %s", kind.plural, RETRY_SECONDS, error)
                await asyncio.sleep(RETRY_SECONDS)
                self.listed(kind, place)
                continue
            self._missing.discard((kind, place))
        if not self._missing and not self.synced.is_set():
            self.synced.set()
            everybody = True
        if everybody:
            self._wake(set(self._store.jobs()))

    def _wake(self, keys: set[Key]) -> None:
        for key in sorted(keys):
            self._queue.add(key)

    def _interval(self) -> float:
        return self._every * (0.9 + 0.2 * self._random.random())
