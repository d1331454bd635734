"""What a namespace asks of pods, by a LimitRange or a missing class, ends no job: it is waited for by name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.operator_harness import World, manifest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]
SMALL = {"type": "Container", "default": {"cpu": "250m", "memory": "512Mi"}}
ASKS = {"spec": {"containers": [{"name": "shard", "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}}}]}}


def limit(place: World, name: str, *limits: dict[str, Any]) -> str:
    place.make("LimitRange", name, spec={"limits": limits})
    return place.path("limitranges", name)


def waits(place: World, name: str, *words: str) -> bool:
    """The job is not over, and says why it waits."""
    status, ready = place.status(name), place.conditions(name).get("Ready", {})
    assert status.get("phase") != "Failed", status
    return ready.get("reason") == "CreateRefused" and all(word in ready["message"] for word in words)


def resources(place: World, pod: str) -> dict[str, Any]:
    found: dict[str, Any] = place.cluster.api.get(place.path("pods", pod))["spec"]["containers"][0]["resources"]
    return found


def test_the_smallest_job_runs_in_a_namespace_that_limits_everybody(place: World, name: str) -> None:
    """Its shard asks for more than the default limit; that is psjob's own number, and the namespace's takes its place."""
    there = limit(place, name, SMALL | {"min": {"cpu": "150m", "memory": "128Mi"}, "maxLimitRequestRatio": {"cpu": "1"}})
    try:
        place.create(manifest(name, workers=1))
        place.until("its pods", lambda: len(place.pods(name)) == 2)
    finally:
        place.cluster.api.delete(there)
    assert resources(place, f"{name}-shard-0-a1")["limits"] == {"cpu": "250m", "memory": "512Mi"}
    assert place.status(name)["restarts"].get("counted", 0) == 0


def test_a_quota_that_wants_to_be_told_what_pods_ask_for_gets_it(place: World, name: str) -> None:
    """A LimitRange made psjob leave its own numbers out; with a quota in its place they are back."""
    there = limit(place, name, {"type": "Container", "default": {"cpu": "100m"}})
    quota = place.path("resourcequotas", name)
    try:
        place.create(manifest(name, workers=1))
        place.until("its shard", lambda: f"{name}-shard-0-a1" in place.pods(name))
        assert resources(place, f"{name}-shard-0-a1") == {"limits": {"cpu": "100m"}, "requests": {"cpu": "100m"}}
        place.cluster.api.delete(there)
        place.make("ResourceQuota", name, spec={"hard": {"requests.cpu": "100"}})
        place.remove(f"{name}-shard-0-a1")
        place.until("it to ask", lambda: f"{name}-shard-0-a2" in place.pods(name), 60)
        assert resources(place, f"{name}-shard-0-a2")["requests"] == {"cpu": "500m", "memory": "1Gi"}
    finally:
        for path in (there, quota):
            place.cluster.api.delete(path)


def test_limits_of_the_template_alone_are_no_fault(place: World, name: str) -> None:
    given = {"spec": {"containers": [{"name": "shard", "resources": {"limits": {"cpu": "200m", "memory": "300Mi"}}}]}}
    place.create(manifest(name, workers=1, of_shards={"template": given}))
    place.until("its shard", lambda: f"{name}-shard-0-a1" in place.pods(name))
    assert resources(place, f"{name}-shard-0-a1")["requests"] == {"cpu": "200m", "memory": "300Mi"}


def test_a_template_that_a_limit_range_refuses_waits_at_the_start_and_at_a_resume(place: World, node: str, name: str) -> None:
    ran = f"{name}b"
    place.trains(ran, workers=1, of_shards={"template": ASKS}, node=node)
    place.suspend(ran)
    there = limit(place, name, SMALL)
    try:
        place.create(manifest(name, workers=1, of_shards={"template": ASKS}))
        place.edit(ran, suspend=False)
        for job in (name, ran):
            place.until(f"{job} to name it", lambda job=job: waits(place, job, f"LimitRange {name} of namespace", "cpu limit of 250m"), 15)
        assert place.status(ran)["restarts"].get("counted", 0) == 0
    finally:
        place.cluster.api.delete(there)
    for job in (name, ran):
        place.until(f"the pods of {job}", lambda job=job: len(place.pods(job)) == 2, 40)


def test_a_priority_class_that_is_not_there_yet_is_waited_for(place: World, name: str) -> None:
    classed = {"priorityClassName": name}
    place.create(manifest(name, workers=1, pod=classed, of_shards={"template": {"spec": classed}}))
    place.until("it to name the class", lambda: waits(place, name, f"no PriorityClass with name {name} was found"))
    body = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": name}, "value": 7}
    place.cluster.api.create("/apis/scheduling.k8s.io/v1/priorityclasses", body)
    try:
        place.until("its pods", lambda: len(place.pods(name)) == 2, 40)
    finally:
        place.cluster.api.delete(f"/apis/scheduling.k8s.io/v1/priorityclasses/{name}")
