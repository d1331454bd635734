"""A machine, described: hosts with their devices, switches, servers, and the links between them; and what it carries at once.

`read_machine` takes a description. `FIGURES` says what links carry, by name: the founding text's figures, and what was measured in their
place; `PRESETS` are machines by name. `Routes` finds the way between two ends, and the rate of a set of flows that go side by side.
Bytes, rates and times are written as people write them: 160MB, 16GB/s, 10Gb/s, 50us.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from psjob_operator.api.base import Model
from psjob_operator.api.field_rule import Problem, field_path, shown

MOST_BYTES = 1e18
_NUMBER = r"([0-9]{1,18}(?:\.[0-9]{1,18})?(?:[eE][+-]?[0-9]{1,2})?)"
_PREFIX = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_TIME = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


def parse_rate(given: object) -> float:
    """Bytes a second of a number, or of text such as 16GB/s, 1.2GiB/s or 10Gb/s (bits). Raises ValueError."""
    found = re.fullmatch(rf"{_NUMBER} ?([kKMGT]i?)?([Bb])(?:/s|ps)", given) if isinstance(given, str) else None
    if found is not None:
        value = float(found[1]) * _PREFIX[found[2] or ""] / (8 if found[3] == "b" else 1)
    else:
        value = _plain(given, "a bandwidth such as 16GB/s or 10Gb/s")
    if not value > 0:
        raise ValueError(f"must be more than 0 bytes a second, not {given}")
    return value


def parse_seconds(given: object) -> float:
    """Seconds of a number, or of text such as 50us or 1.5ms. Raises ValueError."""
    found = re.fullmatch(rf"{_NUMBER} ?(s|ms|us|µs|ns)", given) if isinstance(given, str) else None
    return float(found[1]) * _TIME[found[2]] if found is not None else _plain(given, "a time such as 50us or 1.5ms")


def parse_size(given: object) -> float:
    """Bytes of a number, or of text such as 160MB or 64KiB. Raises ValueError."""
    found = re.fullmatch(rf"{_NUMBER} ?([kKMGT]i?)?B", given) if isinstance(given, str) else None
    value = float(found[1]) * _PREFIX[found[2] or ""] if found is not None else _plain(given, "a size such as 160MB or 64KiB")
    if not 1 <= value <= MOST_BYTES:
        raise ValueError(f"must be 1 byte to {MOST_BYTES / 1e12:.0f}TB, not {given}")
    return value


def show_seconds(value: float) -> str:
    """Three digits and a unit: 60.0 ms, 5.19 ms, 350 µs."""
    return _shown(value, (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)))


def show_bytes(value: float) -> str:
    """Three digits and a unit: 160 MB."""
    return _shown(value, (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0)))


def show_rate(value: float) -> str:
    """Three digits and a unit: 16.0 GB/s."""
    return f"{show_bytes(value)}/s"


def _plain(given: object, wanted: str) -> float:
    if isinstance(given, str) and re.fullmatch(_NUMBER, given):
        given = float(given)
    if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given) or given < 0:
        raise ValueError(f"must be {wanted}")
    return float(given)


def _shown(value: float, units: tuple[tuple[str, float], ...]) -> str:
    if value == 0:
        return "0"
    unit, scale = next((pair for pair in units if value >= pair[1] * 0.9995), units[-1])
    number = value / scale
    digits = 2 if number < 9.995 else 1 if number < 99.95 else 0
    return f"{number:.{digits}f} {unit}"


@dataclass(frozen=True)
class Figure:
    """Bandwidth in bytes a second, each direction; latency of a message in seconds."""

    bandwidth: float
    latency: float
    source: str


_TEXT = 'Dive into Deep Learning, "Parameter Servers"'
_NO_LATENCY = "the text counts no latency"
FIGURES: Mapping[str, Figure] = {
    "nvlink": Figure(100e9, 0.0, f"{_TEXT}: up to 100 GB/s across 6 links; {_NO_LATENCY}"),
    "nvlink-lane": Figure(18e9, 0.0, f"{_TEXT}: 300 Gbit/s both ways, around 18 GB/s per link per direction; {_NO_LATENCY}"),
    "pcie3-lane": Figure(1e9, 0.0, f"{_TEXT}: a sixteenth of 16 lanes; {_NO_LATENCY}"),
    "pcie3-x16": Figure(16e9, 0.0, f"{_TEXT}: 16 GB/s; {_NO_LATENCY}"),
    "ethernet-100": Figure(10e9, 50e-6, f"{_TEXT}: 10 GB/s; 50 µs are an assumption for TCP through one switch"),
    "ethernet-10": Figure(1e9, 50e-6, f"{_TEXT}: effectively 1 GB/s; 50 µs are an assumption for TCP through one switch"),
    "ethernet-1": Figure(0.1e9, 50e-6, f"{_TEXT}: effectively 100 MB/s; 50 µs are an assumption for TCP through one switch"),
}


MOST_DEVICES = 128
MOST_LINKS = 20_000
FIGURES_KEY = "figures"
"""In the context of a validation: the figures that names of links stand for."""


def read_machine(raw: Any, figures: Mapping[str, Figure] = FIGURES) -> tuple[Machine | None, list[Problem]]:
    """The machine that `raw` describes, or every problem found (never both; never an exception). A bandwidth may be a figure's name."""
    try:
        machine = Machine.model_validate(raw, context={FIGURES_KEY: figures})
    except ValidationError as error:
        return None, [
            finding_in_words(detail, "docs/topology.md", "see `psjob plan-topology --help` for an example")
            for detail in error.errors(include_url=False)
        ]
    problems = list(_breaches(machine))
    return (None, problems) if problems else (machine, [])


