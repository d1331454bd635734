"""Keeps the store whole: a list of each watched kind at the start, whenever a watch has to begin anew, and once in ten minutes.

Of jobs kopf tells what it finds in a list, never what has vanished since the one before; a list of our own, made after kopf's, does.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any

from psjob_operator.cluster import history
from psjob_operator.cluster.client import ApiError, Client
from psjob_operator.cluster.kinds import JOBS, WATCHED, ResourceKind
from psjob_operator.cluster.places import Places
from psjob_operator.cluster.queue import Key, Queue
from psjob_operator.cluster.store import JobStore
from psjob_operator.render.objects import LABEL_JOB

_log = logging.getLogger(__name__)
RETRY_SECONDS = 2.0
REFUSED_SECONDS = 15.0
"""Until a list that was refused is tried again."""
REFUSALS = (401, 403)


async def take(
    client: Client, store: JobStore, kind: ResourceKind, namespace: str, labels: str, job: Key | None = None
) -> tuple[set[Key], int]:
    """Reads a whole list into the store, a page at a time: of 10,000 pods no more than a page is held as it came.

    Answers the jobs for which it was news, and the list's resourceVersion. Raises ApiError; what was read before it stays.
    """
    news: set[Key] = set()
    present: set[str] = set()
    version = 0
    async for page in client.pages(kind, namespace, labels):
        news |= {found for raw in page.items if (found := store.put(kind, raw)) is not None}
        present |= {raw["metadata"]["uid"] for raw in page.items}
        version = page.version
    return news | store.sweep(kind, namespace, present, version, job), version


class Relist:
    """`run()` does the lists; `listed()` is kopf's word that it has listed a kind; `read()` and `heard()` are for watches of our own."""

    def __init__(
        self,
        client: Client,
        store: JobStore,
        queue: Queue,
        places: Places,
        every: float,
        seed: int,
        kinds: Sequence[ResourceKind] = WATCHED,
    ) -> None:
        self._client = client
        self._store = store
        self._queue = queue
        self._places = places
        self._every = every
        self._random = random.Random(seed)  # noqa: S311 - spreads calls over time
        self._wanted: set[tuple[ResourceKind, str]] = set()
        self._kinds = kinds
        self._newest: dict[tuple[ResourceKind, str], int] = {}
        """The resourceVersion of the last list of each kind in each place."""
        self._changed = asyncio.Event()
        self.synced = asyncio.Event()
        """Set once every kind was listed in each place that may be read, jobs after kopf's watch of them had begun."""

    def listed(self, kind: ResourceKind, namespace: str) -> None:
        """kopf has (re-)listed: what it did not find must go from the store."""
        self._wanted.add((kind, namespace))
        self._changed.set()

    async def read(self, kind: ResourceKind, namespace: str) -> int:
        """Take a whole list in; its resourceVersion. Raises ApiError, and RuntimeError where the API server is back at an earlier state."""
        try:
            news, version = await take(self._client, self._store, kind, namespace, labels="" if kind == JOBS else LABEL_JOB)
        except ApiError as error:
            if error.code in REFUSALS:
                self.refused(kind, namespace, "list", error.message)
            raise
        self._newest[kind, namespace] = history.onward(self._newest.get((kind, namespace), 0), version, f"the list of {kind.plural}")
        self._places.listed(kind, namespace)
        self._wake(news)
        self._begin()
        return version

    def refused(self, kind: ResourceKind, namespace: str, verb: str, why: str) -> None:
        """The API server lets us not read this: the other places are not kept waiting for it."""
        before = self._places.shut(namespace)
        self._places.refused(kind, namespace, verb, why)
        if not before and (words := self._places.shut(namespace)):
            _log.warning("nothing is done there until it is granted: %s", words)
        self._begin()

    def may(self, kind: ResourceKind, namespace: str, verb: str) -> None:
        """The API server lets us read this."""
        before = self._places.shut(namespace)
        self._places.may(kind, namespace, verb)
        if before and not self._places.shut(namespace):
            _log.info("granted now: %s", before)
            self._wake({key for key in self._store.jobs() if namespace in ("", key.namespace)})
        self._begin()

    def heard(self, kind: ResourceKind, type_: str | None, raw: Mapping[str, Any]) -> None:
        """An event of a watch: take it in, and look at the job that it concerns."""
        key = self._store.remove(kind, raw) if type_ == "DELETED" else self._store.put(kind, raw)
        if key is not None:
            self._queue.add(key)

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
                self._wanted |= {(kind, place) for kind in self._kinds for place in self._places.all}
                await self._serve(everybody=True)
            else:
                await self._serve(everybody=False)

    async def _serve(self, everybody: bool) -> None:
        self._changed.clear()
        wanted, self._wanted = self._wanted, set()
        for kind, place in sorted(wanted, key=lambda pair: (self._kinds.index(pair[0]), pair[1])):
            try:
                await self.read(kind, place)
            except ApiError as error:
                if error.code in REFUSALS:
                    # Its own watch may not ask again soon, and the other lists do not wait.
                    asyncio.get_running_loop().call_later(REFUSED_SECONDS, self.listed, kind, place)
                    continue
                _log.warning("listing %s failed, again in %g s: %s", kind.plural, RETRY_SECONDS, error)
                await asyncio.sleep(RETRY_SECONDS)
                self.listed(kind, place)
        if everybody:
            self._wake(set(self._store.jobs()))

    def _begin(self) -> None:
        """Once each kind was listed where it may be, all jobs are looked at."""
        if self._places.whole and not self.synced.is_set():
            self.synced.set()
            self._wake(set(self._store.jobs()))

    def _wake(self, keys: set[Key]) -> None:
        for key in sorted(keys):
            self._queue.add(key)

    def _interval(self) -> float:
        return self._every * (0.9 + 0.2 * self._random.random())
