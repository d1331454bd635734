"""Pairs of a shard and a worker under faults by seed, on nodes with little room: once the faults are over, each pair is on one node.

The plan is the real one. Scheduler, kubelet and node controller are those of this file, on a virtual clock: a pod gets a node only if
the process that it must stand beside holds a place, as the real scheduler does; what it cannot place says so in the scheduler's words.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from psjob_operator.plan.actions import Beside, CreateProcess, DeleteProcess, EnsurePairClaim
from psjob_operator.plan.objects import pair_claim_name
from psjob_operator.plan.observed_state import Exit, ObservedState, Process
from psjob_operator.plan.plan import plan
from tests.support.soaking import rotating, soak
from tests.unit.api_manifest import MANY_NODES
from tests.unit.plan_given import NOW, job

SHARDS, WORKERS = 2, 3
NODES = ("a", "b", "c", "d")
ROOM = 2
"""Pods a node."""
VOLUME = "0/4 nodes are available: 1 Insufficient cpu, 3 node(s) didn't satisfy plugin(s) [VolumeBinding]."
AFFINITY = "0/4 nodes are available: 4 node(s) didn't match pod affinity rules."
FULL = "0/4 nodes are available: 4 Insufficient cpu."
FAULTS, CALM = 12, 3000


class Cluster:
    """A job of pairs, its pods and their nodes."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now = NOW
        shards = {"replicas": SHARDS, "placement": "Colocated"} | ({"pairStorageClassName": "local"} if seed % 2 else {})
        self.job = job(
            shards=shards, workers={"replicas": WORKERS}, runPolicy={"backoffLimit": 1000},
            checkpoint=MANY_NODES,
        )  # fmt: skip
        self.pods: dict[str, Process] = {}
        self.beside: dict[str, Beside | None] = {}
        self.volumes: dict[str, str] = {}
        """By claim of a pair, the node of its volume, once a pod has brought it there."""
        self.down: set[str] = set()
        self.granted: frozenset[str] = frozenset()
        self.restarts = 0

    def turn(self) -> None:
        """Schedule, run what has a node, and plan until nothing is left to do."""
        for name, pod in list(self.pods.items()):
            if pod.deleting is not None and pod.deleting <= self.now and pod.node not in self.down:
                del self.pods[name]
        for pod in sorted(self.pods.values(), key=lambda pod: self.chance.random()):
            if not pod.node and pod.exit is None and pod.deleting is None:
                self._schedule(pod)
        for _ in range(20):
            decided = plan(self.snapshot(), self.now)
            self.granted = (self.granted | decided.grants) if decided.intent else self.granted
            changed = decided.status != self.job.status
            self.job = replace(self.job, status=decided.status)
            for action in decided.actions:
                changed |= self._do(action)
            if not changed:
                return
        raise AssertionError("the plan does not come to rest")

    def snapshot(self) -> ObservedState:
        objects = replace(self.job.objects, pair_claims=tuple(self.volumes))
        return replace(self.job, processes=tuple(self.pods.values()), granted=self.granted, live=True, objects=objects)

    def hit(self) -> None:
        """One fault: of a process, of a node, or of a place that somebody else takes."""
        kind = self.chance.choice(["crash", "crash", "delete", "down", "drain", "up"])
        pods = [pod for pod in self.pods.values() if pod.exit is None and pod.deleting is None]
        if kind == "up" and self.down:
            node = self.chance.choice(sorted(self.down))
            self.down.discard(node)
            self.pods = {name: pod for name, pod in self.pods.items() if pod.node != node}
        elif kind == "down" and len(self.down) < 1:
            node = self.chance.choice(NODES)
            self.down.add(node)
            for pod in [pod for pod in pods if pod.node == node]:
                if self.chance.random() < 0.7:  # of the others it is heard later
                    self._see(pod, node_lost=True, ready=False)
        elif kind == "drain":
            for pod in [pod for pod in pods if pod.node == (node := self.chance.choice(NODES))]:
                self._see(pod, deleting=self.now + 5, pod_reason="EvictionByEvictionAPI")
                assert node
        elif pods and kind in ("crash", "delete"):
            pod = self.chance.choice(pods)
            if kind == "delete":
                self._see(pod, deleting=self.now + 2)
            elif pod.started is not None:
                self._see(pod, phase="Failed", ready=False, exit=Exit(1, reason="Error", at=self.now))

    def hear(self) -> None:
        """The node controller has marked every pod of a node that is down."""
        for pod in list(self.pods.values()):
            if pod.node in self.down and pod.exit is None:
                self._see(pod, node_lost=True, ready=False)

    def newest(self, role: str, index: int) -> Process | None:
        """The newest process of a seat, if it runs; none while one before it ends."""
        mine = [pod for pod in self.pods.values() if (pod.role, pod.index) == (role, index)]
        newest = max(mine, key=lambda pod: pod.number, default=None)
        if newest is None or any(pod.deleting is not None for pod in mine):
            return None
        return newest if newest.started is not None and newest.exit is None and not newest.node_lost else None

    def whole(self) -> bool:
        """Everything runs, and each pair is on one node, on one volume if it has any."""
        shards = [self.newest("shard", index) for index in range(SHARDS)]
        workers = [self.newest("worker", index) for index in range(WORKERS)]
        pairs = list(zip(shards, workers, strict=False))
        if any(one and two and self.meets and (one.pair is None or one.pair != two.pair) for one, two in pairs):
            return False
        return all([*shards, *workers]) and all(one and two and one.node == two.node for one, two in pairs)

    @property
    def meets(self) -> bool:
        return self.job.spec.shards.pair_storage_class_name is not None

    def claim(self, pod: Process) -> str:
        """The claim that this pod mounts; empty for none."""
        return "" if pod.pair is None else pair_claim_name(self.job.name, self.job.uid, pod.index, pod.pair)

    def _schedule(self, pod: Process) -> None:
        other = self.beside[pod.name]
        nodes = [node for node in NODES if node not in self.down]
        if other is not None:
            there = [
                it.node
                for it in self.pods.values()
                if (it.role, it.index, it.number) == (other.role, other.index, other.number) and it.node and it.exit is None
            ]
            nodes = [node for node in nodes if node in there]
        claim = self.claim(pod)
        assert not claim or claim in self.volumes, f"{pod.name} mounts {claim}, which nobody has made"
        bound = self.volumes.get(claim, "")
        nodes = [node for node in nodes if bound in ("", node)]
        free = [node for node in nodes if sum(it.node == node and it.exit is None for it in self.pods.values()) < ROOM]
        if free:
            node = self.chance.choice(free)
            if claim:
                self.volumes[claim] = node
            self._see(pod, node=node, phase="Running", ready=True, started=self.now, scheduled=self.now, unschedulable="")
        else:
            self._see(pod, unschedulable=FULL if other is None else VOLUME if bound and self.chance.random() < 0.5 else AFFINITY)

    def _do(self, action: Any) -> bool:
        if isinstance(action, EnsurePairClaim):
            self.volumes[pair_claim_name(self.job.name, self.job.uid, action.index, action.number)] = ""
            return True
        if isinstance(action, CreateProcess):
            assert action.name not in self.pods
            self.granted -= {action.name}
            self.beside[action.name] = action.beside
            self.restarts += action.number > 1
            self.pods[action.name] = Process(
                action.name, f"uid-{action.name}", action.role, action.index, action.number, self.job.uid, "Pending", self.now,
                waited=action.waited, pair=action.pair,
            )  # fmt: skip
            return True
        if isinstance(action, DeleteProcess) and action.name in self.pods:
            pod = self.pods[action.name]
            if not pod.node or action.grace_seconds == 0 or pod.exit is not None:
                del self.pods[action.name]
                return True
            if pod.deleting is None:
                self._see(pod, deleting=self.now + 1)
                return True
        return False

    def _see(self, pod: Process, **seen: Any) -> None:
        self.pods[pod.name] = replace(self.pods[pod.name], **seen)