def _from(read: Any) -> BeforeValidator:
    def told(given: object) -> float:
        try:
            return float(read(given))
        except ValueError as error:
            raise PydanticCustomError("quantity", "{told}", {"told": str(error)}) from None

    return BeforeValidator(told)


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")]
Rate = Annotated[float, _from(parse_rate)]
Seconds = Annotated[float, _from(parse_seconds)]


class _Way(Model):
    bandwidth: Rate
    """Bytes a second of each lane and direction: 16GB/s, 10Gb/s, or the name of a figure such as pcie3-x16."""
    latency: Seconds = 0.0
    """Of one message: 50us. With a figure's name for the bandwidth: that figure's."""
    lanes: int = Field(default=1, ge=1, le=1024)
    """So many beside each other; rings that share no lane are looked for among direct links."""
    duplex: Literal["full", "half"] = "full"
    """half: what continuese way takes from the other."""

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, data: Any, info: ValidationInfo) -> Any:
        named = data.get("bandwidth") if isinstance(data, dict) else None
        figures: Mapping[str, Figure] = (info.context or {}).get(FIGURES_KEY, FIGURES)
        if isinstance(named, str) and named in figures:
            return {"latency": figures[named].latency, **data, "bandwidth": figures[named].bandwidth}
        return data


class Link(_Way):
    """Between two of the machine's devices, CPUs, servers and switches."""

    between: list[Name] = Field(min_length=2, max_length=2)
    """The two ends."""


class Switch(_Way):
    """Carries any pairs at once, each up to its ports' bandwidth. Latency is from port to port."""

    name: Name
    """Its name in links."""
    joins: list[Name] = Field(min_length=1, max_length=1024)
    """What has a port here."""


class Host(Model):
    """A host: what is inside is near, and shards can live on it."""

    name: Name
    """Its name; a host of one device is only its name, and the device has the same."""
    devices: list[Name] = Field(min_length=1, max_length=MOST_DEVICES)
    """Devices that hold a gradient each: GPUs, or worker processes."""
    cpu: Name | None = None
    """Its CPU's name in links, where it matters: it passes bytes on, and it can hold a shard."""
    cpu_lanes: int | None = Field(default=None, ge=1, le=1024)
    """PCIe lanes of the CPU (24 in a usual consumer's): its links may not have more together."""

    @model_validator(mode="before")
    @classmethod
    def _alone(cls, data: Any) -> Any:
        return {"name": data, "devices": [data]} if isinstance(data, str) else data


class MeasuredLink(Model):
    """What was measured between two ends: takes the place of their link's description; ends without one are held to it."""

    between: list[Name] = Field(min_length=2, max_length=2)
    """The two ends."""
    bandwidth: Rate
    """Bytes a second each way, all lanes together."""
    latency: Seconds | None = None
    """Of one message; absent: as described."""


