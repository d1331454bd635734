"""A machine as stages see it: hosts of equally many devices, a link inside them, one across, and the way to the shards."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Wire:
    """Bytes a second each way, and seconds of a message."""

    bandwidth: float
    latency: float = 0.0

    def seconds(self, size: float) -> float:
        """Of one message."""
        return self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Grid:
    """`hosts` × `each` devices; device d is on host d // each."""

    hosts: int
    each: int
    inside: Wire
    across: Wire
    shared_uplink: bool
    """The devices of a host share what leaves it."""
    push_byte: float
    """Seconds that one byte of weights takes to be pushed and pulled, while all workers do."""
    push_latency: float = 0.0
    names: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """Devices in all."""
        return self.hosts * self.each

    def update(self, weights: float) -> float:
        """Seconds of one push and pull of so many bytes."""
        return self.push_latency + weights * self.push_byte if weights else 0.0
