"""Every row of the table of failures: what is seen, whether it counts against backoffLimit, and what the user is told.

The test plays scheduler and kubelet by writing pods' status; the API server and the operator are real. One operator serves all tests.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.operator_harness import World, container_status, manifest, stamp
from tests.integration.together import together

pytestmark = pytest.mark.cluster


def begun(place: World, name: str, **spec: Any) -> None:
    """A job with one shard and two workers whose pods are there."""
    place.create(manifest(name, shards=1, workers=2, **spec))
    place.until("its pods", lambda: {f"{name}-shard-0-a1", f"{name}-worker-0-r1", f"{name}-worker-1-r1"} <= set(place.pods()))


def running(place: World, name: str, node: str, **spec: Any) -> None:
    begun(place, name, **spec)
    place.run(f"{name}-shard-0-a1", f"{name}-worker-0-r1", f"{name}-worker-1-r1", node=node)
    place.until_phase("Running", name)


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
def test_an_image_that_cannot_be_pulled(place: World, node: str, name: str) -> None:
    begun(place, name)
    place.scheduled(f"{name}-worker-0-r1", node)
    place.wait(f"{name}-worker-0-r1", "ErrImagePull", 'failed to pull image "me/digits:1": not found')
    status = told(place, name, "ImagePullBackOff", 'failed to pull image "me/digits:1": not found')
    assert status["restarts"]["counted"] == 0 and status["restarts"]["total"] == 0
    assert {"Reconciling": "True", "Ready": "False"}.items() <= {kind: it["status"] for kind, it in place.conditions(name).items()}.items()


@together
def test_a_missing_key_of_a_secret(place: World, node: str, name: str) -> None:
    begun(place, name)
    place.scheduled(f"{name}-worker-1-r1", node)
    place.wait(f"{name}-worker-1-r1", "CreateContainerConfigError", 'secret "s3" not found')
    assert told(place, name, "CreateContainerConfigError", 'secret "s3" not found')["restarts"]["counted"] == 0


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
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{pod}.1"},
        "involvedObject": {"apiVersion": "v1", "kind": "Pod", "name": pod, "namespace": place.namespace, "uid": uid},
        "type": "Warning",
        "reason": "FailedMount",
        "message": 'MountVolume.SetUp failed for volume "data": secret "s3" not found',
        "lastTimestamp": stamp(),
    }
    place.cluster.api.create(place.path("events"), event)
    place.scheduled(pod, node, ago=90)
    assert told(place, name, "FailedMount", "MountVolume.SetUp failed")["restarts"]["counted"] == 0


@together
def test_a_quota_that_is_used_up(place: World, name: str) -> None:
    """403 on create: the API server's words, again after ten seconds, and it runs by itself when there is room."""
    priority = {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": f"{place.namespace}-{name}"},
        "value": 1,
    }
    place.cluster.api.create("/apis/scheduling.k8s.io/v1/priorityclasses", priority)
    scope = {"matchExpressions": [{"operator": "In", "scopeName": "PriorityClass", "values": [f"{place.namespace}-{name}"]}]}
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": name},
        "spec": {"hard": {"pods": "2"}, "scopeSelector": scope},
    }
    place.cluster.api.create(place.path("resourcequotas"), quota)
    place.until("the quota to hold", lambda: place.cluster.api.get(place.path("resourcequotas", name))["status"].get("hard"))
    place.create(manifest(name, shards=1, workers=2, pod={"priorityClassName": f"{place.namespace}-{name}"}))
    status = told(place, name, "CreateRefused", "exceeded quota")
    assert status["phase"] == "Pending" and status["restarts"]["total"] == 0
    assert len([pod for pod in place.pods() if pod.startswith(name)]) == 2, (
        "two of three: the shard has its workers' priority class, and is in their quota"
    )
    place.cluster.api.merge(place.path("resourcequotas", name), {"spec": {"hard": {"pods": "5"}}})
    place.until("the third", lambda: len([pod for pod in place.pods() if pod.startswith(name)]) == 3)
    assert place.status(name)["internal"]["workerStart"] == 1, "a definite no keeps the number"
    place.cluster.api.delete(f"/apis/scheduling.k8s.io/v1/priorityclasses/{place.namespace}-{name}")


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

DISRUPTED = {
    "preempted": ({"reason": "PreemptionByScheduler", "message": "preempting to make room"}, "Preempted"),
    "drained": ({"reason": "EvictionByEvictionAPI", "message": "Eviction API: evicting"}, "Drained"),
}