class Machine(Model):
    """Devices that hold a gradient each, and what joins them."""

    name: Name
    """For people."""
    hosts: list[Host] = Field(min_length=1, max_length=MOST_DEVICES)
    """Hosts with their devices; `[w0, w1]` are hosts of one device each."""
    servers: list[Name] = Field(default=[], max_length=MOST_DEVICES)
    """Machines that hold shards and no worker."""
    switches: list[Switch] = Field(default=[], max_length=1024)
    """Switches, and what each joins."""
    links: list[Link] = Field(default=[], max_length=MOST_LINKS)
    """Direct links."""
    total: Rate | None = None
    """Bytes a second of everything together, where one memory or bus carries it all."""
    measured: list[MeasuredLink] = Field(default=[], max_length=MOST_LINKS)
    """Figures that were measured, over those described."""

    @property
    def devices(self) -> tuple[str, ...]:
        """All devices, host by host."""
        return tuple(device for host in self.hosts for device in host.devices)

    @property
    def cpus(self) -> tuple[str, ...]:
        """CPUs that have a name."""
        return tuple(host.cpu for host in self.hosts if host.cpu is not None)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Every name that a link may end at."""
        return (*self.devices, *self.cpus, *self.servers, *(switch.name for switch in self.switches))

    def every_link(self) -> Iterator[Link]:
        """The direct links, and one for each port of each switch (half of its latency)."""
        yield from self.links
        for switch in self.switches:
            for end in switch.joins:
                yield Link(
                    between=[end, switch.name],
                    bandwidth=switch.bandwidth,
                    latency=switch.latency / 2,
                    lanes=switch.lanes,
                    duplex=switch.duplex,
                )


def _breaches(machine: Machine) -> Iterator[Problem]:
    """What only the whole shows."""
    names = Counter(machine.nodes)
    for name, count in names.items():
        if count > 1:
            yield Problem(
                "", None, f"the name {name} stands for {count} things", "give each device, CPU, server and switch a name of its own"
            )
    if not 2 <= len(machine.devices) <= MOST_DEVICES:
        yield Problem(
            "hosts", None, f"{len(machine.devices)} devices in all, must be 2..{MOST_DEVICES}", "describe the devices that hold a gradient"
        )
    ends = [(f"links[{i}].between", link.between) for i, link in enumerate(machine.links)]
    ends += [(f"measured[{i}].between", given.between) for i, given in enumerate(machine.measured)]
    ends += [(f"switches[{i}].joins", [*switch.joins]) for i, switch in enumerate(machine.switches)]
    for field, given in ends:
        for end in given:
            if end not in names:
                near = difflib.get_close_matches(end, names, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(list(names)[:8])}"
                yield Problem(field, end, "names nothing of this machine", hint)
        if len(set(given)) < len(given):
            yield Problem(field, None, f"names {next(end for end in given if given.count(end) > 1)} twice", "name each end once")
    twins = Counter(frozenset(link.between) for link in machine.every_link() if len(set(link.between)) == 2)
    for pair, count in twins.items():
        if count > 1:
            yield Problem("links", None, f"{count} links between {' and '.join(sorted(pair))}", "write one link with `lanes`")
    for i, host in enumerate(machine.hosts):
        lanes = sum(link.lanes for link in machine.every_link() if host.cpu in link.between)
        if host.cpu_lanes is not None and lanes > host.cpu_lanes:
            limit = f"its links have {lanes} lanes together, the CPU has {host.cpu_lanes}"
            yield Problem(f"hosts[{i}].cpuLanes", host.cpu_lanes, limit, "describe the switch between the CPU and its devices")


def finding_in_words(detail: ErrorDetails, page: str, whole: str) -> Problem:
    """Pydantic's finding in the words of psjob. `page` has the fields; `whole`: how to have a file in which none is missing."""
    path = field_path(detail["loc"])
    match detail["type"]:
        case "missing":
            return Problem(path, None, "Required value", whole)
        case "extra_forbidden":
            return Problem(path, None, "unknown field", f"see {page} for the fields")
        case "model_type" | "dict_type":
            return Problem(path, detail["input"], "must be an object", f"see {page} for an example")
        case "literal_error":
            return Problem(path, None, f"Unsupported value: {shown(detail['input'])}: supported values: {detail['ctx']['expected']}")
        case "string_pattern_mismatch":
            return Problem(path, detail["input"], "must be a name of letters, digits, '.', '_' and '-', at most 63 long")
        case _:
            return Problem(path, detail["input"], detail["msg"][:1].lower() + detail["msg"][1:])


Flow = tuple[str, str]
Resource = tuple[str, str, str]
"""What flows share: one direction of a link, a half-duplex link, or a measured pair."""


