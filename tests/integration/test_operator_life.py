"""A job's life on a real API server, under the operator as a real process; pretended nodes run its pods."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster_fixtures import Cluster, KwokNodes
from tests.integration.operator_harness import World, manifest, world

pytestmark = [pytest.mark.integration, pytest.mark.cluster]


@pytest.fixture
def place(control_plane: Cluster, namespace: str, tmp_path: Path) -> Iterator[World]:
    with world(control_plane, namespace, tmp_path) as made:
        yield made


def test_a_job_starts_runs_and_completes(place: World, kwok_nodes: KwokNodes) -> None:
    kwok_nodes(2)
    place.operator()
    place.apply(manifest(shards=2, workers=3))
    status = place.until_phase("Running")
    assert status["shardsReady"] == "2/2" and status["workersReady"] == "3/3"
    assert status["run"] == place.job()["metadata"]["uid"]
    assert sorted(place.pods()) == ["job-ps-0-e1", "job-ps-1-e1", "job-worker-0-r1", "job-worker-1-r1", "job-worker-2-r1"]
    for name in ("job-worker-0-r1", "job-worker-1-r1", "job-worker-2-r1", "job-ps-0-e1", "job-ps-1-e1"):
        place.end(name)
    place.until_phase("Complete")
    assert place.conditions()["Complete"]["status"] == "True"
