"""A worker's process: the shipped machine of its session, and a script that makes its steps on virtual time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from psjob.protocol.worker import events as e
from psjob.protocol.worker.machine import WorkerEnding, WorkerMachine
from psjob.wire.frame import Flag, Header, Kind
from psjob.worker.exits import EXIT_OF
from tests.simulation.protocol.kernel import Process
from tests.simulation.protocol.link import SimLink
from tests.simulation.protocol.network import End
from tests.simulation.protocol.promises import gradient, make_record, read_record

if TYPE_CHECKING:
    from tests.simulation.protocol.world import World

TICK = 0.5
SMALL_RECORD = 64 << 10
Script = Generator[float | Callable[[], bool], None, None]


class TurnEnds(Exception):
    """The script's turn is over."""


class SimWorker(Process):
    """One start of a worker's pod. A rewind begins again in the same pod, with `rewinds` one higher."""

    def __init__(self, world: World, rank: int, start: int) -> None:
        super().__init__(world.kernel, f"worker-{rank}-s{start}")
        self.world, self.rank, self.number, self.rewinds = world, rank, start, 0
        self.mode = world.mode_of(world.planner.mode)
        self.links: list[SimLink] = []
        self.life = 0
        self.dies_in: int | None = None
        """It is killed in its next push, after so many parts of that."""
        self._stopping = False
        self._begin(world.plan.starts)

    # -- a life: from one exec to the next -----------------------------------------------------------

    def _begin(self, seconds: float) -> None:
        self.life += 1
        for link in self.links:
            link.close()
        shards = [f"shard {index}" for index in range(self.world.plan.shards)]
        self.machine = WorkerMachine(self.rank, self.mode, False, shards, 600.0)
        self.machine.stop_requested = self._stopping
        self.links = [SimLink(self, index) for index in range(len(shards))]
        self.cursor = 0
        """Batches that the script has taken."""
        self.model: dict[int, int] = {}
        self.versions: dict[int, tuple[int, int]] = {}
        self.values: dict[int, int] = {}
        """What the pushes of the clock in hand bring."""
        self.turns: deque[tuple[int, dict[int, int]]] = deque()
        """With a delay: clocks and what their pushes bring, that are not answered. The first is under way."""
        self.landing: dict[int, int] = {}
        self.done = self.taken = 0
        """Clocks whose answers have come, and whose answers the model is."""
        self.kept: dict[int, bytes] = {}
        """Large records of the last step boundaries, by clock."""
        self._pumps = False
        self._waits: Callable[[], bool] | None = None
        self._script: Script | None = None
        self.after(seconds * (0.5 + self.kernel.random.random()), self._up, self.life)

    def _up(self, life: int) -> None:
        if life == self.life:
            self._script = self._run()
            self.after(TICK, self._tick, life)
            self._go(life)

    def _tick(self, life: int) -> None:
        if life != self.life:
            return
        self.after(TICK, self._tick, life)
        now = self.clock()
        for link in self.links:
            link.tick(now)
        self.handle(e.Tick())

    def _go(self, life: int) -> None:
        """The script continues."""
        if life != self.life or self._script is None:
            return
        self._waits = None
        try:
            asked = next(self._script)
        except TurnEnds:
            assert self.machine.ending is not None
            self._over(self.machine.ending)
            return
        if callable(asked):
            self._waits = asked
            self.poke()
        else:
            self.after(asked, self._go, life)

    def poke(self) -> None:
        """Something has changed: what the script waits for may be there."""
        self._turn_over()
        if self._waits is not None and (self.machine.ending is not None or self._waits()):
            self._waits = None
            self.kernel.after(0.0, self.call, self._go, self.life)

    @property
    def over(self) -> bool:
        """This life has ended, or is about to."""
        return self.machine.ending is not None or not self.alive

    def _over(self, end: WorkerEnding) -> None:
        self.trace(f"its turn ends: {end.how} {end.message}")
        if end.how == "rewind":
            self.mode = self.world.mode_read(end.message) if end.message else self.mode
            self.rewinds += 1
            self._begin(self.world.plan.starts * 0.5)
            return
        self.world.promises.counts[f"worker {end.how}"] += 1
        self.end(EXIT_OF[end.how], {"error": end.message} if end.how == "refused" else None)
        self.world.network.killed(self, silently=False)

    # -- the machine ---------------------------------------------------------------------------------

    def handle(self, event: e.Event) -> None:
        """Let the machine decide what follows, and carry it out."""
        for action in self.machine.handle(event, self.clock()):
            self._carry_out(action)
        self.poke()

    def _carry_out(self, action: e.Action) -> None:
        match action:
            case e.DialShard():
                self.links[action.link].dial(action.seconds)
            case e.Send():
                self.links[action.link].send(self.header(action.kind, clock=action.clock, request=action.request), action.body or {})
            case e.SendRecord():
                self.links[0].send_record(self.header(Kind.RECORD, clock=action.clock), action.record)
            case e.SendPieces():
                if not self._pumps:
                    self._pumps = True
                    self._pump(self.life)
            case e.Resend():
                self.links[action.link].send(action.header)
            case e.Log():
                self.trace(action.text)

    def _pump(self, life: int) -> None:
        """Send pieces of records, as a thread of its own does."""
        if life != self.life or self.machine.records.through or self.over:
            self._pumps = False
            return
        piece = self.machine.next_piece(self.clock())
        if piece is None:
            self.after(0.05, self._pump, life)
            return
        clock, crc, size = piece.record
        header = self.header(Kind.RECORD_PIECE, clock=clock, part=piece.offset, version=(crc, size))
        self.links[0].send(header, bytes(piece.data), len(piece.data))
        self.after(0.001, self._pump, life)

    # -- the script ----------------------------------------------------------------------------------

    def _run(self) -> Script:
        plan = self.world.plan
        yield from self._join()
        while self.machine.clock < plan.steps[self.rank]:
            yield from self._edge()
            yield plan.step_seconds * (0.3 + 1.4 * self.kernel.random.random())
            yield from self._push()
        if self.turns:
            yield from self._wait(lambda: not self.turns, "the shards' answer")
        self._hand_in_kept()
        self.handle(e.Through(self._record()))
        yield from self._wait(lambda: False, "the checkpoint that holds this worker's end")

    def check(self) -> None:
        """Raise the ending that was noted."""
        if self.machine.ending is not None:
            raise TurnEnds

    def _wait(self, done: Callable[[], bool], what: str) -> Script:
        self.check()
        if done():
            return
        self.machine.begin_wait(what, None, self.clock())
        yield done
        self.machine.end_wait()
        self.check()

    def _join(self) -> Script:
        machine = self.machine
        self.handle(e.JoinAsked())
        yield from self._wait(lambda: machine.joined or machine.init > 0, "the coordinator")
        while not machine.joined:
            yield from self._wait(lambda: machine.welcomed, "all shards")
            asked = machine.init
            for part in self.world.parts():
                self.links[self.world.owner(part)].send(self._of(part, Kind.INIT, Kind.ROW_INIT))
            self.handle(e.FirstValues(make_record(0, 0, 0, self.world.plan.record_bytes)))
            yield from self._wait(lambda: machine.joined or machine.init > asked, "the first checkpoint")  # noqa: B023
        yield from self._wait(lambda: machine.welcomed, "all shards")
        if machine.record is not None:
            self.cursor = read_record(machine.record)[1]
            self.world.promises.resumed(self, machine.record, machine.residual and self.world.plan.residual)
        version = (0, self.mode.version_for(machine.clock - 1))
        behind = self.mode.steady and self.mode.delay and machine.clock > 0
        flags = Flag.BEFORE if behind else Flag.NONE
        yield from self._ask(lambda part: self._of(part, Kind.PULL, Kind.PULL, clock=machine.clock, version=version, flags=flags))
        self.done = self.taken = machine.clock - bool(behind)
        self._pulled()
        if behind:
            self.turns.append((machine.clock - 1, {}))
            self._turn(lambda part: self._of(part, Kind.PULL, Kind.PULL, clock=machine.clock, version=version))

    def _pulled(self) -> None:
        """All parts are at the clock at which this worker stands."""
        if self.mode.delay:
            self.model |= self.landing
        found = [n for _, n in self.versions.values()]
        self.handle(e.Pulled(min(found), max(found)))
        self.check()

    def _of(self, part: int, block: Kind, table: Kind, **fields: Any) -> Header:
        """A frame about a part: a block, or a table's rows on a shard."""
        blocks = self.world.plan.blocks
        if part < blocks:
            return self.header(block, block=part, **fields)
        number = (part - blocks) // self.world.plan.shards
        return self.header(table, table=number, block=blocks + number, **fields)

    def _push(self) -> Script:
        self.check()
        machine, parts = self.machine, self.world.parts()
        model = hash(tuple(self.model[part] for part in parts))
        values = {part: gradient(self.rank, machine.clock, self.cursor, part, model) for part in parts}
        self.cursor += 1
        self.world.promises.stepped(self)
        if self.mode.delay:
            yield from self._push_late(values)
            return
        self.values = values
        yield from self._ask(
            lambda part: self._of(part, Kind.PUSH, Kind.ROW_PUSH, clock=machine.clock, version=self.versions.get(part, (0, 0))),
            self.dies_in,
        )
        machine.clock += 1

    def _ask(self, make: Callable[[int], Header], dies_in: int | None = None) -> Script:
        parts = self.world.parts()
        for link in self.links:
            link.requests.unsent = len(self.world.owned(link.index))
        for part in parts[:dies_in]:
            self.links[self.world.owner(part)].ask(make(part))
        if dies_in is not None:
            self.kill()
            yield 0.0  # nothing follows in a dead process
        yield from self._wait(lambda: not any(link.requests.outstanding for link in self.links), "the shards' answer")

    def _push_late(self, values: dict[int, int]) -> Script:
        """As `Delayed.push`."""
        machine = self.machine
        yield from self._wait(lambda: self.done > machine.clock - self.mode.delay, "the shards' answer")
        if self.done > self.taken:
            self.taken = self.done
            self._pulled()
        self.turns.append((machine.clock, values))
        if len(self.turns) == 1:
            self._turn()
        machine.clock += 1
        self._hand_in_kept()

    def _turn(self, make: Callable[[int], Header] | None = None) -> None:
        """Send the requests of the first turn."""
        clock, self.values = self.turns[0]
        bases = dict(self.versions)
        asked = make or (lambda part: self._of(part, Kind.PUSH, Kind.ROW_PUSH, clock=clock, version=bases.get(part, (0, 0))))
        for link in self.links:
            link.requests.unsent = len(self.world.owned(link.index))
        dies_in = None if make else self.dies_in
        for part in self.world.parts()[:dies_in]:
            self.links[self.world.owner(part)].ask(asked(part))
        if dies_in is not None:
            self.kernel.after(0.0, self.kill)

    def _turn_over(self) -> None:
        """The first turn is answered: the next one begins."""
        if self.turns and not any(link.requests.outstanding or link.requests.unsent for link in self.links):
            self.done = self.turns.popleft()[0] + 1
            if self.turns:
                self._turn()

    def _hand_in_kept(self) -> None:
        record = self.kept.pop(self.machine.snapshot_clock, None)
        if record is not None:
            self.handle(e.SnapshotToldLate(self.machine.snapshot_clock, record, (0, 0)))

    def _record(self) -> bytes:
        return make_record(self.machine.clock, self.cursor, self.machine.clock, self.world.plan.record_bytes)

    def _edge(self) -> Script:
        self.check()
        machine = self.machine
        small = self.world.plan.record_bytes <= SMALL_RECORD
        late = self.mode.delay > 0 and not small
        settled = machine.stands(small or late)
        if settled and self.turns:
            yield from self._wait(lambda: not self.turns, "the shards' answer")
        if late and machine.snapshot_clock < machine.clock:
            self.kept[machine.clock] = self._record()
            for old in sorted(self.kept)[: -1 - self.mode.delay]:
                del self.kept[old]
        record = self._record() if machine.needs_record(small) else None
        self.handle(e.AtStepBoundary(record, settled))
        yield from self._wait(lambda: machine.may_step, "all shards to copy a checkpoint")

    # -- what links ask ------------------------------------------------------------------------------

    def header(self, kind: Kind, **fields: Any) -> Header:
        """A frame's header."""
        return Header(kind, worker=self.rank, start=self.number, rewinds=self.rewinds, term=self.machine.term, **fields)

    def land(self, part: int, header: Header, content: Any) -> None:
        """An answer has come."""
        (self.landing if self.mode.delay else self.model)[part] = content.digest
        self.versions[part] = header.version

    def dial(self, targets: list[Any]) -> End | None:
        """A stream to one of the processes that have a name: of several the one with the highest term and attempt."""
        alive = sorted((target for target in targets if target.alive), key=lambda shard: (shard.first_term, shard.attempt), reverse=True)
        for target in alive:
            ends = self.world.network.connect(self, target)
            if ends is not None:
                target.accept(ends[1])
                return ends[0]
        return None

    # -- the end -------------------------------------------------------------------------------------

    def kill(self) -> None:
        """SIGKILL."""
        if self.alive:
            self.end(137)
            self.world.network.killed(self, silently=False)

    def power_cut(self) -> None:
        """Its host loses power."""
        if self.alive:
            self.end(137)
            self.world.network.killed(self, silently=True)

    def terminate(self) -> None:
        """SIGTERM."""
        self.call(self._terminated)

    def _terminated(self) -> None:
        self._stopping = self.machine.stop_requested = True

    def standing(self) -> str:
        """A few words for who looks at a run that hangs."""
        if not self.alive:
            return f"ended with {self.code}"
        m = self.machine
        links = [(link.state.welcomed, link.state.attempt, len(link.requests.outstanding), link.state.released) for link in self.links]
        flags = f"joined {m.joined} holding {m.holding} standing {m.standing} leaving {m.leaving} through {m.records.through}"
        return f"clock {m.clock} rewinds {self.rewinds} term {m.term} recovery {m.restore_id} {flags} links {links}"
