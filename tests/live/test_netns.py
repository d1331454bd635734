"""Each fault of tests/support/netns.py is what its name says, seen from ordinary sockets.

- A run's NetworkPolicies, by packets: the stand-in enforcer of hack/cluster holds a small members to what the operator makes.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hack.cluster import enforcer
from hack.cluster.policies import compile_policies, ruleset
from psjob_operator import render
from psjob_operator.plan.actions import CreateProcess
from psjob_operator.plan.observed_state import Role
from tests.support.netns import ROUTER, Network, Space, require
from tests.unit.plan_given import job

pytestmark = pytest.mark.nodes
PORT = 9000
SO_RCVBUFFORCE = 33
NAMES = ("left", "right", "other")
Ends = dict[str, socket.socket]
SINK = """
import socket, sys
with socket.create_server((sys.argv[1], 9001)) as server:
    print("ready", flush=True)
    stream, _ = server.accept()
    while stream.recv(16):
        stream.sendall(b"heard")
"""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    require()
    with Network(NAMES) as network:
        yield network


@pytest.fixture
def ends(network: Network) -> Iterator[Ends]:
    """A socket for datagrams in each namespace."""
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(datagrams(network[name])) for name in NAMES}


def datagrams(space: Space) -> socket.socket:
    made = space.call(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    made.bind((space.address, PORT))
    made.settimeout(0.5)
    made.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 24)  # what waits to be read shall not be lost
    return made


def arrived(ends: Ends, source: str, target: str, sent: int = 20) -> int:
    """How many of so many datagrams from `source` arrive at `target` within half a second of each other."""
    found = 0
    for _ in range(sent):
        ends[source].sendto(b"there", ends[target].getsockname())
    with contextlib.suppress(TimeoutError):
        while found < sent:
            ends[target].recv(16)
            found += 1
    return found


def passes(ends: Ends) -> set[tuple[str, str]]:
    """The pairs between which datagrams pass, each in its direction."""
    return {pair for pair in itertools.permutations(NAMES, 2) if arrived(ends, *pair) > 0}


def stream(network: Network, client: str, server: str) -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection between two namespaces."""
    with network[server].call(lambda: socket.create_server((network[server].address, 0))) as listener:
        one = network[client].call(lambda: socket.create_connection(listener.getsockname(), timeout=5))
        other, _ = listener.accept()
    one.settimeout(30)
    other.settimeout(30)
    return one, other


ALL = set(itertools.permutations(NAMES, 2))


def test_without_a_fault_everything_arrives(ends: Ends) -> None:
    assert [arrived(ends, *pair) for pair in ALL] == [20] * 6


def test_a_cut_stops_one_direction_and_a_partition_both(network: Network, ends: Ends) -> None:
    with network.cut("left", "right") as dropped:
        assert passes(ends) == ALL - {("left", "right")}
        assert dropped.packets == 20
    with network.partition("left", "right") as dropped:
        assert passes(ends) == ALL - {("left", "right"), ("right", "left")}
        assert dropped.packets == 40
    assert passes(ends) == ALL


def test_some_of_a_hundred_packets_are_lost(network: Network, ends: Ends) -> None:
    with network.loss(5, ("left", "right")) as dropped:
        came = arrived(ends, "left", "right", 2000)
        assert came + dropped.packets == 2000
        # Eight standard deviations to each side.
        assert 22 < dropped.packets < 178
        assert arrived(ends, "left", "other", 100) == 100


def test_a_delay_adds_itself_to_each_direction(network: Network, ends: Ends) -> None:
    def round_trip(one: str, other: str) -> float:
        began = time.monotonic()
        ends[one].sendto(b"there", ends[other].getsockname())
        ends[other].sendto(ends[other].recv(16), ends[one].getsockname())
        ends[one].recv(16)
        return time.monotonic() - began

    sent = bytes(range(256)) * 400  # many packets on their way at once
    assert round_trip("left", "right") < 0.2
    with network.delayed(0.2, ("left", "right")):
        assert 0.4 <= round_trip("left", "right") < 0.8
        assert 0.4 <= round_trip("right", "left") < 0.8
        assert round_trip("left", "other") < 0.2
        one, other = stream(network, "left", "right")
        with one, other:
            one.sendall(sent)
            one.shutdown(socket.SHUT_WR)
            with other.makefile("rb") as whole:
                assert whole.read() == sent
    assert round_trip("left", "right") < 0.2


