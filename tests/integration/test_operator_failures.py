"""Failures of each kind that the API server has a part in: what is seen, whether it counts, and what the user is told.

tests/unit/test_plan_restart.py has every row of the table, and tests/unit/test_cluster_pods.py how it is read from a pod. The test plays
scheduler and kubelet by writing pods' status; the API server and the operator are real. One operator serves all tests.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.operator_harness import World, container_status, manifest, stamp
from tests.integration.together import together

pytestmark = pytest.mark.cluster


def begun(place: World, name: str, **spec: Any) -> None:
    """A job with one shard and two workers whose pods are there."""
    place.create(manifest(name, **spec))
    place.until("its pods", lambda: {f"{name}-shard-0-a1", f"{name}-worker-0-r1", f"{name}-worker-1-r1"} <= set(place.pods()))


def told(place: World, name: str, *words: str) -> dict[str, Any]:
    """Wait until the job's conditions or problems hold all these words; answers its status."""

    def holds() -> bool:
        status = place.status(name)
        said = [entry.get("message", "") + " " + entry.get("reason", "") for entry in status.get("conditions", [])]
        said += [f"{entry['reason']} {entry.get('message', '')}" for entry in status.get("workers", {}).get("problems", [])]
        return all(word in " | ".join(said) for word in words)

    place.until(f"{name} to tell {words}", holds)
    return place.status(name)


def restarted(place: World, name: str, pod: str) -> dict[str, Any]:
    """Wait for a pod; answers status.restarts."""
    place.until(f"{pod} to be made", lambda: pod in place.pods())
    return dict(place.status(name)["restarts"])


# -- what does not count and is told ----------------------------------------------------------------


@together
def test_the_runtime_image_cannot_be_pulled(place: World, node: str, name: str) -> None:
    begun(place, name)
    init = place.pods()[f"{name}-worker-0-r1"]["spec"]["initContainers"][0]["name"]
    place.scheduled(f"{name}-worker-0-r1", node)
    place.wait(f"{name}-worker-0-r1", "ErrImageNeverPull", "image psjob-runtime:test is not present", container=init, init=True)
    assert told(place, name, "psjob-runtime:test is not present")["restarts"]["counted"] == 0


@together
def test_no_room(place: World, name: str) -> None:
    begun(place, name)
    status = told(place, name, "Unschedulable", "nodes are available")
    assert status["phase"] == "Pending" and status["restarts"]["counted"] == 0


@together
def test_scheduled_but_not_started(place: World, node: str, name: str) -> None:
    begun(place, name)
    pod = f"{name}-worker-0-r1"
    uid = place.pods()[pod]["metadata"]["uid"]
    about = {"apiVersion": "v1", "kind": "Pod", "name": pod, "namespace": place.namespace, "uid": uid}
    message = 'MountVolume.SetUp failed for volume "data": secret "s3" not found'
    event = {"type": "Warning", "reason": "FailedMount", "message": message, "lastTimestamp": stamp()}
    place.make("Event", f"{pod}.1", involvedObject=about, **event)
    place.scheduled(pod, node, ago=90)
    assert told(place, name, "FailedMount", "MountVolume.SetUp failed")["restarts"]["counted"] == 0


@together
def test_a_template_that_the_api_server_refuses(place: World, name: str) -> None:
    mounts = [{"name": "data", "mountPath": "/data"}]
    pod = {"containers": [{"name": "worker", "image": "me/digits:1", "command": ["python", "train.py"], "volumeMounts": mounts}]}
    place.create(manifest(name, pod=pod))
    status = place.until_phase("Failed", name)
    failed = place.conditions(name)["Failed"]
    assert failed["reason"] == "TemplateInvalid" and 'volumeMounts[0].name: Not found: "data"' in failed["message"], failed
    assert place.conditions(name)["Stalled"]["status"] == "True"
    assert status["restarts"]["total"] == 0


