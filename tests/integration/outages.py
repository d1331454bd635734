"""Running jobs under an API server that goes and comes back, and what must hold of them then."""

from __future__ import annotations

import time

from hack.cluster.api import ApiError
from tests.integration.operator_harness import Operator, World, manifest

JOBS = 4
AGAIN_SECONDS = 60.0
"""From the return of the API server to the pod of what was lost while it was away."""


def running(place: World) -> None:
    """An operator, and jobs that run under it."""
    node = place.node(f"{place.namespace}-n")
    place.operator()
    for number in range(JOBS):
        place.create(manifest(f"j{number}"))
    for number in range(JOBS):
        place.run(*(f"j{number}-{pod}" for pod in ("shard-0-a1", "worker-0-r1", "worker-1-r1")), node=node)
    for number in range(JOBS):
        place.until_phase("Running", f"j{number}")


def unharmed(place: World, before: dict[str, str]) -> None:
    """Every pod is the one it was, nothing was started, and the operator lives."""
    operator: Operator = place.operators[0]
    assert operator.alive(), place.story()
    assert uids(place) == before
    for number in range(JOBS):
        status = place.status(f"j{number}")
        assert status["phase"] == "Running" and status["restarts"].get("total", 0) == 0, place.story()


def uids(place: World) -> dict[str, str]:
    """Of all pods, by name."""
    return {name: pod["metadata"]["uid"] for name, pod in place.pods().items()}


def goes_on(place: World) -> float:
    """A worker that is lost starts again; answers the seconds that took."""
    began = time.monotonic()
    place.remove("j0-worker-1-r1")
    place.until("the worker to start again", lambda: "j0-worker-1-r2" in place.pods(), AGAIN_SECONDS)
    place.create(manifest("late"))
    place.until("a new job's pods", lambda: len(place.pods("late")) == 3, AGAIN_SECONDS)
    assert place.operators[0].alive() and place.status("j0")["restarts"]["counted"] == 0
    return time.monotonic() - began


def answers(place: World) -> bool:
    """Whether the API server does."""
    try:
        return bool(place.items("pods"))
    except (ApiError, OSError):
        return False
