"""A machine, described: hosts with their devices, switches, servers, and the links between them."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from psjob_client.topology import units
from psjob_client.topology.figures import FIGURES, Figure
from psjob_operator.api.base import Model
from psjob_operator.api.problem import Problem, field_path, shown

MOST_DEVICES = 128
MOST_LINKS = 20_000
FIGURES_KEY = "figures"
"""In the context of a validation: the figures that names of links stand for."""


def read_machine(raw: Any, figures: Mapping[str, Figure] = FIGURES) -> tuple[Machine | None, list[Problem]]:
    """The machine that `raw` describes, or every problem found (never both; never an exception). A bandwidth may be a figure's name."""
    try:
        machine = Machine.model_validate(raw, context={FIGURES_KEY: figures})
    except ValidationError as error:
        return None, [_told(detail) for detail in error.errors(include_url=False)]
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
Rate = Annotated[float, _from(units.rate)]
Seconds = Annotated[float, _from(units.seconds)]


class _Way(Model):
    bandwidth: Rate
    """Bytes a second of each lane and direction: 16GB/s, 10Gb/s, or the name of a figure such as pcie3-x16."""
    latency: Seconds = 0.0
    """Of one message: 50us. With a figure's name for the bandwidth: that figure's."""
    lanes: int = Field(default=1, ge=1, le=1024)
    """So many beside each other; rings that share no lane are looked for among direct links."""
    duplex: Literal["full", "half"] = "full"
    """half: what goes one way takes from the other."""

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
    """Its name; a host of one device is its name alone, and the device is called the same."""
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


class Measured(Model):
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
    measured: list[Measured] = Field(default=[], max_length=MOST_LINKS)
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


def _told(detail: ErrorDetails) -> Problem:
    """Pydantic's finding in the words of psjob."""
    path = field_path(detail["loc"])
    match detail["type"]:
        case "missing":
            return Problem(path, None, "Required value", "see `psjob plan-topology --help` for an example")
        case "extra_forbidden":
            return Problem(path, None, "unknown field", "see docs/topology.md for the fields")
        case "model_type" | "dict_type":
            return Problem(path, detail["input"], "must be an object", "see docs/topology.md for an example")
        case "literal_error":
            return Problem(path, None, f"Unsupported value: {shown(detail['input'])}: supported values: {detail['ctx']['expected']}")
        case "string_pattern_mismatch":
            return Problem(path, detail["input"], "must be a name of letters, digits, '.', '_' and '-', at most 63 long")
        case _:
            return Problem(path, detail["input"], detail["msg"][:1].lower() + detail["msg"][1:])
