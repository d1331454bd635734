"""Enforces NetworkPolicies on the real nodes. A STAND-IN for the network plugin that a real cluster has; policies.py tells what it knows.

It hears of policies, pods and namespaces by watches, and loads one nftables table into each node's network namespace. A pod is held to its
policies from when its address is in its status. What nodes and the host open is let in, as plugins do with a pod's own node.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from hack.cluster import nodes
from hack.cluster.api import Api, ApiError
from hack.cluster.options import BRIDGE_RANGE, Ready
from hack.cluster.policies import compile_policies, ruleset

KINDS = {"policies": "/apis/networking.k8s.io/v1/networkpolicies", "pods": "/api/v1/pods", "namespaces": "/api/v1/namespaces"}
LOOK_SECONDS, SETTLE_SECONDS, AGAIN_SECONDS = 1.0, 0.02, 0.5


def enforce(state: Path) -> None:
    """Hold all pods to the policies, forever; the holder runs this in a process of its own."""
    while (ready := Ready.load(state)) is None:
        time.sleep(0.1)
    world = World(ready.api())
    for kind in KINDS:
        threading.Thread(target=world.follow, args=(kind,), daemon=True).start()
    loaded: dict[int, tuple[int, str]] = {}
    told: dict[tuple[str, str], str] = {}
    while True:
        # A node that was started again has no rules, and nothing tells it: so it is looked at now and then.
        world.changed.wait(LOOK_SECONDS)
        world.changed.clear()
        time.sleep(SETTLE_SECONDS)
        if not world.known():
            continue
        compiled = compile_policies(*(world.all(kind) for kind in KINDS))
        for place, why in compiled.refused.items():
            if told.get(place) != why:
                print(f"REFUSED NetworkPolicy {'/'.join(place)}: {why}; nothing is let in to the pods that it selects", flush=True)
        told = dict(compiled.refused)
        script = ruleset(compiled, BRIDGE_RANGE)
        for index in range(1, ready.nodes + 1):
            first = nodes.first_process(state, index)
            if first is not None and loaded.get(index) != (first, script) and load(first, script):
                loaded[index] = (first, script)


class World:
    """What the API server has of each kind, by namespace and name."""

    def __init__(self, api: Api) -> None:
        self.changed = threading.Event()
        self._api = api
        self._lock = threading.Lock()
        self._objects: dict[str, dict[tuple[str, str], dict[str, Any]]] = {}

    def known(self) -> bool:
        """Whether every kind was listed: rules from half of a picture would let in too much or too little."""
        return len(self._objects) == len(KINDS)

    def all(self, kind: str) -> list[dict[str, Any]]:
        """The objects of that kind now."""
        with self._lock:
            return list(self._objects[kind].values())

    def follow(self, kind: str) -> None:
        """List and watch, again and again."""
        while True:
            try:
                listing = self._api.get(KINDS[kind])
                with self._lock:
                    self._objects[kind] = {_place(item): item for item in listing["items"]}
                self.changed.set()
                for type_, item in self._api.watch(KINDS[kind], listing["metadata"]["resourceVersion"]):
                    self._hear(kind, type_, item)
            except (ApiError, OSError, ValueError) as error:
                print(f"{kind} wait: {error}", flush=True)
            time.sleep(AGAIN_SECONDS)

    def _hear(self, kind: str, type_: str, item: dict[str, Any]) -> None:
        with self._lock:
            if type_ == "DELETED":
                self._objects[kind].pop(_place(item), None)
            else:
                self._objects[kind][_place(item)] = item
        self.changed.set()


def load(pid: int, script: str) -> bool:
    """Replace the rules in the network namespace of that process; whether nft took them."""
    path = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
    done = subprocess.run(
        ["nsenter", f"--net=/proc/{pid}/ns/net", "nft", "-f", "-"], input=script, capture_output=True, text=True, env=path
    )
    if done.returncode != 0:
        print(f"nft did not take the rules: {done.stderr.strip()[-500:]}", flush=True)
    return done.returncode == 0


def _place(item: dict[str, Any]) -> tuple[str, str]:
    return item["metadata"].get("namespace", ""), item["metadata"]["name"]
