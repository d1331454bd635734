"""What the coordinator hears, the facts in it (the job, a checkpoint, a stream of a worker), and what it wants done.

What shards say is in `messages`. Each is a value; what is malformed is refused by `of` or `of_peer` before it becomes one. A driver carries
the actions of one event out in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from psjob.contract import MOST_NUMBER
from psjob.layout.blocks import Layout, TensorSpec
from psjob.modes import ServedMode
from psjob.modes.stages import ALL, Stages
from psjob.protocol import messages
from psjob.protocol.coordinator.consistency import Digest, Told
from psjob.protocol.coordinator.step_times import StepTimed
from psjob.protocol.messages import MOST, Malformed, number_of, rank_of, whole
from psjob.wire.frame import Kind

MOST_INPUTS: Final = 64
MOST_WAITS: Final = 120
"""Characters of what a worker of a stage waits for."""

# -- facts ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JobFacts:
    """The job, and which start of shard 0 this is."""

    run: str
    folder: str
    """The run's folder, as messages name it."""
    mode: ServedMode
    workers: int
    shards: int
    term: int
    attempt: int
    """Of shard 0."""
    must_find: bool = False
    """The planner knows of a checkpoint, so that one must be found."""
    interval: float | None = None
    """Seconds between checkpoints; None: not by time."""
    every: int | None = None
    """Steps between checkpoints; None: not by steps."""
    keep: int = 3
    checkpoints: bool = True
    """False: `checkpoint.disabled`; only the first and the last one are made."""
    resume_from: str | None = None
    """Folder of another run that this one continues from."""
    policy: str = "AllWorkers"
    update_at: str | None = None
    update_rule: str | None = None
    reduction: str = "mean"
    step_timeout: float | None = None
    """Seconds without a step, while others wait for it, after which a worker is to be started again; None: never."""
    stages: Stages = ALL
    request: int | None = None
    """checkpoint.request as this coordinator found it: the first checkpoint of a new run answers it."""
    flushes: bool = True
    """False: stages make their updates without waiting for each other, so that they are several steps apart."""
    stage_names: tuple[str, ...] = ()
    """As the manifest names the stages."""

    @property
    def apart(self) -> int:
        """How many steps a stage may be beyond another, at most."""
        return 0 if self.flushes else self.stages.workers


@dataclass(frozen=True)
class WorkerFacts:
    """A worker in a checkpoint: its clock, its incarnation, and the clock from which on it has left (None: it has not)."""

    clock: int
    start: int = 0
    rewinds: int = 0
    left: int | None = None
    record: int | None = None
    """The clock of its resume record, where that is older than `clock`; else None."""


@dataclass(frozen=True)
class CheckpointFacts:
    """A checkpoint as its manifest tells it, without what lies in its files."""

    folder: str
    name: str
    run: str
    term: int
    step: int
    mode: str
    final: bool
    created: float
    """Unix seconds."""
    bytes: int
    layout: Layout
    rule: str
    workers: tuple[WorkerFacts, ...]
    """By rank."""
    tables: tuple[Mapping[str, Any], ...] = ()
    """Tables of rows, each as its spec's JSON."""
    aliases: tuple[tuple[str, str], ...] = ()
    """Further names of tied parameters."""
    weights_sha256: str | None = None
    request: int | None = None
    """The newest checkpoint.request of its run that had been seen when it was begun."""


