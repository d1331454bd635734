"""GPU workers and CPU shards on the real scheduler: what fits is placed, what does not is told in the scheduler's own words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hack.cluster.paths import REPO
from tests.integration.operator_harness import World, world
from tests.support.cluster_fixtures import Cluster, KwokNodes

pytestmark = pytest.mark.cluster
EXAMPLE = REPO / "examples" / "gpu" / "job.yaml"


@pytest.fixture
def place(control_plane: Cluster, namespace: str, tmp_path: Path) -> Iterator[World]:
    with world(control_plane, namespace, tmp_path) as made:
        made.operator()
        yield made


def example() -> dict[str, Any]:
    return dict(yaml.safe_load(EXAMPLE.read_text()))


def test_gpu_workers_are_placed_and_wait_in_the_schedulers_words(place: World, kwok_nodes: KwokNodes) -> None:
    job = example()
    name, count = job["metadata"]["name"], job["spec"]["workers"]["replicas"]
    shards = job["spec"]["shards"]["replicas"]
    assert count >= 2
    kwok_nodes(1, {"nvidia.com/gpu": str(count - 1)})
    place.apply(job)
    place.until("the scheduler's words", lambda: "Insufficient nvidia.com/gpu" in str(place.status(name)), seconds=60)
    status = place.until_counts(name, f"{count - 1}/{count}")
    assert [problem["reason"] for problem in status["workers"]["problems"]] == ["Unschedulable"]
    assert status["restarts"]["total"] == 0 and status["phase"] == "Pending"
    words = ("get", "psj", name, "-n", place.namespace, "-o", "wide")
    place.until("kubectl to show them", lambda: "Insufficient nvidia.com/gpu" in place.cluster.run_kubectl(*words).stdout, seconds=30)
    kwok_nodes(1, {"nvidia.com/gpu": "1"})
    status = place.until_phase("Running", name, seconds=60)
    assert status["workersReady"] == f"{count}/{count}" and status["shardsReady"] == f"{shards}/{shards}"
    pods = place.pods()
    for index in range(count):
        spec = pods[f"{name}-worker-{index}-r1"]["spec"]
        assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    for index in range(shards):
        spec = pods[f"{name}-shard-{index}-a1"]["spec"]
        assert "nvidia.com/gpu" not in str(spec["containers"][0]["resources"])
    nodes = {pods[f"{name}-shard-{index}-a1"]["spec"]["nodeName"] for index in range(shards)}
    assert len(nodes) == 1, "the claim is ReadWriteOnce"
