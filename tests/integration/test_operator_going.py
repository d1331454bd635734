"""Objects that are going are seen as going: the claim with the checkpoints, and an ended pod that a finalizer keeps."""

from __future__ import annotations

import pytest

from tests.integration.operator_harness import World, manifest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


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
