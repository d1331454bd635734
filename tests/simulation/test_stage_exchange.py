"""Stages exchange micro-batches while any process is lost at any moment and links break: each step has what it needs, once.

Of the shards there is as much as says where a worker is placed, and of the coordinator that it lets all go back.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from psjob.modes.stages import Stages
from psjob.pipeline.order import Direction, StageWork, without_flush
from psjob.protocol.stage.exchange import Action, AllBack, Give, Key, SayStands, StageExchange
from psjob.wire.frame import Kind, WireError

Value = tuple[object, ...]
Message = Give[Value] | SayStands
STEPS = 4


@dataclass
class Process:
    """One life of a worker."""

    rank: int
    life: int
    exchange: StageExchange[Value]
    work: list[StageWork]
    weights: int
    """The version that it works with."""
    done: int = 0
    pushed: bool = False
    began: bool = False
    met: set[int] = field(default_factory=set)
    """Neighbours that have spoken on the link of now."""


@dataclass
class World:
    """Workers, the links between them, and of the shards how far each stage's blocks are."""

    stages: Stages
    microbatches: int
    chance: random.Random
    versions: list[int] = field(default_factory=list)
    pushes: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    """By stage and step, who has pushed."""
    processes: dict[int, Process] = field(default_factory=dict)
    lives: dict[int, int] = field(default_factory=dict)
    wires: dict[tuple[int, int], deque[Message]] = field(default_factory=dict)
    """By sender and receiver, what is under way on the link that they have."""
    most_held: int = 0
    saved: int = 0
    """The step of the last checkpoint."""
    backs: int = 0
    """How often all went back."""

    def __post_init__(self) -> None:
        self.versions = [0] * len(self.stages.replicas)
        for rank in range(self.stages.workers):
            self.start(rank)

    def start(self, rank: int) -> None:
        stage = self.stages.of(rank)
        assert stage is not None
        self.lives[rank] = self.lives.get(rank, 0) + 1
        replica = rank - self.stages.ranks(stage).start
        work = without_flush(stage, self.stages.replicas, self.microbatches, replica)
        version = self.versions[stage]
        self.processes[rank] = Process(rank, self.lives[rank], StageExchange(self.stages, rank, version), work, version)

    def over(self) -> bool:
        return all(version == STEPS for version in self.versions)

    # -- what may happen next ----------------------------------------------------------------------

    def moves(self) -> list[tuple[str, int, int]]:
        found = [("work", rank, 0) for rank, process in self.processes.items() if self.ready(process)]
        found += [("deliver", *pair) for pair, queue in self.wires.items() if queue]
        for rank in range(self.stages.workers):
            if rank not in self.processes:
                found.append(("start", rank, 0))
            for other in self.stages.neighbours(rank):
                if rank < other and rank in self.processes and other in self.processes and (rank, other) not in self.wires:
                    found.append(("link", rank, other))
        return found

    def ready(self, process: Process) -> bool:
        exchange = process.exchange
        if process.pushed:
            return self.versions[exchange.stage] > exchange.step and exchange.step + 1 < STEPS
        if exchange.step >= STEPS:
            return False
        if not process.began or process.done == len(process.work):
            return True
        work = process.work[process.done]
        wanted = self.wanted(exchange, work)
        return wanted is None or exchange.has(work.micro, wanted)

    @staticmethod
    def wanted(exchange: StageExchange[Value], work: StageWork) -> Kind | None:
        if work.direction is Direction.FORWARD:
            return Kind.ACTIVATION if exchange.stage else None
        return Kind.GRADIENT if exchange.stage + 1 < len(exchange.stages.replicas) else None

    def move(self, what: str, one: int, other: int) -> None:
        if what == "work":
            self.work(self.processes[one])
        elif what == "deliver":
            self.deliver(one, other)
        elif what == "start":
            self.start(one)
        else:
            self.wires[one, other], self.wires[other, one] = deque(), deque()
            for rank, there in ((one, other), (other, one)):
                self.processes[rank].met.discard(there)
                self.carry_out(rank, [self.processes[rank].exchange.linked_to(there)])

    def work(self, process: Process) -> None:
        exchange = process.exchange
        if process.pushed:
            process.done, process.pushed, process.weights = 0, False, self.versions[exchange.stage]
            self.carry_out(process.rank, exchange.begin(exchange.step + 1, self.microbatches))
        elif not process.began:
            process.began = True
            self.carry_out(process.rank, exchange.begin(exchange.step, self.microbatches))
        elif process.done == len(process.work):
            process.pushed = True
            pushed = self.pushes.setdefault((exchange.stage, exchange.step), set())
            pushed.add(process.rank)
            if pushed == set(self.stages.ranks(exchange.stage)) and self.versions[exchange.stage] == exchange.step:
                self.versions[exchange.stage] += 1
                if len(set(self.versions)) == 1:
                    self.saved = self.versions[0]
        else:
            self.pass_through(process, process.work[process.done])
            process.done += 1

    def pass_through(self, process: Process, work: StageWork) -> None:
        """A forward or a backward, whose value tells what it was made of."""
        exchange, last = process.exchange, len(self.stages.replicas) - 1
        assert process.weights == exchange.step
        wanted = self.wanted(exchange, work)
        came: Value = ("begin",) if wanted is None else exchange.take(work.micro, wanted)
        if wanted is not None:
            from_stage = exchange.stage + (-1 if wanted is Kind.ACTIVATION else 1)
            assert came == (wanted, exchange.step, work.micro, from_stage)
        kind = Kind.ACTIVATION if work.direction is Direction.FORWARD else Kind.GRADIENT
        if exchange.stage != (last if kind is Kind.ACTIVATION else 0):
            self.carry_out(process.rank, exchange.give(work.micro, kind, (kind, exchange.step, work.micro, exchange.stage)))

    def carry_out(self, rank: int, actions: list[Action[Value]]) -> None:
        for action in actions:
            if isinstance(action, AllBack):
                self.all_back()
                return
            if (queue := self.wires.get((rank, action.rank))) is not None:
                queue.append(action)
        self.most_held = max(self.most_held, self.processes[rank].exchange.held)

    def deliver(self, sender: int, receiver: int) -> None:
        message, process = self.wires[sender, receiver].popleft(), self.processes[receiver]
        if isinstance(message, Give):
            process.exchange.came(sender, message.key, message.payload)
        elif sender in process.met:
            process.exchange.stands(sender, message.step)
        else:
            process.met.add(sender)
            self.carry_out(receiver, process.exchange.met(sender, message.step, message.since))

    def all_back(self) -> None:
        """Every process begins again at the last checkpoint."""
        self.backs += 1
        self.wires.clear()
        self.pushes.clear()
        self.versions = [self.saved] * len(self.versions)
        for rank in range(self.stages.workers):
            self.start(rank)

    # -- faults ------------------------------------------------------------------------------------

    def break_link(self, one: int, other: int) -> None:
        for rank, there in ((one, other), (other, one)):
            self.wires.pop((rank, there), None)
            if rank in self.processes:
                self.processes[rank].exchange.lost(there)

    def kill(self, rank: int) -> None:
        del self.processes[rank]
        for other in self.stages.neighbours(rank):
            self.break_link(*sorted((rank, other)))


