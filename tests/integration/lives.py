"""Twelve lives of a job, as GitOps engines meet them: what its user and its kubelet do, and where it comes to rest."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from psjob_operator.contract import CONFIG_FORMAT
from tests.integration import denying
from tests.integration.operator_harness import IMAGE, World, manifest
from tests.integration.recording import Watcher, distinct, normal


@dataclass
class Life:
    """One job's life: `rests` is called where the job has come to rest, with the manifest that was applied last."""

    place: World
    watcher: Watcher
    name: str
    rests: Callable[[dict[str, Any], dict[str, Any]], None]
    nodes: list[str] = field(default_factory=list)
    manifest: dict[str, Any] = field(default_factory=dict)

    def node(self) -> str:
        """One more node, ready."""
        self.nodes.append(self.place.node(f"{self.place.namespace}-{self.name}-{len(self.nodes)}"))
        return self.nodes[-1]

    def apply(self, **spec: Any) -> None:
        """kubectl apply of the manifest, with these fields of the spec changed."""
        self.manifest = copy.deepcopy(self.manifest or manifest(self.name))
        self.manifest["metadata"]["namespace"] = self.place.namespace
        for key, value in spec.items():
            self.manifest["spec"][key] = {**self.manifest["spec"].get(key, {}), **value} if isinstance(value, dict) else value
        self.place.apply(self.manifest)

    def edit(self, **spec: Any) -> None:
        """Change the live object alone, as a person or a queue does."""
        self.place.edit(self.name, **spec)

    def pin(self, config_format: int) -> None:
        """Write into the status of what format the run's config is."""
        self.place.lay(self.name, internal={"pinned": {"configFormat": config_format}})

    def pods(self, attempt: int = 1, start: int = 1) -> list[str]:
        return [f"{self.name}-shard-0-a{attempt}", f"{self.name}-worker-0-r{start}", f"{self.name}-worker-1-r{start}"]

    def starts(self, node: str, attempt: int = 1, start: int = 1) -> None:
        """Its pods run, and so does the job."""
        self.place.run(*self.pods(attempt, start), node=node)
        self.rest("Running")

    def trains(self, **spec: Any) -> str:
        """Applied, seen to wait, and running; answers the node."""
        self.apply(**spec)
        self.rest("Pending")
        node = self.node()
        self.starts(node)
        return node

    def suspends(self, attempt: int = 1, start: int = 1) -> None:
        self.edit(suspend=True)
        pods = self.pods(attempt, start)
        self.place.until("the pods to be told to end", lambda: not [pod for pod in pods if not self._ending(pod)])
        for pod in pods:
            self.place.remove(pod)
        self.rest("Suspended")

    def ends(self, attempt: int = 1, start: int = 1) -> None:
        shard, *workers = self.pods(attempt, start)
        for pod in [*workers, shard]:
            self.place.end(pod)
        self.rest("Complete")

    def rest(self, phase: str, reason: str = "") -> None:
        """Wait until the job is in that phase and has read its spec (and Ready has that reason), and hold it against its manifest."""

        def settled() -> dict[str, Any] | None:
            job = self.place.job(self.name)
            status = job.get("status") or {}
            ready = next((one["reason"] for one in status.get("conditions") or [] if one["type"] == "Ready"), "")
            there = status.get("phase") == phase and status.get("observedGeneration") == job["metadata"]["generation"]
            return job if there and reason in ("", ready) else None

        found = self.place.until(f"{self.name} to be {phase} {reason}", settled)
        assert found is not None
        self.rests(self.manifest, found)

    def recorded(self) -> list[dict[str, Any]]:
        """Every distinct object that the watch told, made comparable."""
        version = self.place.job(self.name)["metadata"]["resourceVersion"]
        plain = {node: f"node-{index}" for index, node in enumerate(self.nodes)}
        return distinct([normal(raw, plain) for raw in self.watcher.life(self.name, version)])

    def _ending(self, pod: str) -> bool:
        raw = self.place.pods().get(pod)
        return raw is None or bool(raw["metadata"].get("deletionTimestamp"))


def complete(life: Life) -> None:
    life.trains()
    life.ends()


def failed(life: Life) -> None:
    life.trains(runPolicy={"backoffLimit": 0})
    life.place.end(life.pods()[1], 3, message="ValueError: bad shape")
    life.rest("Failed")


def suspended(life: Life) -> None:
    life.trains()
    life.suspends()


def recovering(life: Life) -> None:
    node = life.trains()
    life.place.end(life.pods()[0], 1)
    life.rest("Recovering")
    life.place.run(f"{life.name}-shard-0-a2", node=node)
    life.rest("Running")


def lost_node(life: Life) -> None:
    node = life.trains()
    life.place.node(node, ready=False)
    for pod in life.pods():
        life.place.report(pod, conditions=[{"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-01T00:00:00Z"}])
    life.rest("Recovering")
    life.starts(life.node(), 2, 2)


def denied(life: Life) -> None:
    with denying.policy(life.place, [life.name]):
        life.apply()
        life.rest("Pending", "CreateRefused")
    life.starts(life.node())


def stalled(life: Life) -> None:
    life.trains()
    # As by an operator of another version: no edit of the spec that the API server takes stalls a job.
    life.pin(CONFIG_FORMAT + 1)
    life.rest("Running", "RunOfAnotherVersion")
    life.pin(CONFIG_FORMAT)
    life.rest("Running")


def switched(life: Life) -> None:
    life.trains()
    life.apply(training={"mode": "async"})
    life.rest("Running")


def resumed(life: Life) -> None:
    node = life.trains()
    life.suspends()
    life.edit(suspend=None)
    life.rest("Pending")
    life.starts(node, 2, 2)


def pending(life: Life) -> None:
    life.apply()
    life.rest("Pending", "Unschedulable")


def deleted(life: Life) -> None:
    life.trains()
    life.place.cluster.api.call("DELETE", life.place.path("pstrainingjobs", life.name), {"propagationPolicy": "Foreground"})
    life.place.until("the job to be going", lambda: life.place.job(life.name)["metadata"].get("deletionTimestamp"))


def upgraded(life: Life) -> None:
    """The operator is replaced by one of another runtime image; a shard fails under it; the job is suspended and resumed."""
    node = life.trains()
    life.place.operators[-1].stop()
    life.place.operator(f"--runtime-image={IMAGE}-next", *life.place.operators[-1].options)
    life.rest("Running")
    life.place.end(life.pods()[0], 1)
    life.rest("Recovering")
    life.place.run(f"{life.name}-shard-0-a2", node=node)
    life.rest("Running")
    life.suspends(2, 1)
    life.edit(suspend=None)
    life.starts(node, 3, 2)
    life.ends(3, 2)


ALL: dict[str, Callable[[Life], None]] = {
    one.__name__.replace("_", "-"): one
    for one in (complete, failed, suspended, recovering, lost_node, denied, stalled, switched, resumed, pending, deleted, upgraded)
}
"""By name, which is the job's too. The last one replaces the operator of its place."""
