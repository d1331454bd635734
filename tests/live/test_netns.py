"""Each fault of tests/support/netns.py is what its name says, seen from ordinary sockets."""

from __future__ import annotations

import contextlib
import itertools
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.support.netns import Network, Space, require

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