REPLICAS = [(1, 1), (1, 1, 1, 1), (2, 1), (1, 2), (2, 1, 1), (3, 2), (1, 3, 2), (2, 4)]


def run(seed: int, replicas: tuple[int, ...], microbatches: int, faults: float) -> World:
    world = World(Stages(replicas), microbatches, random.Random(seed))
    for _ in range(20_000):
        if world.over():
            return world
        if world.chance.random() < faults and world.processes:
            world.kill(world.chance.choice(sorted(world.processes)))
        elif world.chance.random() < faults and world.wires:
            one, other = sorted(world.chance.choice(sorted(world.wires)))
            world.break_link(one, other)
        moves = world.moves()
        assert moves, f"all wait at {world.versions}"
        world.move(*world.chance.choice(moves))
    raise AssertionError(f"no end in sight at {world.versions}")


@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_every_step_has_what_it_needs(replicas: tuple[int, ...], microbatches: int) -> None:
    for seed in range(12):
        world = run(seed, replicas, microbatches, faults=0.01 if seed % 3 else 0.0)
        assert world.most_held <= 4 * 2 * microbatches, "two steps, from and to two neighbours"


def test_all_go_back_only_where_two_neighbours_are_lost() -> None:
    assert all(run(seed, (1, 1, 1), 2, faults=0.0).backs == 0 for seed in range(20))
    assert any(run(seed, (1, 1, 1), 2, faults=0.03).backs for seed in range(60))


