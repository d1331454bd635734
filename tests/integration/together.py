"""Tests of a module that run at the same time, each in a thread of its own: a wait of one is no wait of the next.

A test with the mark `@together` gets the module's `place`, a `name` for its jobs, a `node` of its own where it asks for one, and its
parameters. The first one that pytest calls starts all that were chosen. Each test's outcome is that of its own thread.
"""

from __future__ import annotations

import functools
import inspect
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from tests.integration.operator_harness import World

SECONDS = 110.0
"""For one test, from the first one's start."""
GIVEN = ("place", "node", "name")


class Running:
    """The threads of a module's tests, by the tests' ids."""

    def __init__(self, place: World, items: list[pytest.Function]) -> None:
        place.share_reads()
        self._ends: dict[str, Future[None]] = {item.nodeid: Future() for item in items}
        self._threads = [threading.Thread(target=self._run, args=(place, item), daemon=True) for item in items]
        for thread in self._threads:
            thread.start()

    def end(self, nodeid: str) -> None:
        """Wait for that test; raises what it raised."""
        self._ends[nodeid].result(SECONDS)

    def join(self) -> None:
        """Wait for all, so that none of them uses the place after its end."""
        for thread in self._threads:
            thread.join(SECONDS)

    def _run(self, place: World, item: pytest.Function) -> None:
        end = self._ends[item.nodeid]
        try:
            story = item.function.story
            name = f"j{uuid.uuid4().hex[:6]}"
            words: dict[str, Any] = {"place": place, "name": name}
            if "node" in inspect.signature(story).parameters:
                words["node"] = place.node(f"{place.namespace}-{name}")
            given = item.callspec.params if hasattr(item, "callspec") else {}
            story(**{key: value for key, value in words.items() if key in inspect.signature(story).parameters}, **given)
        except BaseException as error:
            end.set_exception(error)
        else:
            end.set_result(None)


def together(story: Callable[..., None]) -> Callable[..., None]:
    """Let this test run beside those of its module that have this mark too."""

    @functools.wraps(story)
    def test(beside: Running, request: pytest.FixtureRequest, **given: Any) -> None:
        beside.end(request.node.nodeid)

    own = [inspect.Parameter(word, inspect.Parameter.POSITIONAL_OR_KEYWORD) for word in ("beside", "request")]
    parameters = [word for word in inspect.signature(story).parameters.values() if word.name not in GIVEN]
    test.__signature__ = inspect.Signature([*own, *parameters])  # type: ignore[attr-defined]
    vars(test)["story"] = story
    return test


@pytest.fixture(scope="module")
def beside(place: World, request: pytest.FixtureRequest) -> Iterator[Running]:
    """The chosen tests of this module with the mark `@together`, running."""
    chosen = [item for item in request.session.items if isinstance(item, pytest.Function) and item.module is request.module]
    running = Running(place, [item for item in chosen if hasattr(item.function, "story")])
    yield running
    running.join()
