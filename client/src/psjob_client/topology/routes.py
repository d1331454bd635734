"""What a machine carries at once: the way between two ends, and the rate of a set of flows that go side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from psjob_client.topology.links import Link, Machine
from psjob_client.topology.units import show_rate

Flow = tuple[str, str]
Resource = tuple[str, str, str]
"""What flows share: one direction of a link, a half-duplex link, or a measured pair."""


@dataclass(frozen=True)
class Way:
    """What a flow passes."""

    resources: tuple[Resource, ...]
    latency: float


@dataclass(frozen=True)
class Pace:
    """Bytes a second of the slowest of the flows, and the latency of the longest way."""

    bandwidth: float
    latency: float


class NoWay(Exception):
    """Two ends that nothing joins."""


class Routes:
    """Ways through one machine. The fewest links are taken, then the widest; only switches and CPUs pass bytes on."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._passing = {*machine.cpus, *(switch.name for switch in machine.switches)}
        self._links: dict[frozenset[str], Link] = {frozenset(link.between): link for link in machine.every_link()}
        self._bound: dict[frozenset[str], tuple[float, float | None]] = {
            frozenset(given.between): (given.bandwidth, given.latency) for given in machine.measured
        }
        self._near: dict[str, list[str]] = {name: [] for name in machine.nodes}
        for one, other in map(sorted, self._links):
            self._near[one].append(other)
            self._near[other].append(one)
        self._room: dict[Resource, float] = {}
        self._ways: dict[str, dict[str, Way]] = {}

    def pace(self, flows: Sequence[Flow]) -> Pace:
        """Of `flows` that all go at once and end together, so that the slowest one holds. Raises NoWay."""
        ways = [self.way(*flow) for flow in flows]
        load = Counter(resource for way in ways for resource in way.resources)
        rate = min(self._room[resource] / count for resource, count in load.items())
        if self.machine.total is not None:
            rate = min(rate, self.machine.total / len(flows))
        return Pace(rate, max(way.latency for way in ways))

    def way(self, source: str, target: str) -> Way:
        """From one end to another. Raises NoWay."""
        if source not in self._ways:
            self._ways[source] = self._from(source)
        try:
            return self._ways[source][target]
        except KeyError:
            raise NoWay(f"nothing joins {source} and {target}; describe the link or the switch between them") from None

    def width(self, source: str, target: str) -> float:
        """Bytes a second of one flow that is alone."""
        alone = min(self._room[resource] for resource in self.way(source, target).resources)
        return alone if self.machine.total is None else min(alone, self.machine.total)

    def room(self, resource: Resource) -> float:
        """Bytes a second of what a way passes."""
        return self._room[resource]

    def direct(self, one: str, other: str) -> Link | None:
        """Their link, with what was measured in place of what was described."""
        pair = frozenset((one, other))
        link, bound = self._links.get(pair), self._bound.get(pair)
        if link is None or bound is None:
            return link
        latency = link.latency if bound[1] is None else bound[1]
        return link.model_copy(update={"bandwidth": bound[0] / link.lanes, "latency": latency})

    def check(self, ends: Iterable[str]) -> None:
        """Raises NoWay where two of `ends` are not joined, or where more was measured between two than the links on their way pass."""
        first, *others = ends
        for other in others:
            self.way(first, other)
        for pair, (bandwidth, _) in self._bound.items():
            if pair in self._links:
                continue
            one, other = sorted(pair)
            room = min(self._room[key] for key in self.way(one, other).resources if key[2] != "measured")
            if bandwidth > room:
                raise NoWay(
                    f"{one}:{other} was measured at {show_rate(bandwidth)}, and the links on the way are described with {show_rate(room)}; "
                    f"give what the links carry, such as --measured {one}:{self._near[one][0]}={show_rate(bandwidth).replace(' ', '')}"
                )

    def _from(self, source: str) -> dict[str, Way]:
        """Breadth first; among ways of as many links the widest, then the quickest."""
        best: dict[str, tuple[float, float, Way]] = {source: (float("inf"), 0.0, Way((), 0.0))}
        edge = [source]
        while edge:
            found: dict[str, tuple[float, float, Way]] = {}
            for at in edge:
                width, delay, way = best[at]
                for other in self._near[at]:
                    if other in best:
                        continue
                    key, room, latency = self._step(at, other)
                    reached = (min(width, room), delay - latency, Way((*way.resources, key), way.latency + latency))
                    if other not in found or reached[:2] > found[other][:2]:
                        found[other] = reached
            best |= found
            edge = [name for name in found if name in self._passing]
        return {name: self._held(source, name, way) for name, (_, _, way) in best.items()}

    def _step(self, at: str, other: str) -> tuple[Resource, float, float]:
        link = self.direct(at, other)
        assert link is not None
        key = (at, other, "link") if link.duplex == "full" else (min(at, other), max(at, other), "half")
        self._room[key] = link.bandwidth * link.lanes
        return key, self._room[key], link.latency

    def _held(self, source: str, target: str, way: Way) -> Way:
        """`way`, and what was measured between two ends that have no link of their own."""
        pair = frozenset((source, target))
        if pair not in self._bound or pair in self._links:
            return way
        bandwidth, latency = self._bound[pair]
        key = (source, target, "measured")
        self._room[key] = bandwidth
        return Way((*way.resources, key), way.latency if latency is None else latency)
