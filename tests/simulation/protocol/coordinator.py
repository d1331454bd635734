"""Shard 0's second half: the shipped coordinator machine, driven on the virtual clock, network and volume."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from psjob.checkpoint.disk import CheckpointProblem
from psjob.layout.blocks import TensorSpec
from psjob.process.errors import Fenced
from psjob.protocol import messages
from psjob.protocol.coordinator import events as e
from psjob.protocol.coordinator import recovery
from psjob.protocol.coordinator.events import CheckpointFacts, JobFacts
from psjob.protocol.coordinator.machine import Coordinator
from psjob.wire.frame import Header, Kind, WireError
from tests.simulation.protocol import records
from tests.simulation.protocol.network import End
from tests.simulation.protocol.promises import Saved
from tests.simulation.protocol.sessions import SimSession
from tests.simulation.protocol.volume import DiskThread, Job

if TYPE_CHECKING:
    from tests.simulation.protocol.shard import SimShard

TICK = 0.05
THREAD = 0.001
BEAT = 2.0
FOLDER = "/run"


class SimCoordinator:
    """Lives in the process of shard 0."""

    def __init__(self, shard: SimShard) -> None:
        self.shard, self.world = shard, shard.world
        plan = self.world.plan
        must = self.world.promises.told[1] > 0 and self.world.planner.knows
        self.job = JobFacts(
            run="run", folder=FOLDER, mode=shard.mode, workers=plan.workers, shards=plan.shards, term=shard.first_term,
            attempt=shard.attempt, must_find=must, interval=plan.interval, every=plan.every, keep=2, policy=plan.policy,
            request=self.world.planner.request or None,
        )  # fmt: skip
        self.machine = Coordinator(self.job, shard.clock())
        self.disk = DiskThread(shard)
        self.sessions: dict[int, SimSession] = {}
        self._links: dict[int, End] = {}
        self._posted: deque[e.Event] = deque()
        self._handling = False
        self._facts: dict[int, messages.SnapshotWritten] = {}

    def take_up(self, event: e.ShardRestartedFromKeeper) -> None:
        """This process continues from the memory of another."""
        self.machine.handle(event, self.shard.clock())

    def begin(self) -> None:
        """The process has come through its imports."""
        self.post(e.Started())
        self.shard.after(TICK, self._tick)
        self.shard.after(BEAT, self._beat)

    def _tick(self) -> None:
        self.shard.after(TICK, self._tick)
        self.post(e.Tick(self.shard.store.furthest() if self.shard.store.layout is not None else 0))
        self._look()

    def _beat(self) -> None:
        self.shard.after(BEAT, self._beat)
        for end in list(self._links.values()):
            end.send((Header(Kind.PEER), {"do": "nothing"}))

    # -- the machine -------------------------------------------------------------------------------

    def post(self, event: e.Event) -> None:
        """Tell the machine soon: a thread of its own hears of it, after what it is told already."""
        self._posted.append(event)
        if not self._handling:
            self._handling = True
            self.shard.after(self.shard.kernel.random.random() * THREAD, self._handle)

    def _handle(self) -> None:
        while self._posted:
            event = self._posted.popleft()
            self.world.count("coordinator", type(event).__name__)
            for action in self.machine.handle(event, self.shard.clock()):
                if self.shard.alive:
                    _CARRY[type(action)](self, action)
            if not self.shard.alive:
                return
        self._handling = False

    def _look(self) -> None:
        """Which phase is the job in?"""
        if self.world.shards[0] is not self.shard:
            return
        machine = self.machine.state
        state, snapshot = machine.phase, machine.snapshots.current
        phase = {"reading": "gathering", "electing": "gathering", "fresh": "gathering"}.get(state, state)
        if state == "open":
            if machine.ending.over or machine.members.alive < self.world.plan.workers:
                phase = "ending"
            elif snapshot is None:
                phase = "training"
            else:
                phase = "committing" if snapshot.committing else "writing" if snapshot.held else "snapshot"
        self.world.enter(phase)

    # -- workers -----------------------------------------------------------------------------------

    def hello(self, session: SimSession) -> None:
        """A worker says hello."""
        hello = session.hello
        table = tuple(TensorSpec(t["name"], tuple(t["shape"]), t["dtype"], t["group"]) for t in hello["table"])
        self.sessions[session.number] = session
        stream = e.StreamFacts(
            session.number, session.rank, session.incarnation, bool(hello["fresh"]), session.mode, int(hello["restore_id"]),
            hello["rule"], table,
            tuple(hello["tables"]), (), None,
        )  # fmt: skip
        self.post(e.WorkerHello(stream))

    def stream_ended(self, session: SimSession) -> None:
        """A worker's stream is gone."""
        if self.sessions.pop(session.number, None) is not None:
            self.post(e.WorkerStreamEnded(session.number))

    def frame(self, session: SimSession, header: Header, body: Any) -> None:
        """A control frame of a worker."""
        kind, stream = header.kind, session.number
        if kind is Kind.RECORD:
            self.post(e.RecordCame(stream, header.clock, body))
        elif kind is Kind.MARK:
            self.post(e.WorkerMarked(stream, header.request, header.clock))
        elif kind is Kind.LEAVE:
            self.post(e.WorkerLeft(stream, header.clock))
        elif kind is Kind.STOP:
            self.post(e.WorkerStops(stream))

    def step_passed(self, step: int) -> None:
        """All workers have passed a step."""
        self.post(e.StepPassed(step, self.shard.wall()))

    def stop(self) -> None:
        """SIGTERM."""
        self.post(e.StopAsked())

    def _tell(self, action: e.Tell) -> None:
        session = self.sessions.get(action.stream)
        if session is not None:
            session.tell(action.kind, None if action.body is None else dict(action.body), clock=action.clock, request=action.request)

    def _hang_up(self, action: e.CloseWorkerStream) -> None:
        session = self.sessions.get(action.stream)
        if session is not None:
            session.hang_up()

    def _welcome(self, action: e.Welcome) -> None:
        session = self.sessions.get(action.stream)
        if session is None:
            return
        if not action.init:
            if action.acked is not None:
                session.hello = {**session.hello, "acked": action.acked}
            try:
                session.join()
            except WireError as error:
                self.post(e.NotJoined(action.stream, str(error)))
                return
        session.welcome(**action.body)
        if action.record:
            session.give_back(action.record, action.record_clock)

    def _wish(self, action: e.WishRecords) -> None:
        self.shard.wishes = action.on

    # -- shards ------------------------------------------------------------------------------------

    def peer(self, end: End, hello: Mapping[str, Any]) -> None:
        """Another shard has dialled."""
        if hello.get("early"):
            self.post(e.ShardAnnounced(int(hello["term"])))
            return
        self.world.count("hello", "shard")
        link = self.world.number()
        said = e.ShardHello.of_peer(link, hello, self.job.shards)
        self._links[link] = end
        end.heard = lambda frame: self.answer(said.index, frame[1])
        end.ended = lambda: self._lost(said.index, link)
        self.post(said)

    def _lost(self, index: int, link: int) -> None:
        self._links.pop(link, None)
        self.post(e.ShardLost(index, link))

    def answer(self, shard: int, body: Mapping[str, Any]) -> None:
        """A shard answers."""
        event = messages.decode_message(shard, body, self.job.workers, dict)
        if event is not None:
            self.post(event)

    def _order(self, action: e.Order) -> None:
        body = json.loads(json.dumps(action.with_most(self.shard.store.clocks).body))
        if isinstance(action.order, messages.Clip):
            self.shard.store.note_clip(action.order.version, action.order.factor)
        if body["do"] == "restore":
            self.world.promises.chosen(self.world.saved[body["manifest"]], body["term"], self.shard.pod)
        if action.link == 0:
            self.shard.order(body, None)
        elif action.link in self._links:
            self._links[action.link].send((Header(Kind.PEER), body), 200)

    # -- disk --------------------------------------------------------------------------------------

    def _ask(self, job: Job, done: Callable[[Any], e.Event], failed: Callable[[CheckpointProblem], e.Event | None]) -> None:
        """Run a job; a successor's claim ends this process whatever was asked."""

        def over(result: Any) -> None:
            event: e.Event | None
            if isinstance(result, Fenced):
                event = e.TermFenced(result.term, str(result))
            elif isinstance(result, CheckpointProblem):
                event = failed(result)
            elif isinstance(result, Exception):
                raise result
            else:
                event = done(result)
            if event is not None:
                self.post(event)

        self.disk.ask(job, over)

    def _claim(self, action: e.ClaimTerm) -> None:
        self._ask(
            records.claim(self.world.volume, self.shard.pod, action.term), lambda new: e.TermClaimed(action.term),
            lambda problem: e.TermUnclaimed(action.term, str(problem), "ENOSPC" in str(problem)),
        )  # fmt: skip

    def _look_for_claim(self, action: e.LookForClaim) -> None:
        self._ask(records.check(self.world.volume, self.shard.pod, action.term), lambda done: e.ClaimSeen(), lambda problem: e.ClaimSeen())

    def _read_newest(self, action: e.ReadNewest) -> None:
        volume, pod = self.world.volume, self.shard.pod

        def job() -> Job:
            yield from records.check(volume, pod, action.term)
            return (yield from records.newest(volume, pod, action.passed))

        def done(result: Any) -> e.Event:
            saved, problems = result
            if saved is None:
                return e.NewestRead(action.number, None, tuple(problems), records={} if action.records else None)
            self.world.promises.found(saved, action.term)
            held = dict(saved.records) if action.records else None
            return e.NewestRead(action.number, saved.facts, tuple(problems), records=held, initial=saved.initial)

        self._ask(job(), done, lambda problem: e.NewestRead(action.number, None, (str(problem),), failed=True))

    def _commit(self, action: e.CommitSnapshot) -> None:
        self._ask(
            self._committing(action), lambda saved: self._committed(action, saved), lambda problem: self._uncommitted(action, problem)
        )

    def _committed(self, action: e.CommitSnapshot, saved: Saved) -> e.Event:
        if saved.final:
            self.world.promises.finished(saved, self.machine.state.restore_id)
        return e.ManifestCommitted(action.snapshot, saved.facts)

    def _uncommitted(self, action: e.CommitSnapshot, problem: CheckpointProblem) -> e.Event:
        return e.ManifestUncommitted(action.snapshot, str(problem), "ENOSPC" in str(problem))

    def _committing(self, action: e.CommitSnapshot) -> Job:
        world, pod, volume = self.world, self.shard.pod, self.world.volume
        yield from records.check(volume, pod, action.term)
        stem = f"v{action.term:06d}-c{action.snapshot:06d}"
        name = records.manifest_name(action.term, action.step)
        parts, versions, where, tables = {}, {}, {}, {}
        for shard, body in action.parts.items():
            tables[shard] = volume.files[body["file"]["name"]].content["table"]
            for block in body["blocks"]:
                file = volume.files.get(block["file"])
                if file is None:
                    raise CheckpointProblem(f"a shard names a part in {block['file']}, which is not there")
                parts[block["index"]], versions[block["index"]] = file.content["parts"][block["index"]]
                where[block["index"]] = block["file"]
        files = sorted({*where.values(), *(body["file"]["name"] for body in action.parts.values()), f"{stem}-records.safetensors"})
        facts = CheckpointFacts(
            FOLDER, name, "run", action.term, action.step, action.mode, action.final, self.shard.wall(), world.plan.shard_bytes,
            action.layout,
            action.rule, action.workers, action.tables, action.aliases, "sum" if action.final else None, action.request,
        )  # fmt: skip
        saved = Saved(
            name, action.term, action.step, action.snapshot, action.final, action.mode.partition(":")[0], pod, parts, versions, where,
            tables, action.workers, dict(action.records), action.initial, facts, tuple(files),
        )  # fmt: skip
        size = world.plan.record_bytes * len(action.records)
        yield from volume.write_whole(
            pod, files[-1] if files[-1].endswith("-records.safetensors") else f"{stem}-records.safetensors", "records", size
        )
        if action.final:
            yield from volume.write_whole(pod, "final.safetensors", "final", world.plan.shard_bytes)

        def renamed() -> None:
            self.shard.trace(f"commits {name}")
            world.promises.committed(saved, pod)
            world.saved[name] = saved

        yield from records.commit(volume, pod, saved, renamed)
        try:
            yield from records.prune(volume, pod, self.job.keep, saved)
        except CheckpointProblem:
            pass
        return saved

    def _sweep(self, action: e.SweepOrphans) -> None:
        job = records.sweep(self.world.volume, self.shard.pod, action.before)
        self._ask(job, lambda done: None, lambda problem: None)  # type: ignore[arg-type,return-value]

    def _room(self, action: e.MeasureRoom) -> None:
        volume = self.world.volume
        free = None if volume.room is None else max(0, volume.room - volume.used)
        self.shard.after(0.01, self.post, e.RoomMeasured(free))

    def _read_wish(self, action: e.ReadWish) -> None:
        self.shard.after(0.01, self.post, self._wished())

    def _wished(self) -> e.Event:
        planner = self.world.planner
        return e.ModeWished(self.world.mode_of(planner.mode), request=planner.request or None)

    # -- this process ------------------------------------------------------------------------------

    def _leave(self, action: e.Leave) -> None:
        self.shard.leave(action.code, {"error": action.why} if action.why else {}, action.why or "")

    def _fenced(self, action: e.LeaveFenced) -> None:
        self.shard.leave(76, {"fenced": {"term": action.term}}, action.why)

    def _log(self, action: e.Log) -> None:
        self.shard.trace(f"coordinator says: {action.text}")

    def polled(self) -> None:
        """The planner reads the status."""
        told = self.machine.status(self.shard.clock(), self.shard.wall())
        checkpoint = told["checkpoint"]
        if checkpoint is not None:
            self.world.promises.tell(checkpoint["term"], checkpoint["step"], self.world.saved.get(checkpoint["path"]))
            self.world.planner.knows = True

    def standing(self) -> str:
        """A few words for who looks at a run that hangs."""
        machine = self.machine.state
        snapshot = machine.snapshots.current
        members = {
            m.rank: (m.state.value, m.clock, m.here, m.welcomed, m.incarnation, sorted(m.records)) for m in machine.members.all.values()
        }
        return (
            f"coordinator {machine.phase} because {recovery.reason(machine, machine.now)}; snapshot {snapshot}; members {members}; "
            f"checkpoint {machine.progress.checkpoint}; problem {machine.progress.checkpoint_problem}"
        )


_CARRY: dict[type, Callable[[SimCoordinator, Any], None]] = {
    e.Log: SimCoordinator._log,
    e.Tell: SimCoordinator._tell,
    e.CloseWorkerStream: SimCoordinator._hang_up,
    e.Welcome: SimCoordinator._welcome,
    e.WishRecords: SimCoordinator._wish,
    e.Order: SimCoordinator._order,
    e.ClaimTerm: SimCoordinator._claim,
    e.LookForClaim: SimCoordinator._look_for_claim,
    e.ReadNewest: SimCoordinator._read_newest,
    e.CommitSnapshot: SimCoordinator._commit,
    e.SweepOrphans: SimCoordinator._sweep,
    e.MeasureRoom: SimCoordinator._room,
    e.ReadWish: SimCoordinator._read_wish,
    e.Leave: SimCoordinator._leave,
    e.LeaveFenced: SimCoordinator._fenced,
}
