"""The NetworkPolicies of runs on a real API server: made, mended, off by option, and no job waits for a refused one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hack.cluster.api import ApiError
from tests.integration.operator_harness import NAMESPACED_RULES, World, manifest
from tests.integration.own_place import place

__all__ = ["place"]

pytestmark = pytest.mark.cluster
HOME = {"matchLabels": {"kubernetes.io/metadata.name": "home"}}
PEER = json.dumps({"namespaceSelector": HOME, "podSelector": {"matchLabels": {"app": "operator"}}})
OPTION = f"--network-policy={PEER}"


def policies(place: World) -> dict[str, dict[str, Any]]:
    return {item["metadata"]["name"]: item for item in place.items("networkpolicies")}


def change(place: World, name: str, body: dict[str, Any]) -> None:
    place.cluster.api.merge(place.path("networkpolicies", name), body)


def grant(place: World, *without: str) -> None:
    """Give the operator's user its rights but those on these resources."""
    rules = [rule for rule in NAMESPACED_RULES if not set(without) & set(rule["resources"])]
    place.cluster.api.merge(place.path("roles", place.user), {"rules": rules})


def test_policies_are_the_jobs_and_are_made_before_pods_and_mended(place: World) -> None:
    place.operator(OPTION)
    uid = place.create(manifest())["metadata"]["uid"]
    place.until("the pods", lambda: len(place.pods("job")) == 3)
    made = policies(place)
    assert set(made) == {"job-shards", "job-workers"}
    assert all(item["metadata"]["ownerReferences"][0]["uid"] == uid for item in made.values())
    first = min(pod["metadata"]["creationTimestamp"] for pod in place.pods("job").values())
    assert max(item["metadata"]["creationTimestamp"] for item in made.values()) <= first
    wanted = {name: item["spec"] for name, item in made.items()}

    for name in wanted:
        place.cluster.api.delete(place.path("networkpolicies", name))
    place.until("new ones", lambda: {name: item["spec"] for name, item in policies(place).items()} == wanted, 10)

    change(place, "job-shards", {"spec": {"ingress": [{}]}})
    change(place, "job-workers", {"spec": {"policyTypes": ["Egress"], "egress": [{}]}})
    decides = ("podSelector", "policyTypes", "ingress")
    mended = lambda: all(policies(place)[name]["spec"][key] == spec[key] for name, spec in wanted.items() for key in decides)  # noqa: E731
    place.until("both to be mended", mended, 10)


def test_an_operator_that_is_not_told_to_makes_none_and_reads_none(place: World) -> None:
    place.operator()
    place.create(manifest())
    place.until("the pods", lambda: len(place.pods("job")) == 3)
    assert not policies(place)
    assert not [event for event in place.cluster.audit(user=place.user) if "networkpolicies" in event["requestURI"]]


def test_a_strangers_policy_in_the_way_holds_the_job(place: World) -> None:
    place.make("NetworkPolicy", "job-workers", spec={"podSelector": {}, "policyTypes": ["Ingress"]})
    place.operator(OPTION)
    place.create(manifest())
    place.until("NameConflict", lambda: "NetworkPolicy/job-workers" in str(place.status()))
    assert not place.pods("job")


def test_a_job_goes_on_without_the_right_to_make_policies_and_gets_them_with_it(place: World) -> None:
    grant(place, "networkpolicies")
    place.operator(OPTION)
    place.create(manifest())
    place.until("the pods", lambda: len(place.pods("job")) == 3)
    told = place.until("the Event", lambda: place.events("NetworkPolicyRefused"))
    assert "networkpolicies.networking.k8s.io is forbidden" in told[0]["message"] and told[0]["type"] == "Warning"
    with pytest.raises(ApiError):
        place.cluster.api.get(place.path("networkpolicies", "job-shards"))
    grant(place)
    place.run(*place.pods("job"), job="job")
    place.until("the policies", lambda: set(policies(place)) == {"job-shards", "job-workers"}, 60)
