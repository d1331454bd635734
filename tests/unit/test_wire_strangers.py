"""Places of streams that have proven nothing: bounded, and never all taken from somebody who comes from elsewhere.

- Streams that a process has begun, and that are not served yet.
- Lines of a shard's log on streams that it has refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psjob.shard.acceptor import MOST_LINES, QUIET_SECONDS, SPARE, Acceptor, LogRateLimiter
from psjob.shard.status_server import Nonces
from psjob.wire.auth import Peer
from psjob.wire.unauthenticated import UnauthenticatedPeers, network


def test_the_place_is_taken_from_the_oldest_of_the_host_that_has_most() -> None:
    places: UnauthenticatedPeers[int] = UnauthenticatedPeers(3)
    assert [places.add(one, host) for one, host in enumerate("aab")] == [None, None, None]
    assert places.add(3, "b") == 0, "a has most"
    assert places.add(4, "b") == 2, "now b has"
    assert places.drop(1) and not places.drop(1)
    assert places.add(5, "c") is None and len(places) == 3


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans())), st.integers(1, 5))
def test_there_are_never_more_than_places(steps: list[tuple[str, bool]], most: int) -> None:
    places: UnauthenticatedPeers[int] = UnauthenticatedPeers(most)
    there: list[int] = []
    for one, (host, comes) in enumerate(steps):
        if comes:
            victim = places.add(one, host)
            if victim is not None:
                there.remove(victim)
            there.append(one)
        elif there:
            assert places.drop(there.pop())
        assert len(places) == len(there) <= most
        assert sum(places._silent.counts.values()) == len(there)


def test_a_flood_of_one_host_leaves_another_its_place() -> None:
    places: UnauthenticatedPeers[int] = UnauthenticatedPeers(8)
    places.add(-1, "peer")
    assert -1 not in [places.add(one, "flood") for one in range(10_000)]
    assert places.drop(-1)


def test_who_has_spoken_stays_while_a_thousand_hosts_say_nothing() -> None:
    places: UnauthenticatedPeers[int] = UnauthenticatedPeers(8)
    for one in range(4):
        places.add(one, "10.0.0.1")
        places.rename(one, one - 100)
    gone = [places.add(one, f"10.{one}.0.1") for one in range(200)]
    assert gone[:4] == [None] * 4 and gone[4:] == list(range(196))
    assert all(places.drop(one - 100) for one in range(4))


def test_where_all_have_spoken_the_place_is_taken_from_the_crowded_network() -> None:
    places: UnauthenticatedPeers[str] = UnauthenticatedPeers(4)
    for name, host in (("a", "10.0.0.1"), ("b", "10.1.0.1"), ("c", "10.1.0.2"), ("d", "10.1.0.3")):
        places.add(name, host)
        places.rename(name, name + "!")
    assert places.add("e", "10.2.0.1") == "b!" and places.add("f", "10.2.0.2") == "c!"


def test_first_words_of_one_network_leave_a_newcomer_its_place() -> None:
    places: UnauthenticatedPeers[int] = UnauthenticatedPeers(8)
    for one in range(100):
        places.add(one, f"10.0.0.{one}")
        places.rename(one, 1000 + one)
    places.add(-1, "10.1.0.1")
    for one in range(100, 200):
        assert places.add(one, f"10.0.0.{one}") not in (-1, None)
        places.rename(one, 1000 + one)
    assert places.drop(-1)


@pytest.mark.parametrize(
    ("host", "counted"),
    [
        ("127.1.2.3", "127.1.2.0/24"),
        ("::ffff:127.1.2.3", "127.1.2.0/24"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
        ("a-name", "a-name"),
    ],
)
def test_hosts_are_counted_by_their_network(host: str, counted: str) -> None:
    assert network(host) == counted


def test_a_nonce_is_good_once_and_for_a_time() -> None:
    nonces = Nonces(10.0)
    first, second = nonces.make(100.0), nonces.make(100.0)
    assert first != second and first.isalnum(), "it goes into a header"
    assert nonces.spend(first, 110.0) and not nonces.spend(first, 105.0)
    assert not nonces.spend(second, 110.1)
    for strange in ("", "1.2.3", first[:-1] + "x", "9" + first, Nonces(10.0).make(100.0)):
        assert not nonces.spend(strange, 101.0)


def test_used_nonces_are_forgotten_when_they_are_too_old() -> None:
    nonces = Nonces(1.0)
    for second in range(100):
        assert nonces.spend(nonces.make(float(second)), float(second))
    assert len(nonces._used) <= 2


def test_each_stream_that_a_process_begins_too_many_closes_another() -> None:
    """Also before those that were closed have come to their ends."""
    acceptor = Acceptor.__new__(Acceptor)
    acceptor.here = cast(Any, SimpleNamespace(config=SimpleNamespace(streams=1)))
    acceptor._lock, acceptor._begun, acceptor._large = threading.Lock(), {}, {}
    peer, closed = Peer("worker", 0, 1), list[int]()
    beginnings = [acceptor._beginning(peer, cast(Any, Begun(partial(closed.append, at)))) for at in range(10)]
    for beginning in beginnings:
        beginning.__enter__()
    assert closed == list(range(10 - 1 - SPARE))
    for beginning in reversed(beginnings):
        beginning.__exit__(None, None, None)
    assert not acceptor._begun


class Begun:
    """A stream, as far as it is known here."""

    def __init__(self, close: Callable[[], None]) -> None:
        self.close = close


def test_a_host_has_one_line_a_minute() -> None:
    notices = LogRateLimiter()
    assert [notices.told("a", now) for now in (0.0, 1.0, QUIET_SECONDS - 0.1, QUIET_SECONDS)] == [0, None, None, 2]
    assert notices.told("b", QUIET_SECONDS) == 0


def test_all_hosts_together_have_a_bounded_number_of_lines() -> None:
    """Also where there are more of them than are remembered."""
    notices, lines = LogRateLimiter(), []
    for number in range(30_000):  # of 3,000 hosts, in three minutes
        now = number / 30_000 * 3 * QUIET_SECONDS
        if notices.told(f"host {number % 3000}", now) is not None:
            lines.append(now)
        assert len(notices._told) <= MOST_LINES
    for begin in lines:
        assert sum(begin <= line < begin + QUIET_SECONDS for line in lines) <= MOST_LINES
    assert len(lines) >= 2 * MOST_LINES


def test_what_had_no_line_is_told_by_its_number() -> None:
    notices = LogRateLimiter()
    said = [notices.told(f"host {number}", 0.0) for number in range(MOST_LINES + 7)]
    assert said == [0] * MOST_LINES + [None] * 7
    assert notices.told("another", QUIET_SECONDS) == 7
