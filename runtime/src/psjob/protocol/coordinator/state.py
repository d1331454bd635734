"""All that the coordinator knows, as one value, and how it speaks.

The functions of `updates`, `checkpoints`, `membership`, `ending` and `recovery` take this value. They read and change it, and put actions
in `out` in the order in which a driver is to carry them out. They build on each other in this order: each module calls those before it
only. What has to go back up is returned, such as why all must begin again.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from psjob import contract
from psjob.layout.blocks import Layout, assign
from psjob.modes import ServedMode, format_mode
from psjob.protocol import messages
from psjob.protocol.coordinator import events
from psjob.protocol.coordinator.decisions import Decisions, Orders
from psjob.protocol.coordinator.events import Action, CheckpointFacts, JobFacts, StreamFacts
from psjob.protocol.coordinator.members import Members
from psjob.protocol.coordinator.report import JobProgress, StageReport
from psjob.protocol.coordinator.schedule import SnapshotSchedule
from psjob.protocol.messages import Clip, Order, Where
from psjob.wire.frame import Kind

FIRST_NORM_QUESTION = 1 << 40
"""Above the numbers of questions about workers that join."""


@dataclass
class ShardPeer:
    """A shard as the coordinator sees it; orders go down `link`."""

    link: int
    attempt: int
    serving: bool
    restore_id: int
    mode: str
    """The one that it serves, as `modes.format_mode` writes it."""
    carried: int | None
    """In a decided mode: the last order that it has carried out; None: one broke off."""


@dataclass
class CheckpointSearch:
    """Of the newest checkpoint that can be read. `claimed`: the folder is this process's in the present term."""

    claimed: bool = False
    waits_for: str | None = None
    """Why the term cannot be claimed, or nothing be read."""
    looking: bool = False
    """Is the newest checkpoint wanted, and not found yet?"""
    asked: int | None = None
    """The look that is under way."""
    number: int = 0
    records: bool = False
    """Does that look read records too?"""
    claim_at: float | None = None
    gather_at: float | None = None
    look_at: float | None = None
    """When what failed is tried again."""
    damaged: dict[str, str] = field(default_factory=dict)
    """By manifest's name, why it is not taken any more."""
    failed: dict[str, int] = field(default_factory=dict)
    """By manifest's name, how often a shard could not read it."""
    continued: tuple[int, int] | None = None
    """Term and step of an earlier coordinator's checkpoint that this one has continued."""

    def stop(self) -> None:
        """What was looked for is not wanted any more."""
        self.asked = self.gather_at = self.look_at = None
        self.looking = False


@dataclass
class Initialization:
    """Of a new run. `setup` is above every number that an earlier coordinator gave: a shard may still answer one of that."""

    setup: int
    asked_of: int = -1
    """The stream that was asked for the run's first values."""


@dataclass
class Question:
    """Where all shards have these workers; one is under way at a time."""

    number: int
    ranks: tuple[int, ...]
    answers: dict[int, messages.WorkerPositions] = field(default_factory=dict)

    def order(self) -> Where:
        """What shards are ordered."""
        return Where(self.number, self.ranks)


@dataclass
class Joining:
    """Workers that wait for the clock at which they continue."""

    waiting: dict[int, StreamFacts] = field(default_factory=dict)
    question: Question | None = None
    number: int = 0
    asked_at: float | None = None
    restored: dict[int, messages.ShardRestored] = field(default_factory=dict)
    """By shard, what it said when it was restored, if all were together: it holds for a worker until that has come once."""
    unplaced: set[int] = field(default_factory=set)


@dataclass
class Hanging:
    """Who keeps others waiting."""

    awaited: dict[int, tuple[float, Mapping[int, float]]] = field(default_factory=dict)
    """By shard: when it said so, and since when answers wait for each rank."""
    clocks: dict[int, int] = field(default_factory=dict)
    active: dict[int, float] = field(default_factory=dict)
    """By rank: when its script was last seen to run."""
    notified: dict[int, tuple[tuple[int, int], float]] = field(default_factory=dict)
    """By rank: which of its processes was asked to end as it hangs, and when."""
    kept_since: float | None = None
    """Since when a worker that is through waits for a checkpoint that holds its end."""
    looked: float = float("-inf")


