"""The chart's rights against the audit log, both ways: nothing is refused to the operator, and nothing is granted that it never uses."""

from __future__ import annotations

import pytest

from tests.integration.operator_harness import CLUSTER_RULES, NAMESPACED_RULES, World, manifest
from tests.integration.operator_proxy import Proxy, Weather
from tests.integration.own_place import place
from tests.support import rights

__all__ = ["place"]

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
LABEL = "psjob.dev/job-name"


class OneRace(Weather):
    """One status write is refused as a race, and nothing else goes wrong."""

    def __init__(self) -> None:
        super().__init__(0)
        self.done = False

    def request(self, write: bool) -> str:
        if not write or self.done:
            return ""
        self.done = True
        return "409"

    def event(self) -> str:
        return ""


def test_every_right_is_used_and_none_is_missing(place: World, proxy: Proxy) -> None:
    """A life with everything in it for which the chart grants something."""
    try:
        policies = '--network-policy={"ipBlock": {"cidr": "192.0.2.7/32"}}'
        # A Lease that is renewed so seldom does not come between the writes that are looked at here.
        operator = place.operator("--lease=psjob", f"--lease-namespace={place.namespace}", "--lease-seconds=300", policies, url=proxy.url)
        place.until("it to act", lambda: operator.role() == "leader")
        node = place.node(f"{place.namespace}-n")
        # Its first write is the status of the first job: after the race the job is read. Then a stranger's pod is in the way, and read too.
        proxy.weather = OneRace()
        place.make("Pod", "a-worker-0-r1", spec={"containers": [{"name": "c", "image": "x"}]})
        place.create(manifest("a", runPolicy={"ttlSecondsAfterFinished": 1, "cleanPodPolicy": "All"}))
        place.until("NameConflict", lambda: "NameConflict" in str(place.status("a")))
        place.remove("a-worker-0-r1")
        # One pod is slow to start, and its Events are read; one is overdue on its node, which is read.
        place.create(manifest("b", workers=2))
        place.until("the pods of b", lambda: len(place.pods("b")) == 3)
        place.scheduled("b-worker-0-r1", node, ago=70)
        place.run("b-shard-0-a1", "b-worker-1-r1", node=node)
        place.cluster.api.call("DELETE", place.path("pods", "b-worker-1-r1"), {"gracePeriodSeconds": 1})
        # Who takes our labels off hides our objects from us: they are found by name, and all but the claim made whole again.
        whole = (("services", "b-shards"), ("configmaps", "b-config"), ("networkpolicies", "b-shards"))
        for kind, name in (*whole, ("persistentvolumeclaims", "b-checkpoints")):
            place.cluster.api.merge(place.path(kind, name), {"metadata": {"labels": {LABEL: None}}})
        for kind, name in whole:
            labels = lambda kind=kind, name=name: place.cluster.api.get(place.path(kind, name))["metadata"].get("labels") or {}  # noqa: E731
            place.until(f"the label of {name}", lambda labels=labels: LABEL in labels())
        # A LimitRange keeps a pod from being made, and is looked up.
        place.make("LimitRange", "small", spec={"limits": [{"type": "Container", "default": {"cpu": "250m"}}]})
        place.create(manifest("c", workers=1))
        place.until("the pods of c", lambda: len(place.pods("c")) == 2)
        place.cluster.api.delete(place.path("limitranges", "small"))
        # The first job ends, its pods are cleaned up, and it is deleted in its time.
        place.run("a-shard-0-a1", "a-worker-0-r1", "a-worker-1-r1", node=node, job="a")
        for pod in ("a-worker-0-r1", "a-worker-1-r1", "a-shard-0-a1"):
            place.end(pod)
        place.until("a to be deleted", lambda: "a" not in [job["metadata"]["name"] for job in place.items("pstrainingjobs")])
        rules = [*NAMESPACED_RULES, *CLUSTER_RULES]
        asked = lambda: place.cluster.audit(user=place.user)  # noqa: E731
        place.until("every right to be used", lambda: not rights.unused(rules, asked()), 200)
    except AssertionError as error:
        raise AssertionError(
            f"never used: {sorted(rights.unused([*NAMESPACED_RULES, *CLUSTER_RULES], place.cluster.audit(user=place.user)))}"
        ) from error
    refused = [event for event in place.cluster.audit(user=place.user) if event.get("responseStatus", {}).get("code") == 403]
    assert not refused, [(event["verb"], event["requestURI"]) for event in refused]