@pytest.mark.soak
def test_every_step_has_what_it_needs_over_many_seeds() -> None:
    for seed in range(2000):
        run(seed, REPLICAS[seed % len(REPLICAS)], 1 + seed % 6, faults=0.02)


def test_a_frame_that_comes_twice_is_taken_once() -> None:
    exchange: StageExchange[str] = StageExchange(Stages((1, 1)), 1, 3)
    key = Key(3, 0, Kind.ACTIVATION)
    assert exchange.came(0, key, "a") and not exchange.came(0, key, "b")
    assert exchange.take(0, Kind.ACTIVATION) == "a"
    assert not exchange.came(0, key, "c") and not exchange.has(0, Kind.ACTIVATION)
    assert not exchange.came(0, Key(2, 0, Kind.ACTIVATION), "of a step that is over")
    assert exchange.came(0, Key(4, 0, Kind.ACTIVATION), "of the next step")
    exchange.begin(4, 1)
    assert exchange.take(0, Kind.ACTIVATION) == "of the next step"


@pytest.mark.parametrize(
    ("rank", "key"),
    [
        (0, Key(3, 0, Kind.GRADIENT)),
        (2, Key(3, 0, Kind.ACTIVATION)),
        (1, Key(3, 0, Kind.ACTIVATION)),
        (0, Key(5, 0, Kind.ACTIVATION)),
        (0, Key(3, 1024, Kind.ACTIVATION)),
    ],
)
def test_what_a_neighbour_cannot_give_is_refused(rank: int, key: Key) -> None:
    exchange: StageExchange[str] = StageExchange(Stages((2, 1)), 2, 3)
    with pytest.raises(WireError):
        exchange.came(rank, key, "a")


def test_what_was_given_is_held_until_the_neighbour_stands_further() -> None:
    exchange: StageExchange[str] = StageExchange(Stages((1, 1)), 0, 0)
    assert exchange.give(0, Kind.ACTIVATION, "a") == []
    assert exchange.linked_to(1) == SayStands(1, 0, 0)
    assert exchange.met(1, 0, 0) == [SayStands(1, 0, 0), Give(1, Key(0, 0, Kind.ACTIVATION), "a")]
    assert exchange.begin(1, 1) == [SayStands(1, 1, 0)] and exchange.held == 1
    exchange.lost(1)
    assert exchange.linked_to(1) == SayStands(1, 1, 0)
    assert exchange.met(1, 0, 0) == [SayStands(1, 1, 0), Give(1, Key(0, 0, Kind.ACTIVATION), "a")]
    exchange.stands(1, 1)
    assert exchange.held == 0


@pytest.mark.parametrize("came", [False, True])
def test_what_a_lost_process_alone_had_lets_all_go_back(came: bool) -> None:
    """Its successor has joined at the next step, with other weights."""
    exchange: StageExchange[str] = StageExchange(Stages((1, 1)), 0, 0)
    exchange.begin(0, 1)
    if came:
        exchange.came(1, Key(0, 0, Kind.GRADIENT), "g")
    assert exchange.met(1, 1, 1)[1:] == ([] if came else [AllBack(1, 0)])
    assert not came or exchange.begin(1, 1) == []


@pytest.mark.parametrize(
    ("replicas", "neighbours"),
    [
        ((1, 1, 1), [[1], [0, 2], [1]]),
        ((2, 1, 1), [[2], [2], [0, 1, 3], [2]]),
        ((2, 2), [[2], [3], [0], [1]]),
        ((2, 4), [[2, 4], [3, 5], [0], [1], [0], [1]]),
        ((3, 2), [[3, 4], [3, 4], [3, 4], [0, 1, 2], [0, 1, 2]]),
    ],
)
def test_neighbours_are_those_who_share_a_micro_batch(replicas: tuple[int, ...], neighbours: list[list[int]]) -> None:
    stages = Stages(replicas)
    assert [stages.neighbours(rank) for rank in range(stages.workers)] == neighbours
    for rank in range(stages.workers):
        stage = stages.of(rank)
        assert stage is not None
        shared = {
            stages.serving(other, micro)
            for micro in range(60)
            for other in (stage - 1, stage + 1)
            if 0 <= other < len(replicas) and stages.serving(stage, micro) == rank
        }
        assert sorted(shared) == stages.neighbours(rank)