@together
def test_an_unknown_field_of_the_template(place: World, name: str) -> None:
    pod = {"containers": [{"name": "worker", "image": "me/digits:1", "command": ["python", "train.py"], "imagePullPolice": "Never"}]}
    place.create(manifest(name, pod=pod))
    place.until_phase("Failed", name)
    assert "imagePullPolice" in place.conditions(name)["Failed"]["message"]


# -- what does not count and is answered by a new start ---------------------------------------------


def _condition(reason: str, message: str) -> list[dict[str, Any]]:
    return [{"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message, "lastTransitionTime": stamp()}]


@together
def test_deleted_by_hand(place: World, node: str, name: str) -> None:
    """A shard that is asked to end takes a last checkpoint, which a successor would fence: it comes when the old one has ended."""
    place.trains(name, node)
    place.cluster.api.delete(place.path("pods", f"{name}-shard-0-a1"))
    place.until("the words", lambda: place.conditions(name)["Ready"]["reason"] == "Ending")
    assert place.status(name)["internal"]["term"] == 1 and f"{name}-shard-0-a2" not in place.pods()
    place.end(f"{name}-shard-0-a1", 75)
    counts = restarted(place, name, f"{name}-shard-0-a2")
    assert counts["counted"] == 0 and counts["causes"] == {"Deleted": 1}


@together
def test_force_deleted_by_hand(place: World, node: str, name: str) -> None:
    """The pod is gone without a word: the number is raised, since "never made" and "gone" look alike."""
    place.trains(name, node)
    place.remove(f"{name}-worker-0-r1")
    counts = restarted(place, name, f"{name}-worker-0-r2")
    assert counts["counted"] == 0 and counts["total"] == 1


@together
def test_a_node_that_kubernetes_gives_up(place: World, node: str, name: str) -> None:
    """The kubelet is out of reach and confirms nothing: what it holds is taken off when the new number fences it."""
    place.trains(name, node)
    place.node(node, ready=False)
    pod = f"{name}-shard-0-a1"
    place.report(pod, conditions=_condition("DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint"))
    place.cluster.api.call("DELETE", place.path("pods", pod), {"gracePeriodSeconds": 1})
    counts = restarted(place, name, f"{name}-shard-0-a2")
    assert counts["counted"] == 0 and counts["causes"] == {"NodeLost": 1}
    place.until("the old pod to be taken off", lambda: pod not in place.pods())


@together
def test_a_silent_node_is_not_waited_for(place: World, node: str, name: str) -> None:
    """Nobody has evicted anything yet: the node controller has marked the pods, and nothing answers there."""
    place.trains(name, node)
    place.node(node, ready=False)
    old = [f"{name}-shard-0-a1", f"{name}-worker-0-r1"]
    for pod in old:
        place.report(pod, conditions=[{"type": "Ready", "status": "False", "lastTransitionTime": stamp()}])
    counts = restarted(place, name, f"{name}-shard-0-a2")
    place.until("the worker's next start", lambda: f"{name}-worker-0-r2" in place.pods())
    assert counts["counted"] == 0 and set(counts["causes"]) == {"NodeLost"}
    place.until("the old pods to be taken off", lambda: not place.pods().keys() & set(old))
    assert place.status(name)["internal"]["placedTerm"] == place.status(name)["internal"]["term"] == 2


# -- what counts ------------------------------------------------------------------------------------


@together
def test_a_worker_that_fails(place: World, node: str, name: str) -> None:
    place.trains(name, node)
    place.end(f"{name}-worker-1-r1", 1, message="Traceback: ValueError: bad shape")
    counts = restarted(place, name, f"{name}-worker-1-r2")
    assert counts["counted"] == 1 and counts["causes"] == {"Error": 1}
    place.until(
        "the Event",
        lambda: any("worker 1" in event["message"] and "Error" in event["message"] for event in place.events("Restarted", name)),
    )
    place.run(f"{name}-worker-1-r2", node=node, job=name)


@together
def test_an_init_container_that_fails(place: World, node: str, name: str) -> None:
    begun(place, name)
    pod = f"{name}-worker-0-r1"
    init = place.pods()[pod]["spec"]["initContainers"][0]["name"]
    place.scheduled(pod, node)
    ended = {"terminated": {"exitCode": 1, "reason": "Error", "message": "cp: no space left", "startedAt": stamp(), "finishedAt": stamp()}}
    place.report(pod, phase="Failed", initContainerStatuses=[container_status(init, ended)])
    assert restarted(place, name, f"{name}-worker-0-r2")["counted"] == 1


@together
def test_a_sidecar_in_a_crash_loop_is_told_and_does_no_harm(place: World, node: str, name: str) -> None:
    sidecar = {"name": "logs", "image": "fluent", "restartPolicy": "Always"}
    container = {"name": "worker", "image": "me/digits:1", "command": ["python", "train.py"]}
    place.trains(name, node, pod={"containers": [container], "initContainers": [sidecar]})
    place.wait(f"{name}-worker-0-r1", "CrashLoopBackOff", "back-off 10s restarting failed container", container="logs", init=True)
    assert told(place, name, "logs", "CrashLoopBackOff")["restarts"]["counted"] == 0


# -- rules, budgets and claims of the user's own ---------------------------------------------------------


@together
def test_the_jobs_own_rules_say_what_ends_it(place: World, node: str, name: str) -> None:
    rules = [
        {"action": "Ignore", "role": "worker", "onExitCodes": {"operator": "In", "values": [42]}},
        {"action": "Count", "role": "worker", "onReasons": ["Error"]},
        {"action": "FailJob", "onReasons": ["OOMKilled"]},
    ]
    place.trains(name, node, runPolicy={"backoffLimit": 1, "podFailurePolicy": {"rules": rules}})
    place.end(f"{name}-worker-0-r1", 42)
    counts = restarted(place, name, f"{name}-worker-0-r2")
    assert (counts["total"], counts["counted"]) == (1, 0)
    place.run(f"{name}-worker-0-r2", node=node)
    place.end(f"{name}-worker-1-r1", 1)
    place.until("the next start", lambda: f"{name}-worker-1-r3" in place.pods())
    counts = place.status(name)["restarts"]
    assert (counts["counted"], counts["countedByRole"]) == (1, {"shard": 0, "worker": 1})
    assert {(it["index"], it["count"], it["node"]) for it in counts["byProcess"]} == {(0, 1, node), (1, 1, node)}
    place.end(f"{name}-shard-0-a1", 137, reason="OOMKilled")
    place.until_phase("Failed", name)
    failed = place.conditions(name)["Failed"]
    assert failed["reason"] == "PodFailurePolicy" and "spec.runPolicy.podFailurePolicy.rules[2]" in failed["message"]


@pytest.mark.parametrize(("mode", "together"), [("ReadWriteOnce", True), ("ReadWriteMany", False)])
@together
def test_shards_of_a_users_claim_stand_together_unless_many_nodes_can_mount_it(place: World, name: str, mode: str, together: bool) -> None:
    claim = {"accessModes": [mode], "resources": {"requests": {"storage": "1Gi"}}}
    place.make("PersistentVolumeClaim", f"{name}-mine", spec=claim)
    place.create(manifest(name, shards=2, checkpoint={"volume": {"persistentVolumeClaim": {"claimName": f"{name}-mine"}}}))
    shards = [f"{name}-shard-0-a1", f"{name}-shard-1-a1"]
    place.until("the shards", lambda: set(shards) <= place.pods(name).keys())
    for pod in shards:
        raw = place.pods(name)[pod]
        assert ("affinity" in raw["spec"]) == together
        assert (raw["metadata"]["labels"].get("psjob.dev/placement") == "1") == together