@dataclass
class CheckpointTries:
    """What became of tries to checkpoint. `base` is the snapshot that the newest manifest of this coordinator holds."""

    base: int | None = None
    """What has not changed since that snapshot need not be written again."""
    moved: dict[int, messages.BytesMoved] = field(default_factory=dict)
    """By shard: how far it has written the snapshot in flight, or read the restore."""
    away_since: float | None = None
    voided: dict[int, set[int]] = field(default_factory=dict)
    """By snapshot that was given up: the shards that have nothing of it any more."""
    tries: int = 0
    """Snapshots in a row that came to nothing."""
    full: tuple[str, float] | None = None
    """Why there is no room, and the seconds until the next try."""


@dataclass
class DecisionState:
    """In a decided mode: which pushes count, and which shards have heard of it."""

    decisions: Decisions | None = None
    orders: Orders = field(default_factory=lambda: Orders(()))
    wished: float | None = None
    """Since when answers ask for records that a checkpoint needs."""
    leaving: set[int] = field(default_factory=set)
    """Workers that are through, and of whom a push may still wait for its decision."""


@dataclass
class NormSum:
    """Of the mean gradient of one update, over all shards."""

    restore_id: int = -1
    version: int = -1
    shares: dict[int, messages.NormMeasured] = field(default_factory=dict)
    """By shard."""
    early: dict[int, messages.NormMeasured] = field(default_factory=dict)
    """Those that came before training was on: where it continues without a restore, they do not come again."""
    since: float = 0.0
    """When the last share came, or was asked for."""
    question: int = FIRST_NORM_QUESTION
    last: Clip | None = None
    """The newest order to clip."""


@dataclass
class Ending:
    """Who waits to go, whether the job is asked to stop, and when this shard may end."""

    over: bool = False
    leavers: dict[int, float] = field(default_factory=dict)
    lone: dict[int, float] = field(default_factory=dict)
    """By rank, since when a worker is asked to go by itself."""
    stop_by: float | None = None
    told_to_stand: bool = False
    quit_at: float | None = None
    quit_code: int = contract.EXIT_DONE
    back: set[tuple[int, tuple[int, int]]] = field(default_factory=set)
    """Ranks and incarnations that came when the run was over."""


@dataclass
class ModeChange:
    """`wish` and `request` are the mode and the checkpoint.request that the config has named last."""

    wish: ServedMode
    request: int | None
    looked: float = 0.0
    asked: bool = False


