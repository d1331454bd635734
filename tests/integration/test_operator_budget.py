"""How much the operator asks of the API server, read from the audit log: little over a job's life, nothing when idle."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.operator_harness import World, manifest, world
from tests.support.cluster_fixtures import Cluster, KwokNodes

pytestmark = pytest.mark.cluster


@pytest.fixture
def place(control_plane: Cluster, namespace: str, tmp_path: Path) -> Iterator[World]:
    with world(control_plane, namespace, tmp_path) as made:
        yield made


def requests(place: World) -> list[dict[str, Any]]:
    """What this operator asked, watches and discovery apart."""
    found = [event for event in place.cluster.audit(user=place.user) if event["stage"] == "ResponseComplete"]
    return [event for event in found if event["verb"] != "watch" and event.get("objectRef", {}).get("resource")]


def words(events: list[dict[str, Any]]) -> list[str]:
    found = []
    for event in events:
        meant = event["objectRef"]
        resource = f"{meant['resource']}/{meant['subresource']}" if "subresource" in meant else meant["resource"]
        found.append(f"{event['verb']} {resource} {meant.get('name', '')} {event['responseStatus']['code']}")
    return found


def grouped(events: list[dict[str, Any]]) -> Counter[str]:
    found = []
    for event in events:
        meant = event["objectRef"]
        found.append(f"{event['verb']} {meant['resource']}" + (f"/{meant['subresource']}" if "subresource" in meant else ""))
    return Counter(found)


def settled(place: World, seconds: float = 1.0) -> int:
    """Wait until this operator asks nothing for so long; answers how many requests there were until then."""
    count, since = -1, time.monotonic()

    def quiet() -> bool:
        nonlocal count, since
        now = len(requests(place))
        if now != count:
            count, since = now, time.monotonic()
        return time.monotonic() - since > seconds

    place.until("the operator to come to rest", quiet, seconds=60)
    return count


def test_a_life_costs_one_request_a_pod_and_fifteen_a_job_and_four_a_restart(place: World) -> None:
    node = place.node(f"{place.namespace}-n")
    place.operator("--progress-seconds=3600")
    before = settled(place)
    place.create(manifest(shards=2, workers=4))
    shards, workers = [f"job-shard-{index}-a1" for index in range(2)], [f"job-worker-{index}-r1" for index in range(4)]
    place.run(*shards, *workers, node=node)
    place.until_phase("Running", seconds=60)
    running = settled(place)
    place.end(shards[1], 1)
    place.run("job-shard-1-a2", node=node)
    place.until_phase("Running", seconds=60)
    restart = settled(place) - running
    for pod in [*workers, shards[0], "job-shard-1-a2"]:
        place.end(pod)
    place.until_phase("Complete", seconds=60)
    spent = settled(place) - before
    said = "\n".join(words(requests(place)[before:]))
    assert restart <= 1 + 4, said
    assert spent - restart <= 6 + 15, said


def measure_idle(place: World, nodes: KwokNodes, jobs: int, seconds: float, relist: float, progress: float) -> Counter[str]:
    """What the operator asks in a while in which nothing happens to running jobs."""
    nodes(2, {"pods": "1000"})
    place.operator(f"--relist-seconds={relist}", f"--progress-seconds={progress}", "--qps=200")
    names = [f"j{index}" for index in range(jobs)]
    for name in names:
        place.create(manifest(name, shards=1, workers=1, checkpoint={"disabled": True}))
    place.until("all to run", lambda: _running(place) == set(names), seconds=240)
    before = settled(place, 3.0)
    time.sleep(seconds)
    return grouped(requests(place)[before:])


def _running(place: World) -> set[str]:
    return {job["metadata"]["name"] for job in place.items("pstrainingjobs") if job.get("status", {}).get("phase") == "Running"}


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_fifty_idle_jobs_for_fifteen_minutes(place: World, kwok_nodes: KwokNodes) -> None:
    asked = measure_idle(place, kwok_nodes, 50, 900, 600, 60)
    patches = asked.pop("patch pstrainingjobs/status", 0)
    assert patches <= 50 * 16
    assert all(what.startswith("list ") and count <= 2 * 2 for what, count in asked.items()), asked


@pytest.mark.soak
def test_fifty_idle_jobs_ask_nothing(place: World, kwok_nodes: KwokNodes) -> None:
    """More than a minute, the longest of the operator's own periods, in which a re-list falls due once stands for the ten minutes of a real
    installation; no shard can be asked for progress here, which must cost nothing either."""
    asked = measure_idle(place, kwok_nodes, 50, 75, 55, 6)
    assert sum(count for what, count in asked.items() if not what.startswith("list ")) == 0, asked
    assert set(asked) <= {f"list {kind}" for kind in ("pstrainingjobs", "pods", "services", "configmaps", "persistentvolumeclaims")}, asked
    assert all(count <= 2 for count in asked.values()), asked
