"""Stages exchange micro-batches while any process is lost at any moment and links break: each step has what it needs, once.

Of the shards there is as much as says where a worker is placed, and of the coordinator that it lets all go back.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import lcm

import pytest

from psjob.modes.stages import Stages
from psjob.pipeline.schedule import Backward, Flush, Forward, FTPipe, PipeDream, StageSchedule, TrainingWay, TwoBW, Update, Work
from psjob.protocol.pipeline import Action, AllBack, Give, Key, SayStands, StageExchange
from psjob.wire.frame import Kind, WireError
from tests.support.goldens import Digest, check

Value = tuple[object, ...]
Message = Give[Value] | SayStands
STEPS = 6


@dataclass(frozen=True)
class Begin:
    """The script is given a batch."""

    batch: int


@dataclass
class Process:
    """One life of a worker."""

    rank: int
    life: int
    exchange: StageExchange[Value]
    schedule: StageSchedule
    microbatches: int
    pushed: bool = False
    taken: dict[int, int] = field(default_factory=dict)
    """By batch, the version that its forwards take."""
    met: set[int] = field(default_factory=set)
    """Neighbours that have spoken on the link of now."""

    def __post_init__(self) -> None:
        self._work = self._all()
        self.piece = next(self._work, None)

    def _all(self) -> Iterator[Work | Begin]:
        for number in range(self.schedule.stepped, STEPS):
            yield Begin(number)
            yield from self.schedule.batch(self.microbatches)
            yield from self.schedule.step()
        yield from self.schedule.drain()

    def go_on(self) -> None:
        self.piece, self.pushed = next(self._work, None), False


@dataclass
class World:
    """Workers, the links between them, and of the shards how far each stage's blocks are."""

    stages: Stages
    microbatches: int
    chance: random.Random
    way: TrainingWay = field(default_factory=Flush)
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
    delays: dict[int, list[int]] = field(default_factory=dict)
    """By rank, of its updates."""

    def __post_init__(self) -> None:
        self.versions = [0] * len(self.stages.replicas)
        self.ahead = 0 if self.way.flushes else self.way.delay(0, self.stages.replicas, self.microbatches) + 1
        for rank in range(self.stages.workers):
            self.start(rank)

    def start(self, rank: int) -> None:
        stage = self.stages.of(rank)
        assert stage is not None
        self.lives[rank] = self.lives.get(rank, 0) + 1
        replica, version = rank - self.stages.ranks(stage).start, self.versions[stage]
        schedule = StageSchedule(self.way, stage, self.stages.replicas, replica, version)
        exchange: StageExchange[Value] = StageExchange(self.stages, rank, version, self.ahead)
        self.processes[rank] = Process(rank, self.lives[rank], exchange, schedule, self.microbatches)

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
        match process.piece:
            case None:
                return False
            case Begin():
                return True
            case Update():
                return not process.pushed or self.versions[process.exchange.stage] > process.piece.batch
        key = self.wanted(process.exchange, process.piece)
        return key is None or process.exchange.has(key)

    @staticmethod
    def wanted(exchange: StageExchange[Value], work: Forward | Backward) -> Key | None:
        if isinstance(work, Forward):
            return Key(work.batch, work.micro, Kind.ACTIVATION) if exchange.stage else None
        return Key(work.batch, work.micro, Kind.GRADIENT) if exchange.stage + 1 < len(exchange.stages.replicas) else None

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
        exchange, piece = process.exchange, process.piece
        match piece:
            case Begin():
                if self.way.flushes:
                    assert process.schedule.updates == piece.batch
                self.carry_out(process.rank, exchange.begin(piece.batch, self.microbatches))
            case Update() if not process.pushed:
                process.pushed = True
                if piece.batch in process.taken:  # not where this worker has no micro-batch of it
                    self.delays.setdefault(process.rank, []).append(piece.batch - process.taken[piece.batch])
                pushed = self.pushes.setdefault((exchange.stage, piece.batch), set())
                pushed.add(process.rank)
                if pushed == set(self.stages.ranks(exchange.stage)) and self.versions[exchange.stage] == piece.batch:
                    self.versions[exchange.stage] += 1
                    self.saved = min(self.versions)
                return
            case Update():
                self.carry_out(process.rank, exchange.stand(piece.batch + 1))
            case Forward() | Backward():
                self.pass_through(process, piece)
        if self.processes.get(process.rank) is process:
            process.go_on()

    def pass_through(self, process: Process, work: Forward | Backward) -> None:
        """A forward or a backward, whose value tells what it was made of."""
        exchange, last, key = process.exchange, len(self.stages.replicas) - 1, self.wanted(process.exchange, work)
        came: Value = ("begin",) if key is None else exchange.take(key)
        if isinstance(work, Forward):
            made = process.schedule.updates
            process.taken.setdefault(work.batch, self.way.version(work.batch, made, made))
        if key is not None:
            from_stage = exchange.stage + (-1 if key.kind is Kind.ACTIVATION else 1)
            assert came == (key.kind, work.batch, work.micro, from_stage)
        kind = Kind.ACTIVATION if isinstance(work, Forward) else Kind.GRADIENT
        if exchange.stage != (last if kind is Kind.ACTIVATION else 0):
            given = (kind, work.batch, work.micro, exchange.stage)
            self.carry_out(process.rank, exchange.give(Key(work.batch, work.micro, kind), given))

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


