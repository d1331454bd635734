"""Profiles, machines and every plan there is, for tests of the planner of stages."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

from psjob.planning.plan import Grid, ModelNode, ModelWork, Output, PipelineWay, Plan, PlannedStage, Profile, Tied, Wire
from psjob.planning.predict import Case, bound_of_plan, fits

MS = 1e-3
FREE = Wire(1e15)


def chain(forward: Sequence[float], sent: int = 0, **more: int) -> Profile:
    """Modules one after another, backward twice as long as forward; `sent` bytes between neighbours."""
    last = len(forward) - 1
    return Profile(
        tuple(
            ModelNode(f"layers.{i}", f, 2 * f, outputs=(Output(sent, (i + 1,)),) if sent and i < last else (), **more)
            for i, f in enumerate(forward)
        )
    )


def flat(devices: int, wire: Wire = FREE, push_byte: float = 0.0) -> Grid:
    """Hosts of one device."""
    return Grid(devices, 1, wire, wire, False, push_byte)


def case(profile: Profile, grid: Grid, way: PipelineWay | str = "flush", memory: float | None = None) -> Case:
    return Case(ModelWork(profile), grid, PipelineWay(way) if isinstance(way, str) else way, memory)


def straight(profile: Profile, *cuts: int) -> Plan:
    """A device a stage."""
    bounds = [0, *cuts, len(profile.nodes)]
    return tuple(PlannedStage(first, end, (k,)) for k, (first, end) in enumerate(itertools.pairwise(bounds)))


def random_profile(chance: random.Random, count: int, *, skips: float = 0.3) -> Profile:
    """Modules of very different sizes, some with connections that skip others, some with tied weights."""
    nodes = []
    for i in range(count):
        outputs = [Output(bytes=chance.choice([10**4, 10**5, 10**6]), to=(i + 1,))] if i + 1 < count else []
        if i + 2 < count and chance.random() < skips:
            outputs.append(Output(bytes=10**5, to=(chance.randrange(i + 2, count),)))
        forward = 1e-5 + chance.random() ** 2 * 1e-2
        nodes.append(
            ModelNode(
                name=f"n{i}", forward=forward, backward=forward * chance.uniform(1, 3), parameters=chance.randrange(10**7),
                saved=chance.randrange(10**7), fixed=chance.choice([0, 10**5]), outputs=tuple(outputs),
            )
        )  # fmt: skip
    tied = (Tied(10**6, (0, count - 1)),) if count > 2 and chance.random() < 0.3 else ()
    return Profile(tuple(nodes), tied, input=10**5)


def random_case(chance: random.Random, profile: Profile, machines: Sequence[tuple[int, int]]) -> Case:
    hosts, each = chance.choice(machines)
    push = chance.choice([1e-10, 2e-9])
    grid = Grid(hosts, each, Wire(1e10, 1e-5), Wire(1e9, 5e-5), chance.random() < 0.5, push, 1e-4)
    way = PipelineWay(chance.choice(["flush", "pipedream", "2bw"]), chance.randrange(1, 9), chance.randrange(1, 5), chance.random() < 0.3)
    return Case(ModelWork(profile), grid, way, chance.choice([None, 6e7, 2e8]))


def layouts(hosts: int, each: int) -> Iterator[list[tuple[int, ...]]]:
    """The devices of each stage: every order of groups of hosts, and of stages on the devices of a group's hosts."""
    for used in range(1, each + 1):
        for groups in _groups(hosts, used):
            found: list[tuple[int, ...]] = []
            host = 0
            for many, inners in groups:
                at = 0
                for inner in inners:
                    found.append(tuple((host + q % many) * each + at + q // many for q in range(many * inner)))
                    at += inner
                host += many
            yield found


def _groups(hosts: int, used: int) -> Iterator[list[tuple[int, list[int]]]]:
    for many in range(1, hosts + 1):
        for inners in _sums(used):
            yield [(many, inners)]
            for rest in _groups(hosts - many, used):
                yield [(many, inners), *rest]


def _sums(total: int) -> Iterator[list[int]]:
    yield [total]
    for first in range(1, total):
        for rest in _sums(total - first):
            yield [first, *rest]


def every_plan(given: Case) -> Iterator[Plan]:
    """All that the dynamic programme may answer and that fit."""
    count = given.work.count
    for devices in layouts(given.grid.hosts, given.grid.each):
        for cuts in itertools.combinations(range(1, count), len(devices) - 1):
            plan = tuple(PlannedStage(*pair, homes) for pair, homes in zip(itertools.pairwise([0, *cuts, count]), devices, strict=True))
            if fits(given, plan):
                yield plan


def every_mixed(given: Case) -> Iterator[Plan]:
    """All ways to put modules on devices that fit."""
    count = given.work.count
    for homes in itertools.product(range(given.grid.count), repeat=count - 1):
        full = (0, *homes)
        firsts = [i for i in range(count) if i == 0 or full[i] != full[i - 1]]
        plan = tuple(PlannedStage(first, end, (full[first],)) for first, end in itertools.pairwise([*firsts, count]))
        if fits(given, plan):
            yield plan


def seconds(given: Case, plan: Plan) -> float:
    return bound_of_plan(given, plan).seconds(given.way)
