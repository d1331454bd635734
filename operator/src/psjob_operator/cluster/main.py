"""The operator as a process: wait for the CRD, watch, work; end when asked to, or when the watches end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from psjob_operator.cluster import connect, reconcile, urgency, wake
from psjob_operator.cluster.client import ApiError, Client, Limits
from psjob_operator.cluster.health import Health
from psjob_operator.cluster.kinds import CHILDREN, JOBS
from psjob_operator.cluster.queue import Queue
from psjob_operator.cluster.relist import Relist
from psjob_operator.cluster.store import JobStore
from psjob_operator.cluster.watch import Watch

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """How this operator runs."""

    runtime_image: str
    kubeconfig: str | None = None
    namespaces: tuple[str, ...] = ()
    """Empty: all of them."""
    health_host: str = ""
    health_port: int = 8080
    limits: Limits = field(default_factory=Limits)
    turns: int = 8
    """Jobs looked at side by side; one more serves only those that lost something or are about to run."""
    relist_seconds: float = 600.0
    progress_seconds: float = 60.0
    crd_seconds: float = 5.0
    """How often it is asked whether the CRD is served."""


async def run(options: Options) -> int:
    """Run until SIGTERM or SIGINT (0), or until the watches end by themselves (1). Raises ConnectError, OSError (port)."""
    stop = asyncio.Event()
    _on_signals(stop)
    configuration = await connect.configure(options.kubeconfig)
    gc.collect()
    gc.freeze()  # what was imported stays, and need not be looked through again and again
    client = Client(configuration, options.limits, connect.AGENT)
    store = JobStore()
    queue = Queue(rank=lambda key: urgency.rank(store, key))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=64)) as session:
        settings = reconcile.Settings(options.runtime_image, f"{socket.gethostname()}-{os.getpid()}", options.progress_seconds)
        reconciler = reconcile.Reconciler(client, store, queue, settings, session)
        health = Health(lambda: reconcile.health(reconciler, store, queue), reconciler.told)
        await health.start(options.health_host, options.health_port)
        try:
            return await _serve(options, client, store, queue, reconciler, health, stop)
        finally:
            await health.stop()
            await client.close()


async def _serve(
    options: Options, client: Client, store: JobStore, queue: Queue, reconciler: reconcile.Reconciler, health: Health, stop: asyncio.Event
) -> int:
    relist = Relist(client, store, queue, options.namespaces, options.relist_seconds, seed=os.getpid())
    beat = asyncio.create_task(health.beat())
    try:
        if not await _crd_served(client, options, health, stop):
            return 0
        health.waiting_for = "the first lists"
        # kopf cancels at its end what was begun after it; these begin before.
        ours = [asyncio.create_task(relist.run(), name="relist")]
        ours += [asyncio.create_task(_when(relist.synced, reconciler.work()), name=f"turns-{n}") for n in range(options.turns)]
        ours.append(asyncio.create_task(_when(relist.synced, reconciler.work(urgency.NEAR)), name="turns-urgent"))
        ours.append(asyncio.create_task(reconciler.teller.run(), name="events"))
        ours.append(asyncio.create_task(_when(relist.synced, _say_ready(health, store)), name="ready"))
        places = options.namespaces or ("",)
        ours += [
            asyncio.create_task(Watch(client, relist, kind, place).run(), name=f"watch-{kind.plural}")
            for kind in CHILDREN
            for place in places
        ]
        ears = wake.Ears(on_event=relist.heard, on_listed=relist.listed, on_start=lambda: _on_signals(stop))
        watching = asyncio.create_task(
            wake.run(lambda: connect.configure(options.kubeconfig), options.namespaces, ears, stop), name="watches"
        )
        await asyncio.wait([watching, *(task for task in ours if task.get_name() != "ready")], return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            _log.error("the watches ended by themselves; this process ends, to be started again")
        await _end(watching, *ours)
        return 0 if stop.is_set() else 1
    finally:
        await _end(beat)


async def _crd_served(client: Client, options: Options, health: Health, stop: asyncio.Event) -> bool:
    """Wait until the API server serves our kind; False where the process is asked to stop first."""
    told = ""
    while not stop.is_set():
        try:
            if await client.served(JOBS):
                return True
            why = f"the CRD {JOBS.plural}.{JOBS.group} to be installed (kubectl apply -f crds/, or the chart)"
        except ApiError as error:
            why = f"the API server to answer: {error}"
        if why != told:
            _log.warning("waiting for %s", why)
        health.waiting_for = told = why
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(options.crd_seconds):
                await stop.wait()
    return False


async def _when(event: asyncio.Event, then: Coroutine[Any, Any, None]) -> None:
    try:
        await event.wait()
    except asyncio.CancelledError:
        then.close()
        raise
    await then


async def _say_ready(health: Health, store: JobStore) -> None:
    health.waiting_for = ""
    _log.info("ready: %s", ", ".join(f"{count} {plural}" for plural, count in store.counts().items()))


def _on_signals(stop: asyncio.Event) -> None:
    """SIGTERM and SIGINT set `stop`, from the first moment on (process 1 of a container would pass over them otherwise)."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)


async def _end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            _log.error("%s", result)
