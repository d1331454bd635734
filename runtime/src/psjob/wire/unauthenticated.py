"""Peers that have not proven yet who they are: so many at a time and no more. One that comes when all places are taken gets one of them.

The place is taken from those who have not spoken at all, where they have half of the places, else from those who have. Of them the network
with most places loses its oldest. So silence, or first words, take half of the places from the other at most, wherever they come from. Who
proves itself at once keeps its place for as long as it needs it, however many others there are.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Final, Generic, TypeVar

from psjob.wire.reading import STRANGER_SECONDS

T = TypeVar("T")
IPV4_BITS, IPV6_BITS = 24, 64
"""Of addresses that have so many first bits in common, one is as good as another: they are one sender's."""


class UnauthenticatedPeers(Generic[T]):
    """At most `most` of them. May be called from any thread."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._silent, self._spoke = _Places[T](), _Places[T]()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._silent.networks) + len(self._spoke.networks)

    def add(self, one: T, host: str) -> T | None:
        """Take note of one more; who has to go for it, where one has."""
        with self._lock:
            victim = None
            if len(self) >= self.most:
                places = self._silent if 2 * len(self._silent.networks) >= self.most else self._spoke
                victim = places.oldest_of_most()
                places.drop(victim)
            self._silent.add(one, network(host))
            return victim

    def drop(self, one: T) -> bool:
        """It has proven itself, or has gone. False where it was none of them any more."""
        with self._lock:
            return (self._silent.drop(one) or self._spoke.drop(one)) is not None

    def rename(self, one: T, other: T) -> None:
        """It is called otherwise from now on: it has spoken."""
        with self._lock:
            of = self._silent.drop(one)
            if of is not None:
                self._spoke.add(other, of)


class _Places(Generic[T]):
    def __init__(self) -> None:
        self.networks: dict[T, str] = {}
        """Oldest first."""
        self.counts: Counter[str] = Counter()

    def add(self, one: T, of: str) -> None:
        self.networks[one] = of
        self.counts[of] += 1

    def drop(self, one: T) -> str | None:
        """Its network; None where it has no place here."""
        of = self.networks.pop(one, None)
        if of is not None:
            self.counts[of] -= 1
            if not self.counts[of]:
                del self.counts[of]
        return of

    def oldest_of_most(self) -> T:
        """Of the network with most places, who has one for longest."""
        crowded = max(self.counts, key=self.counts.__getitem__)
        return next(it for it, its in self.networks.items() if its == crowded)


def network(host: str) -> str:
    """What a host is counted as: its /24, or /64 of IPv6; itself where it is no address."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    mapped = getattr(address, "ipv4_mapped", None) or address
    bits = IPV4_BITS if mapped.version == 4 else IPV6_BITS
    return str(ipaddress.ip_network((mapped, bits), strict=False))


class HandshakeQueue:
    """Who has dialled and has not said its first words yet: of each there is a descriptor, and nothing else is made.

    The kernel tells of who has said them all (SO_RCVLOWAT), or has gone. Belongs to the thread of one event loop, whose `listen` and
    `unlisten` it calls. `gone` is called with each socket that is closed in here.
    """

    def __init__(
        self, listen: Callable[[int, Callable[[], None]], None], unlisten: Callable[[int], None], gone: Callable[[socket.socket], object]
    ) -> None:  # fmt: skip
        self._listen, self._unlisten, self._gone = listen, unlisten, gone
        self._waiting: dict[socket.socket, float] = {}
        """When each has dialled; oldest first."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sock: socket.socket, enter: Callable[[socket.socket, float], object]) -> None:
        """It has dialled; `enter` is given it once it has spoken, and when it had dialled. Raises OSError if no more can be watched."""
        self._listen(sock.fileno(), partial(self._speaks, sock, enter))
        self._waiting[sock] = time.monotonic()

    def close(self, sock: socket.socket) -> None:
        """Hang up."""
        self._leave(sock)
        sock.close()
        self._gone(sock)

    def look(self, now: float) -> None:
        """Hang up on who has not spoken in time."""
        for sock, since in list(self._waiting.items()):
            if now - since < STRANGER_SECONDS:
                break
            self.close(sock)

    def _speaks(self, sock: socket.socket, enter: Callable[[socket.socket, float], object]) -> None:
        try:
            said = sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:  # the poller told of another one, which had this descriptor before
            return
        except OSError:
            said = b""
        if said:
            enter(sock, self._leave(sock))
        else:
            self.close(sock)

    def _leave(self, sock: socket.socket) -> float:
        self._unlisten(sock.fileno())
        return self._waiting.pop(sock)


STRANGER_LETTERS: Final = 200
"""Most letters of what somebody says who has proven nothing."""


def one_line(said: object, most: int) -> str:
    """`said` as text of at most `most` letters; a space stands for each one that is not printable."""
    return "".join(letter if letter.isprintable() else " " for letter in str(said)[:most])
