"""Faults: what they do to a world, and how long. A plan names each with plain values, so that it can be printed, dropped and replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulation.protocol.world import World

MEGABIT = 125_000.0
"""Bytes a second of a link of 1 Mbit/s."""
ILL_TIMES = 3.0
"""A disk is ill for longer than other faults last: a snapshot is tried again each few seconds, and many tries shall fail in a row."""


@dataclass(frozen=True)
class Fault:
    """`kind` at virtual time `at`, or `at` seconds after the `nth` time that the job comes into `phase`; `seconds` is how long it lasts.

    `who` and `other` are pods by role and index; `pick` chooses among variants.
    """

    kind: str
    at: float
    seconds: float
    who: tuple[str, int]
    other: tuple[str, int]
    pick: float
    phase: str | None = None
    nth: int = 1

    def __str__(self) -> str:
        when = f"at {self.at:.2f} s" if self.phase is None else f"{self.at:.2f} s into {self.phase} (time {self.nth})"
        return f"{self.kind} of {self.who[0]} {self.who[1]} (other: {self.other[0]} {self.other[1]}) {when}, {self.seconds:.1f} s"


def strike(world: World, fault: Fault) -> None:
    """Let the fault happen."""
    if world.planner.complete:
        return
    world.met(fault.kind)
    world.kernel.trace("FAULT", str(fault))
    (NAMED.get(fault.kind) or KINDS[fault.kind])(world, fault)


def _target(world: World, fault: Fault) -> Any:
    return world.seat(fault.who)


def _kill(world: World, fault: Fault) -> None:
    """At once, or (a worker) in the middle of its next push."""
    process = _target(world, fault)
    if fault.who[0] == "worker" and fault.pick > 0.5:
        process.dies_in = int(fault.pick * 1000) % len(world.parts())
    else:
        process.kill()


def _kill_all_shards(world: World, fault: Fault) -> None:
    for shard in list(world.shards.values()):
        shard.kill()


def _power(world: World, fault: Fault) -> None:
    _target(world, fault).power_cut()


def _power_all(world: World, fault: Fault) -> None:
    for process in [*world.shards.values(), *world.workers.values()]:
        process.power_cut()


def _freeze(world: World, fault: Fault) -> None:
    process = _target(world, fault)
    process.freeze()
    world.until(fault.seconds, process.thaw)


def _jump(world: World, fault: Fault) -> None:
    process = _target(world, fault)
    process.jump += fault.seconds
    process.wall_jump += fault.seconds * (1 if fault.pick < 0.5 else -3)


def _break(world: World, fault: Fault) -> None:
    """Streams between two processes end, in one of several ways, perhaps again and again."""

    def once() -> None:
        one, other = _target(world, fault), world.seat(fault.other)
        for end in [end for end in world.network.open if end.owner is one and (end.peer.owner is other or fault.pick > 0.7)]:
            told, lingers = int(fault.pick * 100) % 2 == 0, fault.seconds * 0.1 if int(fault.pick * 1000) % 2 else 0.0
            world.network.break_stream(end, told, lingers)

    once()
    for again in range(int(fault.pick * 10_000) % 4):
        world.until(0.3 * (again + 1), once)


def _wall(world: World, fault: Fault, wall: Callable[[str, str], bool]) -> None:
    number = world.number()
    world.network.walls[number] = wall
    world.until(fault.seconds, world.network.heal, number)


def _partition(world: World, fault: Fault) -> None:
    """A process and some others, or all, do not hear each other; or one direction alone is deaf."""
    one, other = _target(world, fault).pod, world.seat(fault.other).pod
    if fault.pick < 0.35:
        _wall(world, fault, lambda a, b: one in (a, b))
    elif fault.pick < 0.6:
        _wall(world, fault, lambda a, b: (a, b) in ((one, other), (other, one)))
    elif fault.pick < 0.8:
        _wall(world, fault, lambda a, b: a == one)
    else:
        _wall(world, fault, lambda a, b: (a, b) == (one, other))


def _slow_link(world: World, fault: Fault) -> None:
    one = _target(world, fault).pod
    others = [world.seat(fault.other).pod] if fault.pick < 0.5 else [p.pod for p in (*world.shards.values(), *world.workers.values())]
    pairs = [pair for other in others for pair in ((one, other), (other, one))]
    delay = 0.2 if int(fault.pick * 1000) % 2 else 0.005
    for pair in pairs:
        world.network.slow[pair] = (delay, MEGABIT)

    def over() -> None:
        for pair in pairs:
            world.network.slow.pop(pair, None)

    world.until(fault.seconds, over)


def _slow_disk(world: World, fault: Fault) -> None:
    pod = _target(world, fault).pod if fault.pick < 0.5 else "*"
    world.volume.slow[pod] = 4.0 + fault.pick * 60
    world.until(fault.seconds, world.volume.slow.pop, pod, None)


def _full(world: World, fault: Fault) -> None:
    world.volume.room = int(world.volume.used + fault.pick * world.plan.shard_bytes)

    def over() -> None:
        world.volume.room = None

    world.until(fault.seconds, over)


def _ill_disk(world: World, fault: Fault) -> None:
    pod = _target(world, fault).pod if fault.pick < 0.6 else "*"
    operations = ("write", "sync", "rename", "folder", "read", "list", "unlink", "create")
    world.volume.ill[pod] = {operations[int(fault.pick * 1000) % len(operations)]}
    world.until(fault.seconds * ILL_TIMES, world.volume.ill.pop, pod, None)


def _zombie(world: World, fault: Fault) -> None:
    """The kubelet of a pod is cut off: a successor is started while it continues, behind a wall or beside it, asleep or awake."""
    process = _target(world, fault)
    world.planner.cut_off.add(process.pod)
    if fault.pick < 0.3:
        process.freeze()
        world.until(fault.seconds, process.thaw)
    elif fault.pick < 0.7:
        one = process.pod
        _wall(world, fault, lambda a, b: one in (a, b))
    world.until(fault.seconds + 15.0 * fault.pick, process.kill)


def _replace(world: World, fault: Fault) -> None:
    """An old observation says that a healthy process is gone; its pod is ended a little later than its successor is started."""
    process = _target(world, fault)
    world.planner.cut_off.add(process.pod)
    world.until(1.0 + fault.pick * 3, process.kill)


def _away(world: World, fault: Fault) -> None:
    world.planner.away_until = world.kernel.now + fault.seconds
    world.until(fault.seconds, lambda: None)


def _suspend(world: World, fault: Fault) -> None:
    world.planner.suspend()
    world.until(30.0 + fault.seconds, world.planner.resume)


def _drain(world: World, fault: Fault) -> None:
    _target(world, fault).terminate()


def _switch(world: World, fault: Fault) -> None:
    others = [mode for mode in ("sync", "bounded", "async") if mode != world.planner.mode]
    if world.planner.mode in ("sync", "bounded", "async"):
        world.switched = True
        world.planner.mode = others[int(fault.pick * 1000) % len(others)]


def _crash(world: World, fault: Fault) -> None:
    """Once, or again and again."""
    _target(world, fault).crash()
    for again in range(int(fault.pick * 10_000) % 3):
        world.until(0.4 * fault.pick * (again + 1), lambda: world.seat(fault.who).crash())


def _ask(world: World, fault: Fault) -> None:
    """No fault: somebody writes the next checkpoint.request."""
    world.planner.request += 1


NAMED: dict[str, Callable[[World, Fault], None]] = {"crash": _crash, "ask": _ask}
"""Those that are not drawn among the others."""
KINDS: dict[str, Callable[[World, Fault], None]] = {
    "kill": _kill,
    "kill-all-shards": _kill_all_shards,
    "power-cut": _power,
    "power-cut-all": _power_all,
    "freeze": _freeze,
    "clock-jump": _jump,
    "break": _break,
    "partition": _partition,
    "slow-link": _slow_link,
    "slow-disk": _slow_disk,
    "disk-full": _full,
    "disk-error": _ill_disk,
    "zombie": _zombie,
    "replace": _replace,
    "planner-away": _away,
    "suspend": _suspend,
    "drain": _drain,
    "switch": _switch,
}
WEIGHTS = {"kill": 5, "break": 3, "partition": 3, "freeze": 2, "power-cut": 2, "zombie": 2}
SHARDS_ONLY = ("slow-disk", "disk-error", "zombie", "replace")


def draw(random: Random, shards: int, workers: int, until: float, phases: tuple[str, ...]) -> Fault:
    """A fault by chance."""
    kind = random.choices(list(KINDS), [WEIGHTS.get(kind, 1) for kind in KINDS])[0]

    def seat(shard: float) -> tuple[str, int]:
        if random.random() < shard:
            return ("shard", 0 if random.random() < 0.35 else random.randrange(shards))
        return ("worker", random.randrange(workers))

    who = seat(0.85 if kind in SHARDS_ONLY else 0.6)
    phase = random.choice(phases) if random.random() < 0.6 else None
    at = random.uniform(0.0, until) if phase is None else random.choice((0.0, random.uniform(0.0, 0.05), random.uniform(0.0, 2.0)))
    seconds = random.choice((random.uniform(0.05, 1.5), random.uniform(1.0, 8.0), random.uniform(8.0, 30.0)))
    return Fault(kind, at, seconds, who, seat(0.5), random.random(), phase, random.choice((1, 1, 1, 2, 3)))


def draw_crash(random: Random, shards: int, until: float, phases: tuple[str, ...]) -> Fault:
    """A crash of a shard's process by chance, shard 0's in half of them."""
    drawn = draw(random, shards, 1, until, phases)
    return replace(drawn, kind="crash", who=("shard", 0 if random.random() < 0.5 else random.randrange(shards)))