def _condition(reason: str, message: str) -> list[dict[str, Any]]:
    return [{"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message, "lastTransitionTime": stamp()}]


@pytest.mark.parametrize("what", DISRUPTED)
@together
def test_disrupted_by_others(place: World, node: str, name: str, what: str) -> None:
    running(place, name, node)
    said, cause = DISRUPTED[what]
    place.end(f"{name}-worker-0-r1", 143, conditions=_condition(**said))
    counts = restarted(place, name, f"{name}-worker-0-r2")
    assert counts["counted"] == 0 and counts["causes"] == {cause: 1}
    place.until("an Event", lambda: place.events("Restarted", name))


@pytest.mark.parametrize(
    ("reason", "message", "cause"),
    [
        ("Terminated", "Pod was terminated in response to imminent node shutdown.", "NodeShutdown"),
        ("OutOfcpu", "Node didn't have enough resource: cpu", "OutOfcpu"),
        ("Evicted", "The node was low on resource: memory. Threshold quantity: 100Mi", "NodePressure"),
    ],
)
@together
def test_turned_away_by_the_node(place: World, node: str, name: str, reason: str, message: str, cause: str) -> None:
    running(place, name, node)
    place.report(f"{name}-shard-0-a1", phase="Failed", reason=reason, message=message)
    counts = restarted(place, name, f"{name}-shard-0-a2")
    assert counts["counted"] == 0 and counts["causes"] == {cause: 1}
    assert place.status(name)["internal"]["term"] == 2


@together
def test_exit_75_asks_for_another_start(place: World, node: str, name: str) -> None:
    running(place, name, node)
    place.end(f"{name}-worker-1-r1", 75, message='{"error": "peers not found in 600 s"}')
    counts = restarted(place, name, f"{name}-worker-1-r2")
    assert counts["counted"] == 0 and counts["causes"] == {"Retry": 1}


@together
def test_deleted_by_hand(place: World, node: str, name: str) -> None:
    """A shard that is asked to end takes a last checkpoint, which a successor would fence: it comes when the old one has ended."""
    running(place, name, node)
    place.cluster.api.delete(place.path("pods", f"{name}-shard-0-a1"))
    place.until("the words", lambda: place.conditions(name)["Ready"]["reason"] == "Ending")
    assert place.status(name)["internal"]["term"] == 1 and f"{name}-shard-0-a2" not in place.pods()
    place.end(f"{name}-shard-0-a1", 75)
    counts = restarted(place, name, f"{name}-shard-0-a2")
    assert counts["counted"] == 0 and counts["causes"] == {"Deleted": 1}


@together
def test_force_deleted_by_hand(place: World, node: str, name: str) -> None:
    """The pod is gone without a word: the number is raised, since "never made" and "gone" look alike."""
    running(place, name, node)
    place.remove(f"{name}-worker-0-r1")
    counts = restarted(place, name, f"{name}-worker-0-r2")
    assert counts["counted"] == 0 and counts["total"] == 1


@together
def test_a_node_that_kubernetes_gives_up(place: World, node: str, name: str) -> None:
    """The kubelet is out of reach and confirms nothing: what it holds is taken off when the new number fences it."""
    running(place, name, node)
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
    running(place, name, node)
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


@pytest.mark.parametrize(
    ("code", "reason", "message", "words"),
    [
        (1, "Error", "Traceback: ValueError: bad shape", "Error"),
        (137, "OOMKilled", "", "OOMKilled"),
    ],
)
@together
def test_a_worker_that_fails(place: World, node: str, name: str, code: int, reason: str, message: str, words: str) -> None:
    running(place, name, node)
    place.end(f"{name}-worker-1-r1", code, reason=reason, message=message)
    counts = restarted(place, name, f"{name}-worker-1-r2")
    assert counts["counted"] == 1 and counts["causes"] == {reason: 1}
    place.until(
        "the Event", lambda: any("worker 1" in event["message"] and words in event["message"] for event in place.events("Restarted", name))
    )
    place.run(f"{name}-worker-1-r2", node=node)
    place.until_phase("Running", name)


@together
def test_a_shard_killed_by_its_liveness_probe(place: World, node: str, name: str) -> None:
    running(place, name, node)
    place.end(f"{name}-shard-0-a1", 137)
    assert restarted(place, name, f"{name}-shard-0-a2")["counted"] == 1
    place.run(f"{name}-shard-0-a2", node=node)
    status = place.until_phase("Running", name)
    assert status["shards"][0] == {"index": 0, "replica": 0, "attempt": 2, "state": "Serving", "pod": f"{name}-shard-0-a2"}
    assert status["internal"]["term"] == 2
    assert f"{name}-worker-0-r1" in place.pods(), "nobody else's pod was started again"


@together
def test_evicted_for_what_it_used_itself(place: World, node: str, name: str) -> None:
    running(place, name, node)
    message = "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi."
    place.report(f"{name}-worker-0-r1", phase="Failed", reason="Evicted", message=message)
    assert restarted(place, name, f"{name}-worker-0-r2")["counted"] == 1


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
def test_one_failure_more_than_the_limit_ends_the_job(place: World, node: str, name: str) -> None:
    running(place, name, node, runPolicy={"backoffLimit": 1})
    place.end(f"{name}-worker-0-r1", 1, message="RuntimeError: no data")
    place.until("the second start", lambda: f"{name}-worker-0-r2" in place.pods())
    place.run(f"{name}-worker-0-r2", node=node)
    place.end(f"{name}-worker-0-r2", 1, message="RuntimeError: no data")
    place.until_phase("Failed", name)
    failed = place.conditions(name)["Failed"]
    assert failed["reason"] == "BackoffLimitExceeded"
    assert "worker 0" in failed["message"] and "RuntimeError: no data" in failed["message"] and "backoffLimit: 1" in failed["message"]
    place.until(
        "running pods to be deleted",
        lambda: all(
            pod in (f"{name}-worker-0-r1", f"{name}-worker-0-r2") or place.pods()[pod]["metadata"].get("deletionTimestamp")
            for pod in place.pods()
            if pod.startswith(name + "-")
        ),
    )


@together
def test_a_refusal_of_the_runtime_ends_the_job(place: World, node: str, name: str) -> None:
    running(place, name, node)
    place.end(f"{name}-worker-0-r1", 77, message='{"error": "IterableDataset cannot be resumed"}')
    place.until_phase("Failed", name)
    assert "IterableDataset cannot be resumed" in place.conditions(name)["Failed"]["message"]


@together
def test_a_lost_checkpoint_ends_the_job(place: World, node: str, name: str) -> None:
    running(place, name, node)
    place.end(f"{name}-shard-0-a1", 78, message='{"error": "no valid manifest"}')
    place.until_phase("Failed", name)
    assert place.conditions(name)["Failed"]["reason"] == "CheckpointLost"


@together
def test_a_fenced_shard_goes_above_the_view_that_it_met(place: World, node: str, name: str) -> None:
    running(place, name, node)
    place.end(f"{name}-shard-0-a1", 76, message='{"fenced": {"term": 7}}')
    counts = restarted(place, name, f"{name}-shard-0-a2")
    assert counts["counted"] == 0
    assert place.status(name)["internal"]["term"] == 8


@together
def test_a_sidecar_in_a_crash_loop_is_told_and_does_no_harm(place: World, node: str, name: str) -> None:
    sidecar = {"name": "logs", "image": "fluent", "restartPolicy": "Always"}
    container = {"name": "worker", "image": "me/digits:1", "command": ["python", "train.py"]}
    running(place, name, node, pod={"containers": [container], "initContainers": [sidecar]})
    place.wait(f"{name}-worker-0-r1", "CrashLoopBackOff", "back-off 10s restarting failed container", container="logs", init=True)
    assert told(place, name, "logs", "CrashLoopBackOff")["restarts"]["counted"] == 0


@together
def test_a_worker_ends_with_its_container_while_a_sidecar_lives_on(place: World, node: str, name: str) -> None:
    containers = [{"name": "worker", "image": "me/digits:1", "command": ["python", "train.py"]}, {"name": "logs", "image": "fluent"}]
    running(place, name, node, pod={"containers": containers})
    done = {"terminated": {"exitCode": 0, "reason": "Completed", "startedAt": stamp(), "finishedAt": stamp()}}
    for index in (0, 1):
        states = [container_status("worker", done), container_status("logs", {"running": {"startedAt": stamp()}})]
        place.report(f"{name}-worker-{index}-r1", containerStatuses=states)
    place.end(f"{name}-shard-0-a1")
    assert place.until_phase("Complete", name)["workers"]["succeededIndexes"] == "0-1"


# -- rules, budgets and claims of the user's own ---------------------------------------------------------


@together
def test_the_jobs_own_rules_say_what_ends_it(place: World, node: str, name: str) -> None:
    rules = [
        {"action": "Ignore", "role": "worker", "onExitCodes": {"operator": "In", "values": [42]}},
        {"action": "Count", "role": "worker", "onReasons": ["Error"]},
        {"action": "FailJob", "onReasons": ["OOMKilled"]},
    ]
    running(place, name, node, runPolicy={"backoffLimit": 1, "podFailurePolicy": {"rules": rules}})
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
    body = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": f"{name}-mine"},
        "spec": {"accessModes": [mode], "resources": {"requests": {"storage": "1Gi"}}},
    }
    place.cluster.api.create(place.path("persistentvolumeclaims"), body)
    place.create(manifest(name, shards=2, checkpoint={"volume": {"persistentVolumeClaim": {"claimName": f"{name}-mine"}}}))
    shards = [f"{name}-shard-0-a1", f"{name}-shard-1-a1"]
    place.until("the shards", lambda: set(shards) <= place.pods(name).keys())
    for pod in shards:
        raw = place.pods(name)[pod]
        assert ("affinity" in raw["spec"]) == together
        assert (raw["metadata"]["labels"].get("psjob.dev/placement") == "1") == together
