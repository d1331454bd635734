"""A run's NetworkPolicies, by packets: the stand-in enforcer of hack/cluster holds a small network to what the operator makes."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hack.cluster import enforcer
from hack.cluster.policies import compile_policies, ruleset
from psjob_operator import render
from psjob_operator.plan.actions import CreateProcess
from psjob_operator.plan.observed_state import Role
from tests.support.netns import ROUTER, Network, require
from tests.unit.plan_given import job

pytestmark = pytest.mark.nodes
HOME = {"kubernetes.io/metadata.name": "home"}
NAMESPACES = [{"metadata": {"name": "ns", "labels": {}}}, {"metadata": {"name": "home", "labels": HOME}}, {"metadata": {"name": "other"}}]
ASKERS = ({"namespaceSelector": {"matchLabels": HOME}, "podSelector": {"matchLabels": {"app": "operator"}}},)
MEMBERS = {"shard": "ns", "worker": "ns", "operator": "home", "homely": "home", "neighbour": "ns", "stranger": "other"}
LABELS = {"operator": {"app": "operator"}, "homely": {"app": "grafana"}, "stranger": {"app": "operator"}}
PORTS = {"shard": (7070, 7071), "worker": (6006,)}
EVERYTHING = {(by, to, port) for by in MEMBERS for to, ports in PORTS.items() for port in ports if by != to}
LET_IN = {("worker", "shard", 7070), ("operator", "shard", 7071), ("shard", "worker", 6006)}
SECONDS = 1.0
"""A member of this machine answers in a millisecond; what takes longer was dropped."""


@pytest.fixture
def network() -> Iterator[Network]:
    require()
    with Network(tuple(MEMBERS)) as made:
        yield made


def pod(network: Network, name: str) -> dict[str, Any]:
    role: Role | None = {"shard": "shard", "worker": "worker"}.get(name)  # type: ignore[assignment]
    labels = LABELS.get(name, {}) if role is None else render.pod(job(), CreateProcess(role, 0, 1, 1, name))["metadata"]["labels"]
    metadata = {"name": name, "namespace": MEMBERS[name], "labels": labels}
    return {"metadata": metadata, "spec": {}, "status": {"phase": "Running", "podIP": network[name].address}}


def listen(network: Network, name: str, port: int) -> socket.socket:
    return network[name].call(lambda: socket.create_server((network[name].address, port), backlog=64))


def connects(network: Network, by: str, to: str, port: int) -> bool:
    space = network.router if by == "router" else network[by]
    try:
        space.call(lambda: socket.create_connection((network[to].address, port), timeout=SECONDS)).close()
    except TimeoutError:
        return False
    return True


def reached(network: Network) -> set[tuple[str, str, int]]:
    with ThreadPoolExecutor(len(EVERYTHING)) as pool:
        tried = {way: pool.submit(connects, network, *way) for way in EVERYTHING}
        return {way for way, answer in tried.items() if answer.result()}


def hold(network: Network, *roles: Role) -> None:
    policies = [render.policy(job(), role, ASKERS) for role in roles]
    compiled = compile_policies(policies, [pod(network, name) for name in MEMBERS], NAMESPACES)
    assert not compiled.refused
    assert enforcer.load(network.router.holder.pid, ruleset(compiled, f"{ROUTER}/32"))


def test_strangers_reach_nothing_once_there_are_policies_and_everything_before(network: Network) -> None:
    servers = [listen(network, name, port) for name, ports in PORTS.items() for port in ports]
    hold(network)
    assert reached(network) == EVERYTHING
    servers.append(listen(network, "shard", 7072))
    begun = network["stranger"].call(lambda: socket.create_connection((network["shard"].address, 7072), timeout=SECONDS))
    served, _ = servers[-1].accept()
    hold(network, "shard", "worker")
    assert reached(network) == LET_IN
    assert connects(network, "router", "shard", 7071), "the kubelet's probes come from the node"
    # A connection that is there is not ended: plugins end none, so the keys are what a stranger who came before meets.
    begun.sendall(b"x")
    assert served.recv(1) == b"x"
    hold(network, "shard")
    assert reached(network) == {way for way in EVERYTHING if way[1] == "worker"} | {way for way in LET_IN if way[1] == "shard"}
    for one in (*servers, begun, served):
        one.close()
