"""A worker's process: a script that makes its steps, and a session that finds the shards, joins, marks, rewinds and leaves."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any

from psjob.worker.ending import EXIT_OF, SessionEnd
from psjob.wire.frame import Header, Kind
from tests.simulation.protocol.kernel import Process
from tests.simulation.protocol.link import SimLink
from tests.simulation.protocol.network import End
from tests.simulation.protocol.promises import gradient, make_record, read_record

if TYPE_CHECKING:
    from tests.simulation.protocol.world import World

TICK = 0.5
STOP_SECONDS = 25.0
SMALL_RECORD = 64 << 10
Script = Generator[float | Callable[[], bool], None, None]


class SimWorker(Process):
    """One start of a worker's pod. A rewind begins again in the same pod, with `rewinds` one higher."""

    def __init__(self, world: World, rank: int, start: int) -> None:
        super().__init__(world.kernel, f"worker-{rank}-s{start}")
        self.world, self.rank, self.number, self.rewinds = world, rank, start, 0
        self.mode = world.mode_of(world.planner.mode)
        self.links: list[SimLink] = []
        self.life = 0
        self._stopping = False
        self._begin(world.plan.starts)

    # -- a life: from one exec to the next -----------------------------------------------------------

    def _begin(self, seconds: float) -> None:
        self.life += 1
        for link in self.links:
            link.close()
        plan = self.world.plan
        self.links = [SimLink(self, index) for index in range(plan.shards)]
        self.step = self.view = self.recovery = 0
        self.cursor = 0
        """Batches that the script has taken."""
        self.model: dict[int, int] = {}
        self.versions: dict[int, tuple[int, int]] = {}
        self.record: bytes | None = None
        self.residual = True
        """What the record has of the pushes' leftovers is to be put back."""
        self.cut_clock = -1
        self.mark_wanted = self.holding = self.init = 0
        self.stop_clock: int | None = None
        self.stop_requested = self._stopping
        self.asked_stop = self.leaving = self.joined = False
        self.last_record: tuple[int, bytes | None] = (0, None)
        self.ending: SessionEnd | None = None
        self.values: dict[int, int] = {}
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
        now = self.clock()
        for link in self.links:
            link.tick(now)
        self.after(TICK, self._tick, life)
        self.poke()

    def _go(self, life: int) -> None:
        """The script goes on."""
        if life != self.life or self._script is None:
            return
        self._waits = None
        try:
            asked = next(self._script) if self.ending is None else self._script.throw(self.ending)
        except SessionEnd as end:
            self._over(end)
            return
        except StopIteration:
            raise AssertionError("a script ends by leaving") from None
        if callable(asked):
            self._waits = asked
            self.poke()
        else:
            self.after(asked, self._go, life)

    def poke(self) -> None:
        """Something has changed: what the script waits for may be there."""
        if self._waits is not None and (self.ending is not None or self._waits()):
            self._waits = None
            self.kernel.after(0.0, self.call, self._go, self.life)

    @property
    def over(self) -> bool:
        """This life has ended, or is about to."""
        return self.ending is not None or not self.alive

    def end_session(self, end: SessionEnd) -> None:
        """Note how the script's turn ends."""
        if self.ending is None:
            self.ending = end
            self.poke()

    def _over(self, end: SessionEnd) -> None:
        self.trace(f"its turn ends: {end.how} {end.message if end.how != 'rewind' else ''}")
        if end.how == "rewind":
            if end.message and not end.message.startswith("a "):
                self.mode = self.world.mode_read(end.message)
            self.rewinds += 1
            self._begin(self.world.plan.starts * 0.5)
            return
        self.world.promises.counts[f"worker {end.how}"] += 1
        self.end(EXIT_OF[end.how], {"error": end.message} if end.how == "refused" else None)
        self.world.network.killed(self, silently=False)

    # -- the script ----------------------------------------------------------------------------------

    def _run(self) -> Script:
        plan = self.world.plan
        yield from self._join()
        length = plan.steps[self.rank]
        while self.step < length:
            yield from self._edge()
            yield plan.step_seconds * (0.3 + 1.4 * self.kernel.random.random())
            yield from self._push()
        yield from self._leave()

    def _wait(self, done: Callable[[], bool], seconds: float | None = None) -> Script:
        if self.ending is not None:
            raise self.ending
        if done():
            return
        until = None if seconds is None else self.clock() + seconds

        def ready() -> bool:
            nonlocal until
            if self.stop_requested and not self.asked_stop:
                if not self.joined:
                    self.end_session(SessionEnd("stopped"))
                    return True
                self._ask_stop()
                until = self.clock() + STOP_SECONDS
            return done() or (until is not None and self.clock() > until)

        yield ready
        if not done():
            raise self.ending or SessionEnd("stopped", "waited too long")

    def _join(self) -> Script:
        self.links[0].start()
        yield from self._wait(lambda: self.joined or self.init > 0)
        while not self.joined:
            for link in self.links[1:]:
                link.start()
            yield from self._wait(lambda: all(link.welcomed for link in self.links))
            asked = self.init
            for part in self.world.parts():
                link = self.links[self.world.owner(part)]
                link.send(self.header(Kind.INIT, block=part))
            self.links[0].send(self.header(Kind.RECORD, clock=-1), make_record(0, 0, 0), self.world.plan.record_bytes)
            yield from self._wait(lambda: self.joined or self.init > asked)  # noqa: B023
        for link in self.links[1:]:
            link.start()
        yield from self._wait(lambda: all(link.welcomed for link in self.links))
        if self.record is not None:
            self.cursor = read_record(self.record)[1]
            self.world.promises.resumed(self, self.record, self.residual and self.world.plan.residual)
        version = (0, self.mode.version_for(self.step - 1))
        yield from self._ask(lambda part: self.header(self._kind(part, Kind.PULL, Kind.LOOKUP), block=part, clock=self.step, version=version))
        if self.mode.steady and any(n != self.step for _, n in self.versions.values()):
            raise SessionEnd("rewind", "a block moved on")

    def _kind(self, part: int, block: Kind, table: Kind) -> Kind:
        return block if part < self.world.plan.blocks else table

    def _push(self) -> Script:
        if self.ending is not None:
            raise self.ending
        model = hash(tuple(self.model[part] for part in self.world.parts()))
        self.values = {part: gradient(self.rank, self.step, self.cursor, part, model) for part in self.world.parts()}
        self.cursor += 1
        self.world.promises.stepped(self)
        yield from self._ask(
            lambda part: self.header(
                self._kind(part, Kind.PUSH, Kind.ROW_PUSH), block=part, clock=self.step, version=self.versions.get(part, (0, 0))
            )
        )
        self.step += 1

    def _ask(self, make: Callable[[int], Header]) -> Script:
        parts = self.world.parts()
        for link in self.links:
            link.unsent = sum(self.world.owner(part) == link.index for part in parts)
        for part in parts:
            self.links[self.world.owner(part)].ask(make(part))
        yield from self._wait(lambda: not any(link.outstanding for link in self.links))

    def _record(self) -> bytes:
        return make_record(self.step, self.cursor, self.step)

    def _edge(self) -> Script:
        if self.ending is not None:
            raise self.ending
        stops = self.stop_requested or self.stop_clock is not None
        mark = self.mark_wanted
        small = self.world.plan.record_bytes <= SMALL_RECORD
        cut = self.cut_clock == self.step
        if cut or stops or mark or small:
            self.last_record = (self.step, self._record())
            self._hand_in()
        yield from self._mark(mark)
        if stops:
            yield from self._stand_still()

    def _hand_in(self) -> None:
        clock, record = self.last_record
        self.links[0].send(self.header(Kind.RECORD, clock=clock), record, self.world.plan.record_bytes)

    def _mark(self, mark: int) -> Script:
        if not mark:
            return
        self.holding = mark
        if self.mark_wanted == mark:
            self.mark_wanted = 0
        for link in self.links:
            link.send(self.header(Kind.MARK, clock=self.step, request=mark))
        yield from self._wait(lambda: all(link.released >= mark for link in self.links))

    def _stand_still(self) -> Script:
        self._ask_stop()
        while self.stop_clock is None or self.step >= self.stop_clock:
            yield from self._wait(
                lambda: self.mark_wanted > 0 or (self.stop_clock is not None and self.step < self.stop_clock), STOP_SECONDS
            )
            yield from self._mark(self.mark_wanted)

    def _ask_stop(self) -> None:
        if not self.asked_stop:
            self.asked_stop = True
            self.links[0].send(self.header(Kind.STOP), {})

    def _leave(self) -> Script:
        self.last_record = (self.step, self._record())
        self.leaving = True
        for link in reversed(self.links):
            self.on_relinked(link)
        yield from self._wait(lambda: False)

    # -- what links tell -----------------------------------------------------------------------------

    def header(self, kind: Kind, **fields: Any) -> Header:
        """A frame's header."""
        return Header(kind, worker=self.rank, start=self.number, rewinds=self.rewinds, view=self.view, **fields)

    def value(self, header: Header) -> int:
        """What a push of the clock in hand brings."""
        return self.values[header.block]

    @property
    def initialising(self) -> bool:
        """Rank 0 was asked for the first values, and is not in the job yet."""
        return self.init > 0 and not self.joined

    def land(self, header: Header, content: Any) -> None:
        """An answer has come."""
        self.model[header.block] = content.digest
        self.versions[header.block] = header.version

    def on_welcome(self, link: SimLink, body: Mapping[str, Any]) -> None:
        """As `WorkerSession.on_welcome`."""
        link.released = max(link.released, self.holding)
        self.view = max(self.view, int(body["view"]))
        if not body["serving"]:
            self.init += 1
        if link.index == 0:
            self.recovery = int(body["recovery"])
            if not body.get("init") and not self.joined:
                self.step = int(body["clock"])
                self.residual = bool(body.get("residual", True))
                if not body.get("record"):
                    self.joined = True
        if link.attempt and not link.acked:
            link.acked = min((asked.clock for asked in link.outstanding.values()), default=self.step)

    def on_relinked(self, link: SimLink) -> None:
        """As `WorkerSession.on_relinked`."""
        if link.index == 0 and self.last_record[1] is not None:
            self._hand_in()
        if link.index == 0 and self.asked_stop:
            link.send(self.header(Kind.STOP), {})
        if self.leaving:
            link.send(self.header(Kind.LEAVE, clock=self.step))

    def on_frame(self, link: SimLink, header: Header, body: Any) -> None:
        """A control frame."""
        kind = header.kind
        if kind is Kind.RECORD:
            if header.clock >= 0:
                self.record = body
            self.joined = True
        elif kind is Kind.REWIND:
            self.end_session(SessionEnd("rewind", str((body or {}).get("mode", ""))))
        elif kind in (Kind.FINISHED, Kind.LEFT, Kind.STOPPED):
            self.end_session(SessionEnd(kind.name.lower()))
        elif kind is Kind.ERROR:
            self.end_session(SessionEnd(str(body.get("code")), str(body.get("error"))))
        elif kind is Kind.STOP:
            self.stop_clock = header.clock
        elif kind is Kind.MARK:
            self.mark_wanted = header.request
        elif kind is Kind.RELEASE:
            link.released = max(link.released, header.request)
            if self.mark_wanted <= header.request and link.index == 0:
                self.mark_wanted = 0

    def dial(self, targets: list[Any]) -> End | None:
        """A stream to one of the processes that have a name: of several the one with the highest view and attempt."""
        alive = sorted((target for target in targets if target.alive), key=lambda shard: (shard.first_view, shard.attempt), reverse=True)
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
        self._stopping = self.stop_requested = True
        self.poke()

    def standing(self) -> str:
        """A few words for who looks at a run that hangs."""
        if not self.alive:
            return f"ended with {self.code}"
        links = [(link.welcomed, link.attempt, len(link.outstanding), link.released) for link in self.links]
        return f"step {self.step} rewinds {self.rewinds} view {self.view} recovery {self.recovery} joined {self.joined} holding {self.holding} links {links}"
