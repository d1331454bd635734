"""Jobs' lives on a real API server, under the operator as a real process. Pretended nodes, or the test, run the pods.

Objects that are going are seen as going: the claim with the checkpoints, and an ended pod that a finalizer keeps.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.integration.operator_harness import World, manifest
from tests.integration.together import together

pytestmark = pytest.mark.cluster


@together
def test_from_apply_to_complete_without_a_trace_on_the_users_object(place: World, node: str, name: str) -> None:
    """Applying again, kubectl diff and server-side apply never find a difference; of the object nothing except its status is written."""
    job = manifest(name)

    def untouched() -> None:
        again = place.apply(job)
        assert "unchanged" in again.stdout, again.stdout
        diff = place.cluster.run_kubectl("diff", "-n", place.namespace, "-f", "-", stdin=json.dumps(job), check=False)
        assert diff.returncode == 0, diff.stdout
        metadata = place.job(name)["metadata"]
        assert metadata["generation"] == 1
        assert not metadata.get("finalizers")
        assert set(metadata.get("annotations", {})) <= {"kubectl.kubernetes.io/last-applied-configuration"}
        for entry in metadata["managedFields"]:
            if entry["manager"].startswith("psjob"):
                assert entry["subresource"] == "status" and set(entry["fieldsV1"]) == {"f:status"}, entry

    place.apply(job)
    pods = [f"{name}-shard-0-a1", f"{name}-worker-0-r1", f"{name}-worker-1-r1"]
    place.run(*pods, node=node)
    status = place.until_phase("Running", name)
    assert (status["shardsReady"], status["workersReady"], status["internal"]["term"]) == ("1/1", "2/2", 1)
    assert status["run"] == place.job(name)["metadata"]["uid"]
    untouched()
    for pod in [pods[1], pods[2], pods[0]]:
        place.end(pod)
    place.until_phase("Complete", name)
    assert place.status(name)["workers"]["succeededIndexes"] == "0-1"
    untouched()
    server_side = place.apply(job, "--server-side", "--field-manager=gitops")
    assert "serverside-applied" in server_side.stdout
    before = place.job(name)["metadata"]["resourceVersion"]
    place.apply(job, "--server-side", "--field-manager=gitops")
    assert place.job(name)["metadata"]["resourceVersion"] == before
    assert place.job(name)["metadata"]["generation"] == 1


@together
def test_what_stands_around_the_pods(place: World, name: str) -> None:
    place.create(manifest(name, shards=2))
    place.until("the pods", lambda: len(place.pods(name)) == 4)
    service = place.cluster.api.get(place.path("services", f"{name}-shards"))
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    claim = place.cluster.api.get(place.path("persistentvolumeclaims", f"{name}-checkpoints"))
    assert "ownerReferences" not in claim["metadata"] and claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    uid = place.job(name)["metadata"]["uid"]
    for raw in [service, place.cluster.api.get(place.path("configmaps", f"{name}-config")), *place.pods(name).values()]:
        owners = raw["metadata"]["ownerReferences"]
        assert [(it["uid"], it["controller"]) for it in owners] == [(uid, True)]
    shard = place.pods()[f"{name}-shard-1-a1"]["spec"]
    assert (shard["hostname"], shard["subdomain"], shard["restartPolicy"]) == (f"{name}-shard-1", f"{name}-shards", "Never")
    assert shard["automountServiceAccountToken"] is False


@together
def test_a_deleted_service_and_config_come_back(place: World, name: str) -> None:
    place.create(manifest(name))
    place.until("the pods", lambda: len(place.pods(name)) == 3)
    for kind, child in (("services", f"{name}-shards"), ("configmaps", f"{name}-config")):
        uid = place.cluster.api.get(place.path(kind, child))["metadata"]["uid"]
        place.cluster.api.delete(place.path(kind, child))
        found = place.until(
            f"{child} again", lambda kind=kind, child=child: {it["metadata"]["name"]: it for it in place.items(kind)}.get(child)
        )
        assert found["metadata"]["uid"] != uid


@together
def test_a_changed_service_and_config_are_mended(place: World, name: str) -> None:
    """Whoever may patch them could turn encryption off, or send workers elsewhere, and leave the labels as they were."""
    place.create(manifest(name))
    place.until("the pods", lambda: len(place.pods(name)) == 3)
    config, service = place.path("configmaps", f"{name}-config"), place.path("services", f"{name}-shards")
    text = place.cluster.api.get(config)["data"]["config.json"]
    selector = place.cluster.api.get(service)["spec"]["selector"]
    place.cluster.api.merge(config, {"data": {"config.json": text.replace('"host": "', '"host": "elsewhere.')}})
    place.until("the config to be mended", lambda: place.cluster.api.get(config)["data"]["config.json"] == text)
    place.cluster.api.merge(service, {"spec": {"selector": {"app": "elsewhere"}}})
    place.until("the Service to be mended", lambda: place.cluster.api.get(service)["spec"]["selector"] == selector)


@together
def test_kubectl_waits_for_conditions(place: World, node: str, name: str) -> None:
    """Of a job that is suspended, resumed and complete, which costs no restart, and of one whose deadline has passed."""

    def waited(condition: str, job: str = name) -> None:
        place.cluster.run_kubectl("wait", f"psj/{job}", "-n", place.namespace, f"--for=condition={condition}", "--timeout=60s")

    place.trains(name, node)
    waited("Ready")
    described = place.cluster.run_kubectl("describe", "psj", name, "-n", place.namespace).stdout
    assert "all shards and workers are running" in described, described
    place.edit(name, suspend=True)
    place.take_off(*place.until_going(name))
    waited("Suspended")
    assert place.status(name)["phase"] == "Suspended" and place.status(name)["observedGeneration"] == 2
    assert place.conditions(name)["Ready"]["status"] == "False" and "Reconciling" not in place.conditions(name)
    place.edit(name, suspend=None)
    again = [f"{name}-worker-0-r2", f"{name}-worker-1-r2", f"{name}-shard-0-a2"]
    place.run(*again, node=node)
    waited("Suspended=false")
    waited("Ready")
    status = place.status(name)
    assert (status["restarts"]["counted"], status["internal"]["term"]) == (0, 2)
    for pod in again:
        place.end(pod)
    waited("Complete")
    late = f"{name}b"
    place.trains(late, node)  # its deadline counts from its start, and nobody knows how long this takes here
    place.edit(late, runPolicy={"activeDeadlineSeconds": 1})
    waited("Failed", late)
    assert place.conditions(late)["Failed"]["reason"] == "DeadlineExceeded"
    place.until_going(late)


@together
def test_ttl_deletes_the_job_and_what_it_owns(place: World, node: str, name: str) -> None:
    pods = place.trains(name, node, runPolicy={"ttlSecondsAfterFinished": 1, "cleanPodPolicy": "None"})
    for pod in pods:
        place.end(pod)
    place.until("the job to be deleted", lambda: name not in {job["metadata"]["name"] for job in place.items("pstrainingjobs")})
    place.until("its pods to be collected", lambda: not place.pods(name))
    assert f"{name}-checkpoints" in {claim["metadata"]["name"] for claim in place.items("persistentvolumeclaims")}


@together
def test_a_deleted_job_takes_its_pods_and_leaves_its_checkpoints(place: World, node: str, name: str) -> None:
    place.trains(name, node)
    place.cluster.run_kubectl("delete", "psj", name, "-n", place.namespace, "--wait=false")
    place.until_going(name)
    place.until("its Service to go", lambda: f"{name}-shards" not in {it["metadata"]["name"] for it in place.items("services")})
    assert f"{name}-checkpoints" in {claim["metadata"]["name"] for claim in place.items("persistentvolumeclaims")}


@together
def test_the_claim_is_made_of_its_template_and_goes_with_the_job_if_that_is_asked(place: World, name: str) -> None:
    spec = {"storageClassName": "none-such", "accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "5Gi"}}}
    metadata = {"labels": {"team": "a"}, "annotations": {"example.com/backup": "daily"}}
    policy = {"whenDeleted": "Delete"}
    checkpoint = {"volumeClaimTemplate": {"metadata": metadata, "spec": spec}, "persistentVolumeClaimRetentionPolicy": policy}
    place.create(manifest(name, checkpoint=checkpoint))

    def claim() -> Any:
        return next((it for it in place.items("persistentvolumeclaims") if it["metadata"]["name"] == f"{name}-checkpoints"), None)

    made = place.until("the claim", claim)
    assert {key: made["spec"][key] for key in spec} == spec
    assert made["metadata"]["labels"].items() >= {"team": "a", "psjob.dev/job-name": name}.items()
    assert made["metadata"]["annotations"].items() >= metadata["annotations"].items()
    place.cluster.run_kubectl("delete", "psj", name, "-n", place.namespace, "--wait=false")
    # What mounts it is Pending, so nothing holds it.

    def goes() -> bool:
        found = claim()
        return found is None or "deletionTimestamp" in found["metadata"]

    place.until("the claim to go", goes)


@together
def test_a_job_goes_on_from_another_one_by_its_name(place: World, node: str, name: str) -> None:
    """Applied first, it waits; it begins when the other has a checkpoint, and what becomes of the other changes nothing then."""
    first, mine = f"{name}a", {"volume": {"persistentVolumeClaim": {"claimName": f"{name}a-checkpoints"}}}
    place.create(manifest(name, checkpoint={"resumeFrom": {"job": first}, **mine}))

    def waits() -> bool:
        return place.conditions(name).get("Ready", {}).get("reason") == "WaitingForJob" and not place.pods(name)

    place.until("it to wait", waits)
    ready = place.conditions(name)["Ready"]
    assert ready["status"] == "False" and f"job {first} is not there" in ready["message"]
    place.trains(first, node)
    assert waits() and place.status(name)["phase"] == "Pending"
    place.lay(first, checkpoint={"step": 10, "time": "2026-01-01T00:00:00Z"})
    run = place.job(first)["metadata"]["uid"]
    place.until("its pods", lambda: len(place.pods(name)) == 3)
    status = place.status(name)
    assert status["internal"]["pinned"]["resumedFrom"] == run and status["restarts"].get("total", 0) == 0

    def begins_at() -> Any:
        return json.loads(next(it for it in place.items("configmaps") if it["metadata"]["name"] == f"{name}-config")["data"]["config.json"])

    assert begins_at()["checkpoint"]["resumeFrom"] == {"path": f"/psjob-checkpoints/{run}"}
    place.cluster.run_kubectl("delete", "psj", first, "-n", place.namespace)
    place.create(manifest(first))
    place.until("the other job anew", lambda: place.status(first).get("run") not in (None, run))
    place.run(f"{name}-shard-0-a1", f"{name}-worker-0-r1", f"{name}-worker-1-r1", node=node, job=name)
    assert place.status(name)["internal"]["pinned"]["resumedFrom"] == run
    assert begins_at()["checkpoint"]["resumeFrom"] == {"path": f"/psjob-checkpoints/{run}"}


def running(place: World, name: str, node: str, number: int = 1) -> list[str]:
    pods = [f"{name}-shard-0-a{number}", f"{name}-worker-0-r{number}"]
    place.run(*pods, node=node, job=name)
    return pods


def test_a_claim_that_is_deleted_under_a_job_is_told_before_it_is_suspended(place: World, node: str, name: str) -> None:
    pods = place.trains(name, node, workers=1)
    claim = place.path("persistentvolumeclaims", f"{name}-checkpoints")
    place.cluster.api.call("DELETE", claim)
    assert place.cluster.api.get(claim)["metadata"]["deletionTimestamp"], "a pod uses it"
    place.until("the condition", lambda: place.conditions(name).get("CheckpointReady", {}).get("reason") == "ClaimTerminating")
    told = place.conditions(name)["CheckpointReady"]
    assert told["status"] == "False" and f"claim {name}-checkpoints is being deleted" in told["message"]
    place.edit(name, suspend=True)
    place.until("a warning", lambda: [it["type"] for it in place.events("Suspending", name)] == ["Warning"])
    place.take_off(*pods)
    place.until_phase("Suspended", name)


def test_an_ended_pod_that_a_finalizer_keeps_wedges_neither_suspend_nor_resume(place: World, node: str, name: str) -> None:
    keep = {"metadata": {"finalizers": ["example.com/keep"]}}
    place.create(manifest(name, workers=1, of_shards={"template": keep}))
    pods = running(place, name, node)
    try:
        place.edit(name, suspend=True)
        for pod in pods:
            place.until(f"{pod} to be told to end", lambda pod=pod: place.pods(name)[pod]["metadata"].get("deletionTimestamp"))
            place.end(pod, 143)
        place.remove(pods[1])
        place.until_phase("Suspended", name)
        words = f"pod {pods[0]} has ended and is kept by its finalizer example.com/keep"
        place.until("it to be named", lambda: words in place.conditions(name)["Suspended"]["message"])
        place.edit(name, suspend=None)
        running(place, name, node, 2)
        assert pods[0] in place.pods(name), "it is still there"
    finally:
        for pod in place.pods(name):
            place.cluster.api.merge(place.path("pods", pod), {"metadata": {"finalizers": None}})
