"""A node with many workers is reset again and again: each reset is one event, and the job ends right."""

from __future__ import annotations

import time

import pytest

from tests.e2e import counting
from tests.e2e.digits import beyond_checkpoint, complete, coordinator, final_weights
from tests.e2e.kube import Kube, wait_for
from tests.e2e.node_faults import reset
from tests.support.cluster_fixtures import Cluster

pytestmark = [pytest.mark.nodes, pytest.mark.serial, pytest.mark.soak]
NAME = "counts"
WORKERS, RESETS, STEPS, PACE = 8, 5, 240, 0.05


@pytest.mark.timeout(900)
@pytest.mark.parametrize("shards_on", ["node2", "node1"])
def test_a_node_of_eight_workers_reset_five_times_completes(kube: Kube, node_cluster: Cluster, shards_on: str) -> None:
    document = counting.job(NAME, STEPS, PACE, WORKERS, runPolicy={"backoffLimit": 3})
    document["spec"]["workers"]["template"]["spec"]["nodeSelector"] = {"kubernetes.io/hostname": "node2"}
    document["spec"]["shards"]["template"]["spec"]["nodeSelector"] = {"kubernetes.io/hostname": shards_on}
    kube.apply(document)
    began = time.time()
    before, kept = dict.fromkeys(range(WORKERS), 0), 0

    def trains() -> bool:
        """All workers were started again, and a new checkpoint and a step came after that."""
        said, joined = beyond_checkpoint(kube, NAME), counting.joined(kube, NAME)
        again = len(joined) == WORKERS and all(joined[rank] > start for rank, start in before.items())
        return again and said is not None and said["checkpoint"]["step"] > kept

    for turn in range(RESETS):
        wait_for(f"training to continue after {turn} resets", trains, 200, story=lambda: kube.story(NAME))
        before = counting.starts(kube, NAME)
        said = coordinator(kube, NAME)
        assert said is not None and said["step"] < STEPS, "it was over before the last reset"
        kept = said["checkpoint"]["step"]
        print(f"{time.time() - began:.0f} s: reset {turn + 1} at step {said['step']}; {kube.status(NAME)['restarts']['causes']}")
        reset(node_cluster, "node2")
    status = complete(kube, NAME)
    print(f"{time.time() - began:.0f} s: {status['restarts']['causes']}, {status['restarts']['counted']} counted")
    assert status["restarts"]["counted"] <= 3 and status["restarts"]["total"] >= RESETS * WORKERS, status["restarts"]
    counting.check(final_weights(kube, NAME), STEPS, WORKERS)
