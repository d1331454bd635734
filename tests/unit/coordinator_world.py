"""A coordinator's machine with nothing around it: its shards, workers and disk are a few lines here, and time is a number."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from psjob.layout.blocks import Layout, TensorSpec
from psjob.modes import ServedMode, Sync, format_mode
from psjob.protocol import messages
from psjob.protocol.coordinator import events as e
from psjob.protocol.coordinator.events import CheckpointFacts, JobFacts, StreamFacts, WorkerFacts
from psjob.protocol.coordinator.machine import Coordinator
from psjob.wire.frame import Kind

TABLE = tuple(TensorSpec(f"w{i}", (1 << 20,), "float32", 0) for i in range(64))


class World:
    """Shards answer at once, workers do what they are told, the disk takes no time, unless a test holds something back."""

    def __init__(self, workers: int = 2, shards: int = 2, mode: ServedMode | None = None, term: int = 1, **more: Any) -> None:
        self.mode = mode or Sync()
        self.job = JobFacts("run-1", "/runs/run-1", self.mode, workers, shards, term, term, **more)
        self.machine = Coordinator(self.job)
        self.c = self.machine.state
        self.now = 0.0
        self.step = 0
        """What all blocks and workers are at."""
        self.sent: Counter[str] = Counter()
        """Messages by their word, both ways."""
        self.heard: dict[int, list[Kind]] = {rank: [] for rank in range(workers)}
        self.welcomes: dict[int, e.Welcome] = {}
        self.disk: deque[Any] = deque()
        """Work that is held back while `slow`."""
        self.slow = False
        self.writes = True
        """Do shards write what they hold?"""
        self.deaf: set[str] = set()
        """Orders that no shard answers."""
        self.left: list[Any] = []
        self.manifests: list[CheckpointFacts] = []
        self.committing: list[e.CommitSnapshot] = []
        self.logged: list[str] = []
        self.request = self.job.request
        """checkpoint.request of the config as it lies there now."""
        self._links = {0: 0}
        self._ids = 100
        self._ranks: dict[int, int] = {}
        self._queue: deque[e.Event] = deque()

    # -- time ----------------------------------------------------------------------------------

    def post(self, *events: e.Event) -> None:
        """Let the machine hear something, and all that follows."""
        self._queue.extend(events)
        while self._queue:
            for action in self.machine.handle(self._queue.popleft(), self.now):
                self._carry_out(action)

    def tick(self, seconds: float = 0.05) -> None:
        """Time passes in one go."""
        self.now += seconds
        self.post(e.Tick(self.step))

    def work(self) -> None:
        """The disk does what was held back."""
        while self.disk:
            self.post(*self._done(self.disk.popleft()))

    # -- beginning -----------------------------------------------------------------------------

    def begun(self, **hello: Any) -> World:
        """A new run, all workers in it."""
        self.post(e.Started())
        for index in range(1, self.job.shards):
            self.shard(index)
        for rank in range(self.job.workers):
            self.hello(rank, **hello)
        self.post(e.RecordCame(self._stream(0), -1, b"initial"))
        assert self.c.open and len(self.welcomes) == self.job.workers, self.c.phase
        return self

    def shard(self, index: int, serving: bool = False, term: int = 1, attempt: int = 1, restore_id: int = 0) -> None:
        """Shard `index` says hello on a new stream."""
        self._ids += 1
        self._links[self._ids] = index
        self.sent["shard-hello"] += 1
        self.post(e.ShardHello(self._ids, index, attempt, term, serving, restore_id, format_mode(self.mode), 0))

    def hello(self, rank: int, start: int = 1, rewinds: int = 0, fresh: bool = True, **more: Any) -> int:
        """A process of worker `rank` says hello; the number of its stream."""
        self._ids += 1
        self._ranks[self._ids] = rank
        self.sent["hello"] += 1
        stream = StreamFacts(self._ids, rank, (start, rewinds), fresh, format_mode(self.mode), rule="sgd", table=TABLE, **more)
        self.post(e.WorkerHello(stream))
        return self._ids

    def record(self, rank: int, clock: int) -> None:
        """A worker hands in its record of `clock`."""
        self.post(e.RecordCame(self._stream(rank), clock, b"record"))

    def snapshot(self) -> None:
        """A checkpoint is asked for and ordered."""
        self.c.snapshots.ask(self.now)
        self.tick()
        if self.c.snapshots.current is None:  # memory was made ready first
            self.tick()

    def go(self, step: int) -> None:
        """Everybody comes to `step`, with a record of it."""
        for at in range(self.step + 1, step + 1):
            self.step = at
            for rank in range(self.job.workers):
                self.record(rank, at)
            self.post(e.StepPassed(at, 0.0))
            self.tick(0.0)

    def _stream(self, rank: int) -> int:
        stream = self.c.members[rank].stream
        assert stream is not None
        return stream.id

    # -- out -----------------------------------------------------------------------------------

    def _carry_out(self, action: e.Action) -> None:
        match action:
            case e.Log(_, text):
                self.logged.append(text)
            case e.Order(link):
                self.sent[str(action.body["do"])] += 1
                self.order(self._links[link], action.body)
            case e.Tell(stream, kind):
                self.sent[kind.name] += 1
                self.heard[self._ranks[stream]].append(kind)
            case e.Welcome():
                self.sent["WELCOME"] += 1
                self.welcomes[self._ranks[action.stream]] = action
            case e.CloseWorkerStream(stream):
                self._queue.append(e.WorkerStreamEnded(stream))
            case e.Leave() | e.LeaveFenced():
                self.left.append(action)
            case e.WishRecords():
                pass
            case _ if self.slow:
                self.disk.append(action)
            case _:
                self._queue.extend(self._done(action))

    def answer(self, shard: int, message: messages.ShardMessage) -> None:
        """A shard answers."""
        self.sent[str(messages.encode_message(message)["did"])] += 1
        event = messages.decode_message(
            shard, json.loads(json.dumps(messages.encode_message(message))), self.job.workers, lambda content: shard
        )
        assert event is not None
        self._queue.append(event)

    def order(self, shard: int, body: Mapping[str, Any]) -> None:
        """A shard carries an order out."""
        word = body["do"]
        if word in self.deaf:
            return
        match word:
            case "setup":
                self.answer(shard, messages.Initialised(shard, body["setup"]))
            case "restore":
                self.step = self.manifests[-1].step
                complete = (self.step,) * self.job.workers
                self.answer(shard, messages.ShardRestored(shard, body["restore_id"], self.position(), complete))
            case "where":
                rows = dict.fromkeys(body["ranks"], (self.step, 0))
                self.answer(shard, messages.WorkerPositions(shard, body["ask"], self.position(), rows))
            case "prepare":
                self.answer(shard, messages.MemoryReady(shard, body["number"]))
            case "snapshot":
                self.answer(shard, messages.SnapshotReady(shard, body["snapshot"]))
                if self.writes and (not body["marks"]):
                    self.held(shard, body["snapshot"])
                    self.wrote(shard, body["snapshot"], max(body["step"], self.step if body["step"] < 0 else 0))
            case "void":
                self.answer(shard, messages.SnapshotVoided(shard, body["snapshot"]))

    def position(self) -> messages.ShardPosition:
        """All blocks are at the step."""
        stages = tuple((self.step, self.step, 1) for _ in self.job.stages.replicas)
        return messages.ShardPosition(self.step, self.step, 1, self.step, stages)

    def held(self, shard: int, snapshot: int) -> None:
        """A shard holds all of a snapshot."""
        self.answer(shard, messages.SnapshotHeld(shard, snapshot))

    def wrote(self, shard: int, snapshot: int, step: int, left: Mapping[int, int] | None = None) -> None:
        """A shard has written its part of a snapshot at `step`."""
        complete = (step,) * self.job.workers
        written = messages.SnapshotWritten(shard, snapshot, {"blocks": [{"n": step}], "table": {}}, step, complete, dict(left or {}))
        self.answer(shard, written)

    def _done(self, job: Any) -> list[e.Event]:
        match job:
            case e.ClaimTerm(term):
                return [e.TermClaimed(term)]
            case e.LookForClaim():
                return [e.ClaimSeen()]
            case e.ReadNewest():
                found = next((made for made in reversed(self.manifests) if made.name not in job.passed), None)
                records = {} if found is None else dict.fromkeys(range(self.job.workers), b"record") if found.step else {}
                return [e.NewestRead(job.number, found, records=records if job.records else None, initial=b"initial")]
            case e.CommitSnapshot():
                self.committing.append(job)
                self.manifests.append(facts(job, self.job.folder))
                return [e.ManifestCommitted(job.snapshot, self.manifests[-1])]
            case e.MeasureRoom():
                return [e.RoomMeasured(12345)]
            case e.ReadWish():
                return [e.ModeWished(None, request=self.request)]
        return []


def facts(job: e.CommitSnapshot, folder: str) -> CheckpointFacts:
    """What a manifest says of a snapshot that was committed."""
    return CheckpointFacts(
        folder, f"manifest-{job.snapshot}", "run-1", job.term, job.step, job.mode, job.final, 0.0, 4096, job.layout, job.rule, job.workers,
        request=job.request,
    )  # fmt: skip


def saved(step: int, workers: int) -> CheckpointFacts:
    """A checkpoint that is there when a coordinator begins."""
    layout = Layout.of(TABLE)
    return CheckpointFacts(
        "/runs/run-1", f"manifest-{step}", "run-1", 1, step, "sync", False, 0.0, 4096, layout, "sgd", (WorkerFacts(step, 1),) * workers
    )