SEEDS = [
    *range(6),
    *(rotating(range(first, first + 17), id=f"{first}-{first + 16}") for first in (6, 23)),
    *(soak(range(first, first + 20), id=f"{first}-{first + 19}") for first in range(40, 2000, 20)),
]


@pytest.mark.parametrize("seeds", SEEDS)
def test_after_any_faults_each_pair_stands_on_one_node(seeds: int | range) -> None:
    for seed in [seeds] if isinstance(seeds, int) else seeds:
        cluster = Cluster(seed)
        for _ in range(FAULTS):
            for _ in range(cluster.chance.randint(1, 8)):
                cluster.turn()
                cluster.now += cluster.chance.choice([0.2, 1.0, 5.0])
            cluster.hit()
        cluster.down = set(list(cluster.down)[:1])
        cluster.hear()
        for _ in range(CALM):
            cluster.turn()
            cluster.now += 1.0
            if cluster.whole():
                break
        else:
            there = [(pod.name, pod.node, pod.unschedulable, cluster.beside[pod.name]) for pod in cluster.pods.values()]
            raise AssertionError(f"seed {seed}: {there}")
        before = cluster.restarts
        for _ in range(300):
            cluster.turn()
            cluster.now += 1.0
        assert cluster.restarts == before, f"seed {seed}: what stands together is left alone"
