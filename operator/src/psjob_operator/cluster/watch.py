"""Hears of the jobs' children: a list of each kind, a page at a time, then a watch from that moment on, for ever.

An event goes from the wire into the store's small projection and is dropped: there are as many as five a pod while a fleet of jobs begins.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from psjob_operator.cluster.client import ApiError, Client
from psjob_operator.cluster.kinds import ResourceKind
from psjob_operator.render.objects import LABEL_JOB

FIRST_SECONDS, MOST_SECONDS = 0.5, 30.0
"""Until a list or a watch that failed is tried again."""
_log = logging.getLogger(__name__)


class Watch:
    """One kind, in one namespace or (empty) in all."""

    def __init__(
        self,
        client: Client,
        read: Callable[[ResourceKind, str], Awaitable[int]],
        heard: Callable[[ResourceKind, str | None, Mapping[str, Any]], None],
        kind: ResourceKind,
        namespace: str,
        granted: Callable[[ResourceKind, str, str], None] = lambda kind, place, verb: None,
        refused: Callable[[ResourceKind, str, str, str], None] = lambda kind, place, verb, why: None,
    ) -> None:
        """`read` takes a whole list in and answers its resourceVersion; `heard` is told of each event.

        `granted` and `refused` are told whether the API server lets us watch.
        """
        self._client = client
        self._read, self._heard = read, heard
        self._granted, self._refused = granted, refused
        self._kind = kind
        self._namespace = namespace
        self._version = ""
        """Of the last that was heard; empty: a list is needed."""
        self._failures = 0

    async def run(self) -> None:
        """Until cancelled. What fails is tried again, after a while that grows."""
        while True:
            try:
                if not self._version:
                    self._version = str(await self._read(self._kind, self._namespace))
                began = asyncio.get_running_loop().time()
                await self._follow()
                self._failures = 0
                if asyncio.get_running_loop().time() - began < FIRST_SECONDS:
                    await asyncio.sleep(FIRST_SECONDS)  # an API server that ends watches at once is not to be asked in a circle
            except ApiError as error:
                if error.code == 410:
                    self._version = ""
                    continue
                await self._wait(error)

    async def _follow(self) -> None:
        """One watch, until the API server ends it."""
        try:
            stream = self._client.watch(self._kind, self._namespace, self._version, LABEL_JOB, self._opened)
            async for type_, raw in stream:
                self._take(type_, raw)
        except ApiError as error:
            if error.code in (401, 403):
                self._refused(self._kind, self._namespace, "watch", error.message)
            raise

    def _opened(self) -> None:
        self._granted(self._kind, self._namespace, "watch")

    def _take(self, type_: str, raw: Mapping[str, Any]) -> None:
        self._failures = 0
        if type_ == "ERROR":
            raise ApiError(int(raw.get("code") or 0), str(raw.get("reason") or "Unknown"), str(raw.get("message") or raw))
        if type_ != "BOOKMARK":
            self._heard(self._kind, type_, raw)
        self._version = raw["metadata"]["resourceVersion"]

    async def _wait(self, error: ApiError) -> None:
        delay = min(MOST_SECONDS, FIRST_SECONDS * 2.0 ** min(self._failures, 10))
        self._failures += 1
        # A connection that is cut now and then is the watch's ordinary end.
        say = _log.warning if self._failures > 1 or error.code else _log.debug
        say("watching %s failed, again in %.1f s: %s", self._kind.plural, delay, error)
        await asyncio.sleep(max(error.retry_after, delay * random.uniform(0.8, 1.2)))  # noqa: S311 - spreads calls over time
