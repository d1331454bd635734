"""The API server comes back with an older state under operators that run: they read all anew, and pass the numbers that pods show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e import node_faults
from tests.integration.operator_harness import until, world
from tests.support.cluster_fixtures import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.rotating]


LEASE = ("--lease=psjob", "--lease-seconds=4")


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("options", "others", "told"),
    [
        pytest.param(LEASE, 0, "the Lease", id="the one that acts"),
        pytest.param(LEASE, 1, "the Lease", id="the one that stands by"),
        pytest.param(("--relist-seconds=3",), 0, "the list of", id="one without a Lease"),
    ],
)
def test_an_operator_ends_when_the_api_server_is_back_at_an_earlier_state(
    fresh_control_plane: Callable[..., Cluster], tmp_path: Path, options: tuple[str, ...], others: int, told: str
) -> None:
    """Its watches would wait for what was lost, without an error. It is a pod of a Deployment, which starts it again."""
    plane = fresh_control_plane()
    plane.install_crd()
    with world(plane, plane.create_namespace(isolated=False), tmp_path) as place:
        if options == LEASE:
            options = (*options, f"--lease-namespace={place.namespace}")
        for _ in range(others):
            first = place.operator(*options)
            until("it to act", lambda first=first: first.role() == "leader")
        chosen, node = place.operator(*options), place.node("n")
        place.trains("job", node=node)
        node_faults.backup(plane, tmp_path / "etcd")
        for number in (1, 2):
            place.end(f"job-worker-1-r{number}", 75, message='{"ending": "drained"}')
            place.until("its next start", lambda number=number: f"job-worker-1-r{number + 1}" in place.pods())
            place.run(f"job-worker-1-r{number + 1}", node=node)
        place.until_phase("Running", "job")
        node_faults.restore(plane, tmp_path / "etcd")
        assert place.status("job")["internal"]["workerStart"] == 1
        for operator in place.operators:
            until("each to end", lambda it=operator: not it.alive(), 60, also=lambda it=operator: it.log.read_text()[-3000:])
        (line,) = {line["message"] for line in chosen.lines() if "was restored from a backup" in line["message"]}
        assert told in line and "this process ends, to read all anew" in line
        chosen.start()
        place.end("job-worker-1-r1", 76, message='{"ending": "worker 1: a newer process of this rank is here", "fenced": {"start": 3}}')
        place.until("a start above the lost one", lambda: "job-worker-1-r4" in place.pods())
        assert place.status("job")["restarts"]["causes"] == {"Fenced": 1}