class CoordinatorState:
    """Of one run, in one start of shard 0. `now` is monotonic seconds, and never falls.

    `phase` is one of: reading, electing, fresh, initialising, restoring, open, finished; see `recovery`.
    """

    def __init__(self, job: JobFacts, now: float = 0.0) -> None:
        self.job, self.now, self.mode = job, now, job.mode
        self.out: list[Action] = []
        self.ended = False
        """This process was told to end: nothing is decided any more."""
        self.furthest = 0
        """The highest step that shard 0 has seen."""
        self.members = Members(job.workers)
        self.progress = JobProgress()
        self.stages = StageReport(job, self.members)

        self.phase = "reading"
        self.since = now
        """When the phase began."""
        self.term = job.term
        self.restore_id = job.term << 20
        """Number of the newest restore."""
        self.restored_by = 0
        """The restore that gave shard 0 its blocks: what a worker that joined before it says is of steps that are undone."""
        self.peers: dict[int, ShardPeer] = {}
        self.waiting: dict[int, StreamFacts] = {}
        """By rank, workers that are let in once training is on."""
        self.said_why = 0.0
        """When those who wait last heard what for."""
        self.search = CheckpointSearch()
        self.initialization = Initialization(job.term << 20)

        self.layout: Layout | None = None
        self.assignment: tuple[int, ...] = ()
        """Shard of each block."""
        self.tables: tuple[Mapping[str, Any], ...] = ()
        self.aliases: tuple[tuple[str, str], ...] = ()
        self.rule = ""
        """The shards' rule, once there is a model."""
        self.initial = b""
        """What rank 0 gave when the run began."""
        self.source: CheckpointFacts | None = None
        """The checkpoint that training continues from."""

        self.done: set[int] = set()
        """Shards that have what they were ordered to set up or restore,"""
        self.only: set[int] = set()
        """of these."""
        self.blank: set[int] = set()
        """Shards that must be restored, whatever they say that they serve."""
        self.restored: dict[int, messages.ShardRestored] = {}
        """What each shard said of itself when it was restored."""
        self.fences: dict[int, tuple[int, int]] = {}
        """By rank, the lowest incarnation that shards let in since the last restore."""
        self.sure = False
        """Has shard 0 all clocks that workers completed, so that they bound what other shards acknowledged?"""
        self.taken: events.ShardRestartedFromKeeper | None = None
        """What shard 0 holds since before this process began."""
        self.looked = now
        """When a successor's claim was last looked for,"""
        self.looking = False
        """and whether that look is under way."""

        self.joining = Joining()
        self.hanging = Hanging()
        places = self.mode.marks() or self.mode.decided  # it is taken where the workers are, not at a step ahead of them
        interval, every = (job.interval, job.every) if job.checkpoints else (None, None)
        self.snapshots = SnapshotSchedule(interval, every, places, job.term, job.apart or self.mode.ahead)
        self.tries = CheckpointTries()
        self.updates = DecisionState() if self.mode.decided else None
        self.norms = NormSum()
        self.ending = Ending()
        self.change = ModeChange(self.mode, job.request)

    # -- where the job is --------------------------------------------------------------------------

    @property
    def open(self) -> bool:
        """Is training on?"""
        return self.phase == "open"

    @property
    def initialising(self) -> bool:
        """Does rank 0 give the run's first values?"""
        return self.phase == "initialising"

    @property
    def restoring(self) -> bool:
        """Are shards brought back from a manifest?"""
        return self.phase == "restoring"

    def enter(self, phase: str) -> None:
        """Go over to another phase."""
        if phase != self.phase:
            self.since = self.now
        self.phase = phase

    def finish(self) -> None:
        """The run has its final manifest."""
        self.phase = "finished"
        self.search.stop()

    def lay_out(self, layout: Layout) -> None:
        """The parameters' blocks, and where they lie."""
        if layout != self.layout:
            self.layout, self.assignment = layout, assign(layout, self.job.shards)

    # -- actions -----------------------------------------------------------------------------------

    def emit(self, action: Action) -> None:
        """Do this, after what was said before. Nothing follows the end of the process."""
        if not self.ended:
            self.out.append(action)
            self.ended = isinstance(action, events.Leave | events.LeaveFenced)

    def log(self, level: str, text: str) -> None:
        """Write a line."""
        self.emit(events.Log(level, text))

    def tell(self, rank: int, kind: Kind, **fields: Any) -> None:
        """Tell a worker that has said hello."""
        stream = self.members[rank].stream
        if stream is not None:
            self.emit(events.Tell(stream.id, kind, **fields))

    def tell_all(self, kind: Kind, **fields: Any) -> None:
        """Tell every worker that is there."""
        for member in self.members.all.values():
            if member.here:
                self.tell(member.rank, kind, **fields)

    def rewind(self, stream: int) -> None:
        """Let a worker begin again in the mode of this job."""
        self.emit(events.Tell(stream, Kind.REWIND, {"mode": format_mode(self.mode)}))
        self.emit(events.CloseWorkerStream(stream))

    def refuse(self, stream: int, why: str) -> None:
        """End a worker's process with a sentence for the person who runs the script."""
        self.emit(events.Tell(stream, Kind.ERROR, {"code": "refused", "error": why}))
        self.emit(events.CloseWorkerStream(stream))

    def order(self, index: int, order: Order) -> None:
        """Order one shard."""
        self.emit(events.Order(self.peers[index].link, order))

    def order_all(self, order: Order, but: Set[int] = frozenset()) -> None:
        """Order all shards, shard 0 last: it carries an order out at once."""
        for index in sorted(self.peers, reverse=True):
            if index not in but:
                self.order(index, order)
