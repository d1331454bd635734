"""One tenant's manifests do not stop the operator for the others: nested as deep as the API server takes, and as large."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster_fixtures import Cluster
from tests.integration.operator_harness import JOBS, World, manifest, world

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
LEVELS = 9800
"""With those of the manifest around them just below what the API server takes."""
LIMIT = 256 << 20
"""Half of the chart's memory limit."""


@pytest.fixture
def place(control_plane: Cluster, namespace: str, tmp_path: Path) -> Iterator[World]:
    with world(control_plane, namespace, tmp_path) as made:
        yield made


def post(place: World, text: str) -> None:
    """Create a job from this text: a Python of usual settings cannot write it."""
    path = f"{JOBS}/namespaces/{place.namespace}/pstrainingjobs"
    place.cluster.run_kubectl("create", "--raw", path, "-f", "-", stdin=text)


def test_a_job_that_is_nested_as_deep_as_can_be_is_one_jobs_problem(place: World) -> None:
    operator = place.operator()
    command = '"command": ["python", "train.py"]'
    text = json.dumps(manifest("deep"))
    assert command in text
    post(place, text.replace(command, f'{command}, "x": {"[" * LEVELS}{"]" * LEVELS}'))
    place.until("its problem", lambda: "nested deeper" in str(place.cluster.run_kubectl(
        "get", "psj", "deep", "-n", place.namespace, "-o", "jsonpath={.status.conditions}").stdout))  # fmt: skip
    place.create(manifest("after"))
    place.until("the pods of another job", lambda: len(place.pods("after")) == 3)
    operator.kill()
    operator.start()
    place.remove("after-worker-0-r1")
    place.until("the next operator to act", lambda: "after-worker-0-r2" in place.pods("after"))
    assert operator.alive() and not place.pods("deep")


@pytest.mark.rotating
def test_large_manifests_take_no_more_memory_than_they_have_bytes(place: World) -> None:
    """Six of nearly a mebibyte, each fifty times as much as objects of Python."""
    operator = place.operator()
    place.create(manifest("first"))
    place.until("the pods", lambda: len(place.pods("first")) == 3)
    body = manifest("large")
    body["spec"]["workers"]["template"]["spec"]["x"] = [{}] * 330_000
    for number in range(6):
        body["metadata"]["name"] = f"large-{number}"
        post(place, json.dumps(body, separators=(",", ":")))
        # Its Event: to read the job itself again and again would cost more than all else here.
        place.until("it to be seen", lambda number=number: place.events("SpecInvalid", f"large-{number}"), 60)  # type: ignore[misc]
        assert place.status(f"large-{number}")["phase"] == "Failed"
    assert resident(operator.pid) < LIMIT
    place.remove("first-worker-0-r1")
    place.until("another job's pod again", lambda: "first-worker-0-r2" in place.pods("first"))


def resident(pid: int) -> int:
    """Bytes of memory that the process holds now."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:"))