WAYS: list[TrainingWay] = [Flush(), TwoBW(), PipeDream(), FTPipe()]
REPLICAS = [(1, 1), (1, 1, 1, 1), (2, 1), (1, 2), (2, 1, 1), (3, 2), (1, 3, 2), (2, 4)]


def run(
    seed: int, replicas: tuple[int, ...], microbatches: int, faults: float, way: TrainingWay = WAYS[0], digest: Digest | None = None
) -> World:
    world = World(Stages(replicas), microbatches, random.Random(seed), way)
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
        if digest is not None:
            digest.add(world.versions, world.wires, [process.exchange.held for _, process in sorted(world.processes.items())])
        world.move(*world.chance.choice(moves))
    raise AssertionError(f"no end in sight at {world.versions}")


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_run_of_stages_is_the_recorded_one(way: TrainingWay) -> None:
    digest, replicas = Digest(), (2, 1, 1)
    world = run(7, replicas, even(replicas), 0.03, way, digest)
    digest.add(world.backs, world.delays, world.chance.getstate())
    check(f"stages {way}", digest)


@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_every_step_has_what_it_needs(replicas: tuple[int, ...], microbatches: int) -> None:
    for seed in range(6):
        world = run(seed, replicas, microbatches, faults=0.01 if seed % 3 else 0.0)
        assert world.most_held <= 4 * 2 * microbatches, "two steps, from and to two neighbours"


def test_all_go_back_only_where_two_neighbours_are_lost() -> None:
    assert all(run(seed, (1, 1, 1), 2, faults=0.0).backs == 0 for seed in range(20))
    assert any(run(seed, (1, 1, 1), 2, faults=0.03).backs for seed in range(60))


def even(replicas: tuple[int, ...]) -> int:
    """Micro-batches that suit each way: as many as workers or more, and shared evenly."""
    return lcm(*replicas) * -(-sum(replicas) // lcm(*replicas))


@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("way", WAYS[1:], ids=str)
def test_without_flush_every_step_has_what_it_needs(way: TrainingWay, replicas: tuple[int, ...]) -> None:
    for seed in range(6):
        world = run(seed, replicas, even(replicas), 0.01 if seed % 3 else 0.0, way)
        assert world.most_held <= 4 * (2 + world.ahead) * even(replicas)


@pytest.mark.parametrize("each", [1, 2, 3])
@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_delays_are_those_of_the_formula(way: TrainingWay, replicas: tuple[int, ...], each: int) -> None:
    """In whatever order workers and frames continue."""
    microbatches = each * lcm(*replicas)
    if isinstance(way, TwoBW):
        microbatches = max(microbatches, even(replicas))
    world = run(each, replicas, microbatches, 0.0, way)
    for rank, delays in world.delays.items():
        late = way.delay(world.stages.of(rank) or 0, replicas, microbatches)
        assert delays == [min(number, late) for number in range(STEPS)], rank


@pytest.mark.soak
def test_every_step_has_what_it_needs_over_many_seeds() -> None:
    for seed in range(2000):
        run(seed, REPLICAS[seed % len(REPLICAS)], 1 + seed % 6, faults=0.02)


@pytest.mark.soak
@pytest.mark.parametrize("way", WAYS[1:], ids=str)
def test_without_flush_every_step_has_what_it_needs_over_many_seeds(way: TrainingWay) -> None:
    for seed in range(2000):
        replicas = REPLICAS[seed % len(REPLICAS)]
        run(seed, replicas, even(replicas), 0.02, way)


def test_a_frame_that_comes_twice_is_taken_once() -> None:
    exchange: StageExchange[str] = StageExchange(Stages((1, 1)), 1, 3)
    key = Key(3, 0, Kind.ACTIVATION)
    assert exchange.came(0, key, "a") and not exchange.came(0, key, "b")
    assert exchange.take(key) == "a"
    assert not exchange.came(0, key, "c") and not exchange.has(key)
    assert not exchange.came(0, Key(2, 0, Kind.ACTIVATION), "of a step that is over")
    assert exchange.came(0, Key(4, 0, Kind.ACTIVATION), "of the next step")
    exchange.stand(4)
    assert exchange.take(Key(4, 0, Kind.ACTIVATION)) == "of the next step"


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
    assert exchange.give(Key(0, 0, Kind.ACTIVATION), "a") == []
    assert exchange.linked_to(1) == SayStands(1, 0, 0)
    assert exchange.met(1, 0, 0) == [SayStands(1, 0, 0), Give(1, Key(0, 0, Kind.ACTIVATION), "a")]
    assert exchange.stand(1) == [SayStands(1, 1, 0)] and exchange.held == 1
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
    exchange.stand(1)
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
