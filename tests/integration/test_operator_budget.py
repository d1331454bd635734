"""How much the operator asks of the API server, read from the audit log: little over a job's life, nothing when idle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster_fixtures import Cluster, KwokNodes
from tests.integration.operator_harness import World, manifest, world

pytestmark = [pytest.mark.integration, pytest.mark.cluster]


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


def test_a_life_costs_one_request_a_pod_and_fifteen_a_job(place: World, kwok_nodes: KwokNodes) -> None:
    kwok_nodes(2)
    place.operator("--progress-seconds=3600")
    before = len(requests(place))
    place.create(manifest(shards=2, workers=4))
    place.until_phase("Running", seconds=60)
    for index in range(4):
        place.end(f"job-worker-{index}-r1")
    for index in range(2):
        place.end(f"job-ps-{index}-e1")
    place.until_phase("Complete", seconds=60)
    spent = requests(place)[before:]
    print("\n".join(words(spent)))
    print(Counter(event["verb"] for event in spent))
    assert len(spent) <= 6 + 15, "\n".join(words(spent))