@dataclass(frozen=True)
class Route:
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
        self._ways: dict[str, dict[str, Route]] = {}

    def pace(self, flows: Sequence[Flow]) -> Pace:
        """Of `flows` that all go at once and end together, so that the slowest one holds. Raises NoWay."""
        ways = [self.way(*flow) for flow in flows]
        load = Counter(resource for way in ways for resource in way.resources)
        rate = min(self._room[resource] / count for resource, count in load.items())
        if self.machine.total is not None:
            rate = min(rate, self.machine.total / len(flows))
        return Pace(rate, max(way.latency for way in ways))

    def way(self, source: str, target: str) -> Route:
        """From one end to another. Raises NoWay."""
        if source not in self._ways:
            self._ways[source] = self._from(source)
        try:
            return self._ways[source][target]
        except KeyError:
            raise NoWay(f"nothing joins {source} and {target}; describe the link or the switch between them") from None

    def width(self, source: str, target: str) -> float:
        """Bytes per second of one flow without others."""
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
        """Raises NoWay if two of `ends` are not joined, or where more was measured between two than the links on their way pass."""
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

    def _from(self, source: str) -> dict[str, Route]:
        """Breadth first; among ways of as many links the widest, then the quickest."""
        best: dict[str, tuple[float, float, Route]] = {source: (float("inf"), 0.0, Route((), 0.0))}
        edge = [source]
        while edge:
            found: dict[str, tuple[float, float, Route]] = {}
            for at in edge:
                width, delay, way = best[at]
                for other in self._near[at]:
                    if other in best:
                        continue
                    key, room, latency = self._step(at, other)
                    reached = (min(width, room), delay - latency, Route((*way.resources, key), way.latency + latency))
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

    def _held(self, source: str, target: str, way: Route) -> Route:
        """`way`, and what was measured between two ends that have no link of their own."""
        pair = frozenset((source, target))
        if pair not in self._bound or pair in self._links:
            return way
        bandwidth, latency = self._bound[pair]
        key = (source, target, "measured")
        self._room[key] = bandwidth
        return Route((*way.resources, key), way.latency if latency is None else latency)


Described = dict[str, Any]


def d2l(workers: int, servers: int) -> list[Described]:
    """The founding text's two machines: four GPUs on a PCIe switch, and eight V100 with NVLink."""
    gpus = [f"gpu{i}" for i in range(1, 5)]
    pcie: Described = {
        "name": "d2l-4-gpus-pcie",
        "hosts": [{"name": "server", "devices": gpus, "cpu": "cpu", "cpuLanes": 24}],
        "switches": [{"name": "switch", "joins": gpus, "bandwidth": "pcie3-x16"}],
        "links": [{"between": ["cpu", "switch"], "bandwidth": "pcie3-lane", "lanes": 16}],
    }
    return [pcie, *dgx1(workers, servers)]


def dgx1(workers: int, servers: int) -> list[Described]:
    """Eight V100, six NVLinks each, in the text's numbers: a ring of double links and a ring of single ones."""
    gpus = [str(i) for i in range(1, 9)]
    links = [
        {"between": [str(one), str(other)], "bandwidth": "nvlink-lane", "lanes": lanes}
        for lanes, ring in ((2, DOUBLE_LINKS), (1, SINGLE_LINKS))
        for one, other in zip(ring, ring[1:] + ring[:1], strict=True)
    ]
    pcie = {"name": "pcie", "joins": [*gpus, "cpu"], "bandwidth": "pcie3-x16"}
    return [{"name": "8-v100-nvlink", "hosts": [{"name": "server", "devices": gpus, "cpu": "cpu"}], "switches": [pcie], "links": links}]


DOUBLE_LINKS = (1, 2, 3, 4, 5, 6, 7, 8)
SINGLE_LINKS = (1, 4, 6, 3, 5, 8, 2, 7)


def _ethernet(figure: str) -> Callable[[int, int], list[Described]]:
    def made(workers: int, servers: int) -> list[Described]:
        hosts = [f"w{i}" for i in range(workers)]
        shards = [f"ps{i}" for i in range(servers)]
        switch = {"name": "switch", "joins": [*hosts, *shards], "bandwidth": figure}
        return [{"name": f"{workers}-hosts-{figure}", "hosts": hosts, "servers": shards, "switches": [switch]}]

    return made


PRESETS: Mapping[str, Callable[[int, int], list[Described]]] = {
    "d2l": d2l,
    "dgx1": dgx1,
    "ethernet-1": _ethernet("ethernet-1"),
    "ethernet-10": _ethernet("ethernet-10"),
    "ethernet-100": _ethernet("ethernet-100"),
}
"""Each takes the number of worker hosts and of servers; the founding text's machines are as large as they are."""