@pytest.mark.parametrize("source", ["left", "right"])
def test_a_limited_link_carries_its_rate(network: Network, source: str) -> None:
    target = "right" if source == "left" else "left"
    one, other = stream(network, source, target)
    with one, other, network.limited("left", 1_000_000):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        began, left = time.monotonic(), 250_000
        one.sendall(bytes(left))
        while left:
            left -= len(other.recv(65536))
        took = time.monotonic() - began
    assert 0.6e6 < 2e6 / took < 1.05e6


def test_nobody_hears_of_a_killed_process_whose_resets_are_dropped(network: Network) -> None:
    words = [*network["right"].enter, sys.executable, "-c", SINK, network["right"].address]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as peer:
        assert peer.stdout is not None and peer.stdout.readline() == b"ready\n"
        client = network["left"].call(lambda: socket.create_connection((network["right"].address, 9001), timeout=2))
        with client, network.no_ends("right") as dropped:
            client.sendall(b"there")
            assert client.recv(16) == b"heard"
            peer.send_signal(signal.SIGKILL)
            peer.wait()
            client.sendall(b"there")
            with pytest.raises(TimeoutError):
                client.recv(16)
            assert dropped.packets >= 2  # its FIN, and the RST that answers what came after it
        client.close()


def test_an_aborted_connection_lives_on_at_its_peer(network: Network) -> None:
    one, other = stream(network, "left", "right")
    with one, other:
        with network.no_ends("right") as dropped:
            assert network.abort("right", "left") == 1
            with pytest.raises(ConnectionError):
                other.recv(16)
            one.settimeout(1)
            with pytest.raises(TimeoutError):
                one.recv(16)
            assert dropped.packets >= 1
        one.sendall(b"there")
        with pytest.raises(ConnectionError):
            one.recv(16)


def test_a_network_ends_with_its_block() -> None:
    require()
    with Network(("one",)) as made:
        there = [made.router, made["one"]]
        holders = [space.holder for space in there]
        assert len({space.run("readlink", "/proc/self/ns/net") for space in there}) == 2
    assert all(holder.poll() is not None for holder in holders)


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
def members() -> Iterator[Network]:
    require()
    with Network(tuple(MEMBERS)) as made:
        yield made


def pod(members: Network, name: str) -> dict[str, Any]:
    role: Role | None = {"shard": "shard", "worker": "worker"}.get(name)  # type: ignore[assignment]
    labels = LABELS.get(name, {}) if role is None else render.pod(job(), CreateProcess(role, 0, 1, 1, name))["metadata"]["labels"]
    metadata = {"name": name, "namespace": MEMBERS[name], "labels": labels}
    return {"metadata": metadata, "spec": {}, "status": {"phase": "Running", "podIP": members[name].address}}


def listen(members: Network, name: str, port: int) -> socket.socket:
    return members[name].call(lambda: socket.create_server((members[name].address, port), backlog=64))


def connects(members: Network, by: str, to: str, port: int) -> bool:
    space = members.router if by == "router" else members[by]
    try:
        space.call(lambda: socket.create_connection((members[to].address, port), timeout=SECONDS)).close()
    except TimeoutError:
        return False
    return True


def reached(members: Network) -> set[tuple[str, str, int]]:
    with ThreadPoolExecutor(len(EVERYTHING)) as pool:
        tried = {way: pool.submit(connects, members, *way) for way in EVERYTHING}
        return {way for way, answer in tried.items() if answer.result()}


def hold(members: Network, *roles: Role) -> None:
    policies = [render.policy(job(), role, ASKERS) for role in roles]
    compiled = compile_policies(policies, [pod(members, name) for name in MEMBERS], NAMESPACES)
    assert not compiled.refused
    assert enforcer.load(members.router.holder.pid, ruleset(compiled, f"{ROUTER}/32"))


def test_strangers_reach_nothing_once_there_are_policies_and_everything_before(members: Network) -> None:
    servers = [listen(members, name, port) for name, ports in PORTS.items() for port in ports]
    hold(members)
    assert reached(members) == EVERYTHING
    servers.append(listen(members, "shard", 7072))
    begun = members["stranger"].call(lambda: socket.create_connection((members["shard"].address, 7072), timeout=SECONDS))
    served, _ = servers[-1].accept()
    hold(members, "shard", "worker")
    assert reached(members) == LET_IN
    assert connects(members, "router", "shard", 7071), "the kubelet's probes come from the node"
    # A connection that is there is not ended: plugins end none, so the keys are what a stranger who came before meets.
    begun.sendall(b"x")
    assert served.recv(1) == b"x"
    hold(members, "shard")
    assert reached(members) == {way for way in EVERYTHING if way[1] == "worker"} | {way for way in LET_IN if way[1] == "shard"}
    for one in (*servers, begun, served):
        one.close()