@dataclass(frozen=True)
class StreamFacts:
    """A worker's stream to shard 0: whose it is, and what its hello says. `id` is given once in the life of a process."""

    id: int
    rank: int
    incarnation: tuple[int, int]
    fresh: bool
    """This process has no place in the job yet."""
    mode: str
    """The one that its process runs, as `modes.format_mode` writes it."""
    restore_id: int = 0
    """The newest restore that this process has come through."""
    rule: str = ""
    table: tuple[TensorSpec, ...] = ()
    tables: tuple[Mapping[str, Any], ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    layout: str = ""
    """Digest of the blocks that this process would cut its parameters in, or has heard of; empty: not known."""
    problem: str | None = None
    """Why its hello can be no job's: a sentence for the person who runs the script."""
    listens: tuple[str, int] | None = None
    """Host and port at which it waits for workers of neighbouring stages."""
    acked: int = 0
    """Of its clocks, how many shard 0 has acknowledged to this process."""


# -- time and this process -------------------------------------------------------------------------


@dataclass(frozen=True)
class Started:
    """This process has begun: claim the term, then look for a checkpoint."""


@dataclass(frozen=True)
class Tick:
    """Look at the time. `furthest` is the highest step that shard 0's blocks or workers are at."""

    furthest: int = 0


@dataclass(frozen=True)
class StepPassed:
    """All workers that are there have passed `step` steps, at unix time `wall`."""

    step: int
    wall: float


@dataclass(frozen=True)
class StopAsked:
    """The whole job is asked to go: by SIGTERM here."""


# -- workers -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerHello:
    """A worker says hello on a new stream."""

    stream: StreamFacts


@dataclass(frozen=True)
class WorkerStreamEnded:
    """A worker's stream is gone."""

    stream: int


@dataclass(frozen=True)
class NotJoined:
    """A WELCOME was not given: shard 0 has met a newer process of the rank, or was restored meanwhile."""

    stream: int
    why: str


@dataclass(frozen=True)
class RecordCame:
    """A worker's resume record of `clock`; -1: what rank 0 gives when a run begins. `idle`: the part of its time in which it waited."""

    stream: int
    clock: int
    record: bytes
    idle: float | None = None


@dataclass(frozen=True)
class WorkerMarked:
    """A worker stands before `clock` and holds its pushes for `snapshot`."""

    stream: int
    snapshot: int
    clock: int


@dataclass(frozen=True)
class WorkerLeft:
    """A worker is through after `clock` steps."""

    stream: int
    clock: int


@dataclass(frozen=True)
class Reported:
    """Numbers of `report()`."""

    stream: int
    numbers: Mapping[str, float]


@dataclass(frozen=True)
class CheckpointAsked:
    """A script asks for a checkpoint."""

    stream: int


@dataclass(frozen=True)
class WorkerStops:
    """One worker is asked to go."""

    stream: int


@dataclass(frozen=True)
class Heartbeat:
    """A worker's script continues, by a step that pushes nothing.

    `passes`: how many passes over its data it has run through again, told once it stands where it was.
    """

    stream: int
    passes: int = 0

    @classmethod
    def of(cls, stream: int, body: Mapping[str, Any]) -> Heartbeat:
        """From a HEARTBEAT; no passes where it tells none, or not in shape."""
        return cls(stream, _size(body.get("passes")) or 0)


@dataclass(frozen=True)
class StepLost:
    """A worker needs of another stage's worker `rank` what only a lost process of it had made, in that step."""

    stream: int
    rank: int
    step: int

    @classmethod
    def of(cls, stream: int, body: Mapping[str, Any], workers: int) -> StepLost:
        """From a STEP_LOST. Raises Malformed."""
        return cls(stream, rank_of(body.get("rank"), workers), number_of(body, "step"))


@dataclass(frozen=True)
class InputsSeen:
    """What a worker's first steps were made of, a number each; its script does not use `ps.shard`."""

    stream: int
    sums: tuple[int, ...]

    @classmethod
    def of(cls, stream: int, body: Mapping[str, Any]) -> InputsSeen:
        """From an INPUTS; no sums where it is not in shape."""
        told = body.get("inputs")
        return cls(stream, tuple(value for value in told[:MOST_INPUTS] if type(value) is int) if isinstance(told, list) else ())


@dataclass(frozen=True)
class DigestCame:
    """What a worker's weights are, in sums."""

    stream: int
    digest: Digest


@dataclass(frozen=True)
class DataSeen:
    """What a worker's data are that it gives to `ps.shard` and trains on."""

    stream: int
    told: Told


@dataclass(frozen=True)
class Measured:
    """What a worker of a stage tells of itself at step `clock`; None where it is not known.

    `idle`: the part of its last steps in which it waited. `resident`, `peak` and `device_peak`: bytes in RAM now and at most, and at most
    on its device. `waits`: what it has waited for since `seconds`, None: it continues; `awaited`: the worker that this comes from.
    `delay`: by how many updates its last ones were late, where stages do not flush.
    """

    stream: int
    clock: int
    idle: float | None = None
    resident: int | None = None
    peak: int | None = None
    device_peak: int | None = None
    waits: str | None = None
    awaited: int | None = None
    seconds: float = 0.0
    delay: float | None = None

    @classmethod
    def of(cls, stream: int, clock: int, body: Mapping[str, Any], workers: int) -> Measured:
        """From a MEASURED. What is not in shape is not known: nothing is decided by it."""
        idle, waits, awaited = _amount(body.get("idle")), body.get("waits"), body.get("for")
        return cls(
            stream, clock, None if idle is None else min(1.0, idle), _size(body.get("rss")), _size(body.get("peak")),
            _size(body.get("devicePeak")),
            "".join(filter(str.isprintable, waits))[:MOST_WAITS] if isinstance(waits, str) else None,
            awaited if type(awaited) is int and 0 <= awaited < workers else None, _amount(body.get("seconds")) or 0.0,
            _amount(body.get("delay")),
        )  # fmt: skip


def _amount(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < MOST else None


def _size(value: Any) -> int | None:
    return None if (told := _amount(value)) is None else int(told)


# -- shards ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShardRestartedFromKeeper:
    """Before Started: shard 0's process continues from the memory of one of the same attempt, which served its part of `layout`.

    `workers` are how far each rank was there, and `snapshot` is the highest number that was given to one. `clip`: the order to clip that
    was given last, as (version, factor).
    """

    term: int
    restore_id: int
    mode: str
    layout: Layout
    workers: tuple[WorkerFacts, ...]
    snapshot: int
    clip: tuple[int, float] | None = None


@dataclass(frozen=True)
class ShardHello:
    """A shard says hello on a new stream, which orders name by `link`. Shard 0 has link 0."""

    link: int
    index: int
    attempt: int
    term: int
    serving: bool
    restore_id: int
    mode: str
    carried: int | None
    """In a decided mode: the last order that it has carried out; None: one broke off."""

    @classmethod
    def of_peer(cls, link: int, body: Mapping[str, Any], shards: int) -> ShardHello:
        """What another shard says of itself. Raises Malformed."""
        carried, mode = body.get("carried"), body.get("mode")
        if not isinstance(mode, str) or not isinstance(body.get("serving"), bool):
            raise Malformed("a shard's hello has a mode and says whether it serves")
        return cls(
            link, number_of(body, "index", 1, shards - 1), number_of(body, "attempt", 0, MOST_NUMBER),
            number_of(body, "term", 0, MOST_NUMBER), bool(body["serving"]), number_of(body, "restore_id"), mode[:80],
            None if carried is None else whole(carried, "carried"),
        )  # fmt: skip


@dataclass(frozen=True)
class ShardAnnounced:
    """A shard that still starts tells of its term."""

    term: int


@dataclass(frozen=True)
class ShardLost:
    """The stream `link` of a shard ended; the shard may still serve its workers."""

    index: int
    link: int


# -- disk --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TermClaimed:
    """The run's folder is this process's, in this term."""

    term: int


@dataclass(frozen=True)
class TermUnclaimed:
    """The claim could not be written. `full`: the volume has no room."""

    term: int
    why: str
    full: bool


@dataclass(frozen=True)
class ClaimSeen:
    """Nobody has claimed a higher term."""


@dataclass(frozen=True)
class TermFenced:
    """A higher term is claimed, or this one by another process: this one must end."""

    term: int
    why: str


@dataclass(frozen=True)
class NewestRead:
    """The newest checkpoint that could be read, None where there is none, and a sentence for each that was passed over.

    `records` are by rank, None where they were not asked for; `initial` is what rank 0 gave at step 0. `failed`: the folder could not be
    listed, so that nothing is known.
    """

    number: int
    found: CheckpointFacts | None
    problems: tuple[str, ...] = ()
    failed: bool = False
    records: Mapping[int, bytes] | None = None
    initial: bytes = b""


@dataclass(frozen=True)
class ManifestCommitted:
    """A snapshot is a checkpoint."""

    snapshot: int
    made: CheckpointFacts


@dataclass(frozen=True)
class ManifestUncommitted:
    """A snapshot could not be committed; what the coordinator had written of it is gone. `full`: the volume has no room."""

    snapshot: int
    why: str
    full: bool


@dataclass(frozen=True)
class RoomMeasured:
    """So many bytes are free in the run's folder; None: not known."""

    free: int | None


@dataclass(frozen=True)
class ModeWished:
    """The mode that the mounted config names; None: it could not be read this time, or `problem` says why it is none. Its request."""

    mode: ServedMode | None
    problem: str | None = None
    request: int | None = None


Event = (
    Started | Tick | StepPassed | StopAsked
    | WorkerHello | WorkerStreamEnded | NotJoined | RecordCame | WorkerMarked | WorkerLeft | Reported | CheckpointAsked | WorkerStops
    | Heartbeat
    | InputsSeen | DataSeen | StepLost | Measured | StepTimed | DigestCame
    | ShardRestartedFromKeeper | ShardHello | ShardAnnounced | ShardLost | messages.ShardMessage
    | TermClaimed | TermUnclaimed | ClaimSeen | TermFenced | NewestRead | ManifestCommitted | ManifestUncommitted
    | RoomMeasured | ModeWished
)  # fmt: skip


# -- what it wants done ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Log:
    """A line for the log; `level` is one of `logging`'s names."""

    level: str
    text: str


# -- to workers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tell:
    """A control frame to a worker."""

    stream: int
    kind: Kind
    body: Mapping[str, Any] | None = None
    clock: int = 0
    request: int = 0


@dataclass(frozen=True)
class CloseWorkerStream:
    """Close a worker's stream once its messages have been sent."""

    stream: int


@dataclass(frozen=True)
class Welcome:
    """Let a worker in, and give it `record` (of `record_clock`; -1: the run's first values) where it is to put one back.

    `body` goes beside what shard 0 itself says of the worker. `acked` is the clock at which a fresh process continues (None: it knows its
    place). `init`: it is rank 0 and is to give the run's first values; it has not joined. A driver that cannot let it in says NotJoined.
    """

    stream: int
    body: Mapping[str, Any]
    acked: int | None = None
    init: bool = False
    record: bytes = b""
    record_clock: int = 0


@dataclass(frozen=True)
class Introduce:
    """Tell a worker of one that it shares micro-batches with: its rank, its start, and where it listens. The driver adds their key."""

    stream: int
    rank: int
    start: int
    host: str
    port: int


@dataclass(frozen=True)
class WishRecords:
    """In a decided mode: every answer of shard 0 asks for its worker's record, or none does."""

    on: bool


# -- to shards ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Order:
    """An order to the shard at the end of `link`.

    `most_from_here`: its `most` is filled in when it is sent, with one more than the clocks that shard 0 has of each worker then.
    """

    link: int
    order: messages.Order
    most_from_here: bool = False

    @property
    def body(self) -> Mapping[str, Any]:
        """As it goes to the shard."""
        return messages.encode_order(self.order)

    def with_most(self, clocks: Callable[[], messages.Clocks]) -> Order:
        """The same with its `most` filled in, if that is wanted. `clocks` gives those that shard 0 has of each worker now."""
        if not self.most_from_here or not isinstance(self.order, messages.Restore | messages.Bound):
            return self
        return replace(self, order=replace(self.order, most={rank: clock + 1 for rank, clock in clocks().items()}))


# -- disk: each is answered by an event, first in, first out -----------------------------------------


@dataclass(frozen=True)
class ClaimTerm:
    """Answered by TermClaimed, TermUnclaimed or TermFenced."""

    term: int


@dataclass(frozen=True)
class LookForClaim:
    """Has anybody claimed a higher term? Answered by ClaimSeen or TermFenced."""

    term: int


@dataclass(frozen=True)
class ReadNewest:
    """Answered by NewestRead or TermFenced. `passed` are names of manifests that are not to be taken."""

    number: int
    term: int
    passed: frozenset[str] = frozenset()
    records: bool = False


@dataclass(frozen=True)
class CommitSnapshot:
    """Write the records, the buffers and the manifest of a snapshot. Answered by ManifestCommitted, ManifestUncommitted or TermFenced."""

    snapshot: int
    term: int
    step: int
    mode: str
    final: bool
    layout: Layout
    assignment: tuple[int, ...]
    rule: str
    tables: tuple[Mapping[str, Any], ...]
    workers: tuple[WorkerFacts, ...]
    parts: Mapping[int, Any]
    """By shard: the `content` of its SnapshotWritten."""
    records: Mapping[int, bytes] = field(default_factory=dict)
    """By rank."""
    initial: bytes = b""
    """What rank 0 gave at the beginning, where the manifest is to hold it."""
    buffers: tuple[bytes, ...] = ()
    """The records that have the model's buffers. What several have, the last one tells."""
    aliases: tuple[tuple[str, str], ...] = ()
    request: int | None = None
    """The checkpoint.request that it answers."""


@dataclass(frozen=True)
class SweepOrphans:
    """Delete what snapshots below number `before` have left and no manifest names. No answer."""

    term: int
    before: int


@dataclass(frozen=True)
class MeasureRoom:
    """Answered by RoomMeasured."""


@dataclass(frozen=True)
class ReadWish:
    """Answered by ModeWished."""


# -- this process ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leave:
    """End this process with `code`; `why` is said where its end is looked at, None where there is nothing to say."""

    code: int
    why: str | None = None


@dataclass(frozen=True)
class LeaveFenced:
    """End this process: term `term` is another's."""

    term: int
    why: str


Action = (
    Log | Tell | CloseWorkerStream | Welcome | Introduce | WishRecords | Order
    | ClaimTerm | LookForClaim | ReadNewest | CommitSnapshot | SweepOrphans | MeasureRoom | ReadWish
    | Leave | LeaveFenced
)  # fmt: skip
