"""The event loop on which the blocking verbs run their coroutines, in a thread of its own."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, TypeVar

from psjob_client.problems import JobProblem

T = TypeVar("T")
_END: Any = object()


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run on the loop's thread and wait. An interrupt (Ctrl-C, a notebook's stop) cancels it.

    A JobProblem is raised as if it came from here: where it happened on the loop tells a user nothing.
    """
    __tracebackhide__ = True
    future = asyncio.run_coroutine_threadsafe(work, _loop())
    try:
        return future.result()
    except JobProblem as problem:
        told = problem.with_traceback(None)
    except BaseException:
        future.cancel()
        raise
    raise told from None


def iterate(source: AsyncIterator[T]) -> Iterator[T]:
    """What an asynchronous iterator gives, an item at a time; it is closed when this one is."""
    __tracebackhide__ = True

    async def following() -> T:
        return await anext(source, _END)

    async def closing() -> None:
        close = getattr(source, "aclose", None)
        if close is not None:
            await close()

    try:
        while (item := run(following())) is not _END:
            yield item
    finally:
        run(closing())


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
