"""Who has not proven yet who it is: so many at a time and no more. One that comes when all places are taken gets one of them.

The place is taken from those who have not spoken at all, where they have half of the places, else from those who have. Of them the network
with most places loses its oldest. So silence, or first words, take half of the places from the other at most, wherever they come from. Who
proves itself at once keeps its place for as long as it needs it, however many others there are.
"""

from __future__ import annotations

import ipaddress
import threading
from collections import Counter
from typing import Generic, TypeVar

T = TypeVar("T")
IPV4_BITS, IPV6_BITS = 24, 64
"""Of addresses that have so many first bits in common, one is as good as another: they are one sender's."""


class Strangers(Generic[T]):
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
