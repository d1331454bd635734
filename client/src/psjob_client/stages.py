"""What `psjob plan-stages` plans with: the profile of a model and the grid of devices that a described machine is.

A profile is a JSON file with a version, as `psjob plan-stages --save` writes it. `psjob.planning.plan` is what planners read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails

from psjob.planning.plan import Grid, Profile, Wire, profile_of
from psjob_client.topology.choose import Unfit, estimate
from psjob_client.topology.machine import Machine, Routes, finding_in_words
from psjob_operator.api.base import Model
from psjob_operator.api.field_rule import Problem, field_path, shown

FORMAT = 1
MOST_NODES = 2000
MOST_SECONDS = 1e6
MOST_BYTES = 10**15
Seconds = Annotated[float, Field(ge=0, le=MOST_SECONDS, allow_inf_nan=False)]
Bytes = Annotated[int, Field(ge=0, le=MOST_BYTES)]
Position = Annotated[int, Field(ge=0, lt=MOST_NODES)]
SHARED = 0.75
"""An uplink is shared where all devices of a host together get less than this share of what they get one by one."""
PROBE_BYTES = 1e9


class _Output(Model):
    """One tensor that later modules read."""

    bytes: Bytes
    """Of one micro-batch; its gradient has as many."""
    to: list[Position] = Field(min_length=1)
    """Positions of the modules that read it, all after its own. A cut before the last of them sends it."""


class _Node(Model):
    """One module at its place in the order of execution."""

    name: Annotated[str, Field(min_length=1, max_length=500)]
    """As in `named_modules()`, such as layers.6."""
    forward: Seconds
    """Seconds of its forward pass over one micro-batch."""
    backward: Seconds
    """Seconds of its backward pass over one micro-batch."""
    parameters: Bytes = 0
    """Bytes of parameters that it trains and no other module does."""
    fixed: Bytes = 0
    """Bytes of frozen parameters and buffers."""
    saved: Bytes = 0
    """Bytes that it makes and that are kept until its backward pass; neither parameters nor outputs of other modules."""
    outputs: list[_Output] = Field(default=[], max_length=1000)
    """What later modules read."""


class _Tied(Model):
    """Parameters that several modules use, such as an embedding and the last layer."""

    bytes: Bytes
    """Counted once in each stage that has one of `nodes`."""
    nodes: list[Position] = Field(min_length=2)
    """Positions of the modules."""


class ProfileFile(Model):
    """A model, measured with one micro-batch."""

    format: Literal[1]
    """Version of this file format."""
    model: Annotated[str, Field(max_length=500)] = ""
    """For people: the class of the model."""
    device: Annotated[str, Field(max_length=500)] = ""
    """For people: what the times were measured on."""
    estimated: bool = False
    """Times are computed from FLOPs, not measured."""
    samples: int | None = Field(default=None, ge=1)
    """Samples of the micro-batch."""
    input: Bytes = 0
    """Bytes of the model's inputs."""
    nodes: list[_Node] = Field(min_length=1, max_length=MOST_NODES)
    """Modules in the order in which the forward pass reaches them."""
    tied: list[_Tied] = Field(default=[], max_length=MOST_NODES)
    """Parameters of more than one module."""

    def profile(self) -> Profile:
        """What the planners read."""
        return profile_of(self.model_dump())


def read_profile(raw: Any) -> tuple[ProfileFile | None, list[Problem]]:
    """The file that `raw` is, or every problem found (never both; never an exception)."""
    try:
        file = ProfileFile.model_validate(raw)
    except ValidationError as error:
        return None, [_told(detail) for detail in error.errors(include_url=False)]
    problems = list(_breaches(file))
    return (None, problems) if problems else (file, [])


def _breaches(file: ProfileFile) -> Iterator[Problem]:
    """What only the whole shows."""
    last = len(file.nodes) - 1
    names: dict[str, int] = {}
    for i, node in enumerate(file.nodes):
        if node.name in names:
            yield Problem(f"nodes[{i}].name", node.name, f"is the name of nodes[{names[node.name]}] too", "give each module its own name")
        names.setdefault(node.name, i)
        for j, output in enumerate(node.outputs):
            for position in output.to:
                if not i < position <= last:
                    limit = f"must be {i + 1}..{last}, a module after its own" if i < last else "the last module has no later one"
                    yield Problem(f"nodes[{i}].outputs[{j}].to", position, limit, "list modules in order of execution")
    for i, tied in enumerate(file.tied):
        for position in tied.nodes:
            if position > last:
                yield Problem(f"tied[{i}].nodes", position, f"must be 0..{last}", "name positions in `nodes`")
    if not any(node.forward + node.backward for node in file.nodes):
        yield Problem("nodes", None, "no module takes any time", "profile the model again with a larger batch")


def _told(detail: ErrorDetails) -> Problem:
    if detail["type"] == "literal_error":
        limit = f"Unsupported value: {shown(detail['input'])}: this psjob reads format {FORMAT}"
        return Problem(field_path(detail["loc"]), None, limit, "profile again")
    return finding_in_words(detail, "docs/stages.md", "write the file with `psjob plan-stages SCRIPT --save FILE`")


def grid_of(machine: Machine) -> Grid:
    """Raises ValueError if hosts have different numbers of devices, and NoWay where devices are not joined."""
    counts = {len(host.devices) for host in machine.hosts}
    if len(counts) > 1:
        told = " and ".join(str(count) for count in sorted(counts))
        raise ValueError(f"hosts: they have {told} devices; stages are planned for hosts of equally many, so leave the others out")
    each, homes = counts.pop(), [host.devices for host in machine.hosts]
    routes = Routes(machine)
    routes.check((*machine.devices, *machine.servers))
    near = [(one, other) for home in homes for one in home for other in home if one != other]
    far = [(one, other) for a in homes for b in homes if a is not b for one in a for other in b]
    inside, across = _slowest(routes, near), _slowest(routes, far)
    shared = False
    if far and each > 1:
        flows = list(zip(homes[0], homes[1], strict=True))
        shared = routes.pace(flows).bandwidth < SHARED * routes.pace(flows[:1]).bandwidth
    push_byte, push_latency = _updates(routes, inside or across)
    only = inside or across
    assert only is not None
    return Grid(len(homes), each, inside or only, across or only, shared, push_byte, push_latency, machine.devices)


def _slowest(routes: Routes, pairs: list[tuple[str, str]]) -> Wire | None:
    if not pairs:
        return None
    return Wire(min(routes.width(*pair) for pair in pairs), max(routes.way(*pair).latency for pair in pairs))


def _updates(routes: Routes, wire: Wire | None) -> tuple[float, float]:
    """By `ps` of plan-topology; on one host without servers by its CPU's link, else as fast as devices reach each other."""
    for strategy in ("ps", "ps-cpu"):
        try:
            one, two = (estimate(strategy, routes, size).seconds for size in (PROBE_BYTES, 2 * PROBE_BYTES))
        except Unfit:
            continue
        return (two - one) / PROBE_BYTES, max(0.0, 2 * one - two)
    assert wire is not None
    return 2 / wire.bandwidth, 2 * wire.latency
