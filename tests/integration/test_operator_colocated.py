"""Pairs of a shard and a worker on a real API server: what their pods require, and what becomes of it when one or both are lost.

The test plays scheduler and kubelet, as in test_operator_failures.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.operator_harness import World, manifest, stamp
from tests.integration.together import together
from tests.unit.api_manifest import MANY_NODES

pytestmark = pytest.mark.cluster
MANY = MANY_NODES


def pairs(place: World, name: str, *nodes: str) -> None:
    """A job of so many pairs that runs, pair i on node i."""
    place.create(manifest(name, workers=len(nodes), shards=len(nodes), of_shards={"placement": "Colocated"}, checkpoint=MANY))
    for index, node in enumerate(nodes):
        pods = (f"{name}-shard-{index}-a1", f"{name}-worker-{index}-r1")
        place.until("its pods", lambda pods=pods: set(pods) <= set(place.pods()))  # type: ignore[misc]
        place.run(*pods, node=node)
    place.until_phase("Running", name)


def required(pod: dict[str, Any]) -> dict[str, str] | None:
    """Role, index and number of the process whose node this pod requires, as the API server has it; None: it may go anywhere."""
    terms = pod["spec"].get("affinity", {}).get("podAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", [])
    if not terms:
        return None
    (term,) = terms
    assert term["topologyKey"] == "kubernetes.io/hostname"
    labels = term["labelSelector"]["matchLabels"]
    assert labels["psjob.dev/run"] == pod["metadata"]["labels"]["psjob.dev/run"]
    return {key: labels[f"psjob.dev/{key}"] for key in ("role", "index", "number")}


def worker(index: int, number: int) -> dict[str, str]:
    return {"role": "worker", "index": str(index), "number": str(number)}


@together
def test_a_lost_machine_is_answered_by_one_start_each_and_the_shard_follows(place: World, node: str, name: str) -> None:
    other = place.node(f"{node}-b")
    pairs(place, name, node, other)
    made = place.pods()
    assert required(made[f"{name}-shard-1-a1"]) == worker(1, 1) and required(made[f"{name}-worker-1-r1"]) is None
    place.node(other, ready=False)
    old = [f"{name}-shard-1-a1", f"{name}-worker-1-r1"]
    for pod in old:
        place.report(pod, conditions=[{"type": "Ready", "status": "False", "lastTransitionTime": stamp()}])
    new = [f"{name}-shard-1-a2", f"{name}-worker-1-r2"]
    place.until("the pair's next starts", lambda: set(new) <= set(place.pods()))
    made = place.pods()
    assert required(made[new[0]]) == worker(1, 2), "it does not wait for the pod of a node that is gone"
    assert required(made[new[1]]) is None
    place.until("the old pods to be taken off", lambda: not place.pods().keys() & set(old))
    place.run(*new, node=node, job=name)
    status = place.status(name)
    assert [shard["attempt"] for shard in status["shards"]] == [1, 2] and status["restarts"]["total"] == 2


@together
def test_the_claim_of_a_pair_is_made_before_its_pods_and_goes_with_the_job(place: World, node: str, name: str) -> None:
    shards = {"placement": "Colocated", "pairStorageClassName": "local"}
    place.create(manifest(name, workers=2, shards=1, of_shards=shards, checkpoint=MANY))
    pods = (f"{name}-shard-0-a1", f"{name}-worker-0-r1", f"{name}-worker-1-r1")
    place.until("its pods", lambda: set(pods) <= set(place.pods()))
    mounted = [claims_of(place.pods()[pod]) for pod in pods]
    (claim,) = mounted[0] & mounted[1]
    assert claim.startswith(f"{name}-pair-") and claim.endswith("-0-1") and claim not in mounted[2]
    made = place.cluster.api.get(place.path("persistentvolumeclaims", claim))
    assert made["spec"]["storageClassName"] == "local" and made["spec"]["resources"]["requests"] == {"storage": "1Mi"}
    assert made["metadata"]["ownerReferences"][0]["name"] == name
    place.run(*pods, node=node)
    place.until_phase("Running", name)
    place.end(f"{name}-worker-0-r1", 1)
    again = f"{name}-worker-0-r2"
    place.until("the worker's next start", lambda: again in place.pods())
    assert claim in claims_of(place.pods()[again]), "its shard has that volume"


def claims_of(pod: dict[str, Any]) -> set[str]:
    return {volume["persistentVolumeClaim"]["claimName"] for volume in pod["spec"]["volumes"] if "persistentVolumeClaim" in volume}


@pytest.mark.parametrize(("placement", "field"), [("Spread", "topologySpreadConstraints"), ("Packed", "affinity")])
@together
def test_what_spread_and_packed_ask_of_the_scheduler_is_taken(place: World, name: str, placement: str, field: str) -> None:
    place.create(manifest(name, shards=2, of_shards={"placement": placement}, checkpoint=MANY))
    shard = f"{name}-shard-1-a1"
    place.until("the shard", lambda: shard in place.pods(name))
    assert field in place.pods(name)[shard]["spec"] and required(place.pods(name)[shard]) is None
