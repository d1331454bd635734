"""A job and an operator that dies at a request and is started again."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.integration.operator_harness import World

SPEC: dict[str, Any] = {"runPolicy": {"cleanPodPolicy": "All"}}


@dataclass
class Life:
    """One job from its creation to its end, with one failed shard on the way; the test plays the kubelet for whatever pods there are."""

    place: World
    node: str
    name: str
    failed: bool = False
    ended: bool = False
    made: dict[str, str] = field(default_factory=dict)
    """uid -> name of every pod that was ever seen."""

    def step(self) -> bool:
        """Do what the kubelet would do now; True once the job is complete and its pods are gone."""
        status = self.place.status(self.name)
        pods = {name: pod for name, pod in self.place.pods().items() if name.startswith(f"{self.name}-")}
        for name, pod in pods.items():
            self.made[pod["metadata"]["uid"]] = name
            if pod["metadata"].get("deletionTimestamp"):
                self.place.remove(name)
            elif not pod["spec"].get("nodeName"):
                self.place.play(pod, self.node)
        if status.get("phase") == "Complete":
            return not pods
        if status.get("phase") == "Running" and not self.failed:
            self.failed = True
            self.place.end(status["shards"][0]["pod"], 1, message="shard fault")
        elif status.get("phase") == "Running" and status["restarts"]["counted"] == 1 and not self.ended:
            self.ended = True
            for name in sorted(pods, reverse=True):
                if "-worker-" in name:
                    self.place.end(name)
            self.place.end(status["shards"][0]["pod"])
        return False

    def summary(self) -> dict[str, Any]:
        """What must be the same however often the operator was ended."""
        status = self.place.status(self.name)
        children = {
            kind: sorted(
                item["metadata"]["name"].removeprefix(self.name)
                for item in self.place.items(kind)
                if item["metadata"]["name"].startswith(self.name)
            )
            for kind in ("services", "configmaps", "persistentvolumeclaims")
        }
        return {
            "phase": status["phase"],
            "conditions": sorted((it["type"], it["status"], it["reason"]) for it in status["conditions"]),
            "succeeded": status["workers"]["succeededIndexes"],
            "counted": status["restarts"]["counted"],
            "pods made": Counter(name.removeprefix(self.name).rsplit("-", 1)[0] for name in self.made.values()),
            **children,
        }
