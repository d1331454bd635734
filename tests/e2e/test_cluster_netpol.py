"""NetworkPolicies of a run on real nodes, by packets: strangers' pods come through to no port, and operator and training continue.

Who enforces them here is the stand-in of hack/cluster (policies.py, enforcer.py), not a network plugin that anybody runs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.e2e import digits
from tests.e2e.digits import RESTRICTED, RESTRICTED_POD, complete, pods_of, ready_to_kill
from tests.e2e.kube import OPEN, ROOT, Kube, own_namespace, wait_for
from tests.support.cluster_fixtures import WORKER_IMAGE, Cluster

pytestmark = [pytest.mark.soak, pytest.mark.serial]
SCRIPT = (ROOT / "tests" / "e2e" / "workloads" / "knocking.py").read_text()
NAME, BOARD = "digits", 6006
SMALL = {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "128Mi"}}

QUICK = {"terminationGracePeriodSeconds": 2}
"""The first process of a container passes over SIGTERM."""


def container(name: str, *command: str) -> dict[str, Any]:
    image = {"image": WORKER_IMAGE, "imagePullPolicy": "IfNotPresent", "securityContext": RESTRICTED, "resources": SMALL}
    return {"name": name, "command": ["python3", *command], **image}


@dataclass(frozen=True)
class Stranger:
    """A pod that knocks at every port of the job."""

    kube: Kube

    def begin(self, targets: list[str]) -> None:
        spec = {"restartPolicy": "Never", "securityContext": RESTRICTED_POD, "automountServiceAccountToken": False, **QUICK}
        spec["containers"] = [container("stranger", "-c", SCRIPT, *targets)]
        self.kube.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "stranger"}, "spec": spec})

    def reached(self) -> set[str] | None:
        """Where it came through in a round that begins from now on."""
        since = time.time()

        def told() -> list[str] | None:
            lines = [json.loads(line) for line in self.kube.kubectl("logs", "stranger", "--tail=5", check=False).splitlines()]
            return next((line["reached"] for line in lines if line["begun"] >= since), None)

        story = lambda: self.kube.kubectl("describe", "pod", "stranger", check=False)  # noqa: E731
        return set(wait_for("the stranger to knock", told, 60, story=story))


@pytest.fixture
def strangers(kube: Kube, home: Kube, node_cluster: Cluster) -> Iterator[tuple[Stranger, Stranger]]:
    """One in the job's namespace, one in another."""
    away = own_namespace(home, node_cluster, "strangers")
    yield Stranger(kube), Stranger(away)
    home.kubectl("delete", "namespace", away.namespace, "--wait=false")


def job() -> dict[str, Any]:
    """Workers have a port for people; shard 0 is asked every six seconds."""
    made = digits.job(NAME, args=[f"--epochs={2 * digits.LONG_EPOCHS}"], workers=2, checkpoint={"periodSeconds": 2, "everySteps": 25})
    made["spec"]["workers"]["progressDeadlineSeconds"] = 30
    pod = made["spec"]["workers"]["template"]["spec"]
    pod["containers"].append(container("board", "-m", "http.server", str(BOARD)))
    pod.update(QUICK)
    return made


def policies(kube: Kube) -> dict[str, str]:
    """Uids by name."""
    return {item["metadata"]["name"]: item["metadata"]["uid"] for item in kube.list("networkpolicy")}


def step(kube: Kube) -> int:
    return int((kube.status(NAME).get("progress") or {}).get("step") or 0)


@pytest.mark.timeout(900)
def test_strangers_reach_no_port_of_a_run_and_training_goes_on(kube: Kube, strangers: tuple[Stranger, Stranger]) -> None:
    kube.apply(job())
    ready_to_kill(kube, NAME)
    ports = {"shard": (7070, 7071), "worker": (BOARD,)}
    every = {f"{pod['status']['podIP']}:{port}" for role, of in ports.items() for pod in pods_of(kube, NAME, role) for port in of}
    assert len(every) == 6

    def all_reach(wanted: set[str]) -> Callable[[], bool]:
        return lambda: all(stranger.reached() == wanted for stranger in strangers)

    kube.apply(OPEN)
    for stranger in strangers:
        stranger.begin(sorted(every))
    wait_for("strangers to come through while a policy opens all", all_reach(every), 60)
    kube.kubectl("delete", "networkpolicy", "open")
    wait_for("strangers to come through nowhere", all_reach(set()), 30)
    for _ in range(3):
        assert all_reach(set())()

    before = policies(kube)
    assert set(before) == {f"{NAME}-shards", f"{NAME}-workers"}
    kube.kubectl("delete", "networkpolicy", *before)
    mended = lambda: (now := policies(kube)).keys() == before.keys() and not set(now.values()) & set(before.values())  # noqa: E731
    wait_for("policies to be made again", mended, 30, story=lambda: kube.story(NAME))
    wait_for("strangers to come through nowhere again", all_reach(set()), 30)

    known = step(kube)
    wait_for("the operator to hear of further steps", lambda: step(kube) > known, 90, story=lambda: kube.story(NAME))
    status = complete(kube, NAME)
    assert status["restarts"]["total"] == 0 and status["checkpoint"]["step"] > known
    kube.kubectl("delete", "psj", NAME)
    wait_for("the policies to go with the job", lambda: not policies(kube), 120)
