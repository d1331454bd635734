"""What a block and a table have in common: a version, the pushes that wait for the next one, and the workers that wait for an answer.

`ServedState` is the base of both. It says who may be answered, and when a snapshot holds it. Pushes that were admitted and are not applied
yet are kept by worker and clock. Workers that wait are kept so that a push looks only at those whom it may release.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from psjob.layout import memory
from psjob.layout.blocks import Block
from psjob.modes import Push, ServedMode
from psjob.protocol.messages import Decision, Key
from psjob.shard.deduplication import Admission
from psjob.wire.frame import Header, WireError

MOST_PENDING = 64
"""Pushes of one worker that a block holds where workers need not wait for each other's."""
MOST_WAITING = 64
"""Answers of one block that one worker may wait for; it asks for one at a time, and again where a stream broke."""
MOST_NAMED = 32
"""Of the workers for whom an answer waits, so many are named by rank, of the others their number."""
KEPT = 4
"""Of each worker: its open clocks name two at most."""


class ServedState(ABC):
    """A block or table at version `n`: the number of its updates. All methods are called with `lock` held."""

    bound: StalenessBound | None = None
    """If its versions count pushes, and workers wait for each other's: whom it may answer."""
    answerable_clocks: Mapping[int, int] | None = None
    """In a decided mode: by worker, how many of its clocks may be answered."""

    def __init__(self, index: int, position: int, mode: ServedMode, group: frozenset[int] | None) -> None:
        self.index, self.position, self.mode = index, position, mode
        self.group = group
        """The ranks that push it, if not all do."""
        self.lock = threading.Lock()
        self.n = 0
        self.pending = PendingPushes()
        self.waiters = Waiters()
        self._snapshot: tuple[int, int, Callable[[Any], Any]] | None = None
        self._late: Callable[[], None] = lambda: None
        """The step of a snapshot that it has not come to, the least clock of stored weights, and what holds it then."""

    @property
    @abstractmethod
    def name(self) -> str:
        """As messages call it."""

    def ready(self, ranks: Iterable[int] | None) -> list[Waiter]:
        """Take those for whom there is what they wait for, which they name by a number that `ServedMode.version_for` gave."""
        if not self.waiters:
            return []
        if self.answerable_clocks is not None:
            clocks_of = self.answerable_clocks
            return self.waiters.take(ranks, None, lambda rank, clocks: clocks_of.get(rank, 0) >= clocks)
        if self.bound is not None:
            return self.waiters.take(ranks, self.bound.reached(self.barrier), self.bound.goes(self.barrier))
        return self.waiters.take(ranks, self.n, lambda rank, version: self.n >= version)

    def order_snapshot(self, step: int, hold: Callable[[Any], Any], stored: int = 0, late: Callable[[], None] = lambda: None) -> bool:
        """Hold on to this with `hold` when it is at `step` (where that is negative: as it is now). False: too late.

        If the workers step by themselves, a block that is held as it is now has the weights of clock `stored` at least. `late` is called
        once it can no longer come to `step`: a worker that this shard had not met yet has been beyond it.
        """
        if step >= 0 and (self.n > step if self.bound is None else self.bound.beyond(step)):
            return False
        self._snapshot, self._late = (step, stored, hold), late
        self._hold_if_due()
        return True

    @property
    def barrier(self) -> int | None:
        """The step of a snapshot that it has not come to."""
        return None if self._snapshot is None or self._snapshot[0] < 0 else self._snapshot[0]

    def void_snapshot(self) -> None:
        """No snapshot holds it any more."""
        self._snapshot = None

    @abstractmethod
    def _hold_if_due(self) -> None: ...

    def _comes_to(self, step: int) -> bool:
        """Is it still to come to the step of a snapshot? One to which it cannot come is let go."""
        if step < 0 or self._at_step(step):
            return False
        if self.bound is not None and self.bound.passed(step):
            self._snapshot = None
            self._late()
        return True

    def _at_step(self, step: int) -> bool:
        """Has it come to the step of a snapshot?"""
        return self.n == step if self.bound is None else self.bound.stands_at(step)

    def decided_on(self, decision: Decision) -> tuple[list[PendingPush], list[PendingPush]]:
        """The pushes that a decision keeps and drops, which wait no longer. Raises WireError if one is not here."""
        try:
            return self.pending.take(decision.kept), self.pending.take(decision.dropped)
        except KeyError as missing:
            raise WireError(f"the coordinator decides on push {missing} (worker, step), which is not here") from None


@dataclass(frozen=True)
class PushMetadata:
    """What a worker's pushes are made with: hyperparameters a group and a table, the tensors without a gradient."""

    hyperparameters: tuple[Mapping[str, Any], ...]
    none: frozenset[int]
    rows: tuple[Mapping[str, Any], ...] = ()
    clip: float | None = None
    """The largest norm that the mean gradient of all blocks may have; None: any."""
    clamp: float | None = None
    """The same of each element, from 0."""
    bad: int | None = None
    """The tensor (after the model's: the table) in which the worker has found NaN or inf, so that it skips this step."""
    processes: int = 1
    """Gradients whose mean a push is: those of the processes of its worker."""


class Received(Protocol):
    """What a push brought, in a buffer that is given back."""

    def free(self) -> None: ...


@dataclass(frozen=True)
class PendingPush:
    """A push that was admitted and is not yet applied. `grad` is None for an absent rank."""

    push: Push
    grad: Received | None
    skip: bool
    info: PushMetadata


class PendingPushes:
    """By worker and clock, in order of arrival. A mode that is asked at each push is given the same list, not a new one."""

    def __init__(self) -> None:
        self._arrived: dict[Key, PendingPush] = {}
        self._pushes: list[Push] | None = []
        """None: to be made again."""
        self._of: Counter[int] = Counter()
        self.changes = 0

    def __len__(self) -> int:
        return len(self._arrived)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._arrived)

    def __contains__(self, key: object) -> bool:
        return key in self._arrived

    def __getitem__(self, key: Key) -> PendingPush:
        return self._arrived[key]

    def __setitem__(self, key: Key, arrived: PendingPush) -> None:
        self._of[key[0]] += key not in self._arrived
        self._arrived[key] = arrived
        self.changes += 1
        if self._pushes is not None:
            self._pushes.append(arrived.push)

    def of(self, worker: int) -> int:
        """How many are a worker's."""
        return self._of[worker]

    @property
    def pushes(self) -> Sequence[Push]:
        """In order of arrival; stands until the next change."""
        if self._pushes is None:
            self._pushes = [arrived.push for arrived in self._arrived.values()]
        return self._pushes

    def take(self, keys: Iterable[Key]) -> list[PendingPush]:
        """These, in this order, which wait no longer. Raises KeyError if one is not here."""
        taken = [self._arrived.pop(key) for key in keys]
        self._of.subtract(arrived.push.worker for arrived in taken)
        self._pushes = None if self._arrived else []
        self.changes += 1
        return taken

    def clear(self) -> None:
        self.take(list(self._arrived))


class Replies(Protocol):
    """Where answers go: the stream of one worker. `param` is given a `ParameterBlock`, `rows` a `ServedTable`."""

    def param(self, cell: Any, waiter: Waiter) -> None: ...

    def rows(self, cell: Any, waiter: Waiter) -> None: ...

    def waiting(self, waiter: Waiter, cell: ServedState, missing: list[int], seconds: float) -> None: ...


@dataclass(eq=False)
class Waiter:
    """A worker that wants this block at `version` or later (see ServedMode.version_for), and with `update` the reduced gradient instead.

    Of a table: `ids` are the rows that are wanted; None asks only whether the version is there.
    """

    to: Replies
    rank: int
    request: int
    version: int
    clock: int
    since: float
    update: bool = False
    before: bool = False
    """It wants the weights of one update ago instead."""
    ids: torch.Tensor | None = None
    place: tuple[int, torch.Tensor] | None = None
    """If in lent memory the rows are to be put, offset and memory itself; None: they are sent."""
    lent: bool = False
    """The answer may lie in memory that this shard lends to the worker."""
    info: PushMetadata | None = None
    """What the worker's numbers are; None: they were not told."""
    held: float = 0.0
    """Seconds that it waited for others,"""
    updated: float = 0.0
    """and for the update, when it was answered."""


class Waiters:
    """In order of arrival, where versions are equal. The caller has the block's lock."""

    def __init__(self) -> None:
        self._of: dict[int, list[Waiter]] = {}
        """By rank."""
        self._at: dict[int, dict[int, None]] = {}
        """By version: the ranks that wait for it."""
        self._reached = -1
        """Versions up to this one were reached when `take` was called last."""

    def __bool__(self) -> bool:
        return bool(self._of)

    def __iter__(self) -> Iterator[Waiter]:
        return (waiter for waiters in self._of.values() for waiter in waiters)

    def of(self, rank: int) -> int:
        """How many of one worker's requests wait."""
        return len(self._of.get(rank, ()))

    def check(self, rank: int, name: str) -> None:
        """Raise WireError if a worker asks again and again for what is still to come: each push would look at all of it."""
        if self.of(rank) >= MOST_WAITING:
            raise WireError(f"worker {rank} waits for {MOST_WAITING} answers of {name} already")

    def add(self, waiter: Waiter) -> None:
        self._of.setdefault(waiter.rank, []).append(waiter)
        self._at.setdefault(waiter.version, {})[waiter.rank] = None

    def clear(self) -> None:
        self._of.clear()
        self._at.clear()

    def drop(self, to: Replies, rank: int) -> None:
        """Nobody waits for answers to worker `rank` by this stream any more."""
        self._keep(rank, [waiter for waiter in self._of.get(rank, ()) if waiter.to is not to])

    def take(self, ranks: Iterable[int] | None, reached: int | None, goes: Callable[[int, int], bool]) -> list[Waiter]:
        """Those that wait no longer: `goes` says it of a rank and its version.

        Only `ranks` are asked about (None: all), and those that wait for a version that has been reached since the last call. `reached`
        is the highest such version; None: what one worker waits for tells nothing of another.
        """
        asked = dict.fromkeys(self._of if ranks is None else ranks)
        if reached is not None:
            if reached > self._reached:
                for version in sorted(version for version in self._at if self._reached < version <= reached):
                    asked.update(self._at[version])
            self._reached = reached
        taken = []
        for rank in asked:
            waiters = self._of.get(rank, ())
            ready = [waiter for waiter in waiters if goes(rank, waiter.version)]
            if ready:
                taken += ready
                self._keep(rank, [waiter for waiter in waiters if waiter not in ready])
        return taken

    def _keep(self, rank: int, waiters: list[Waiter]) -> None:
        for waiter in self._of.pop(rank, ()):
            ranks = self._at.get(waiter.version)
            if ranks is not None:
                ranks.pop(rank, None)
                if not ranks:
                    del self._at[waiter.version]
        for waiter in waiters:
            self.add(waiter)


def format_ranks(ranks: Sequence[int]) -> str:
    """Ranks as text: the first MOST_NAMED, and how many more there are."""
    more = len(ranks) - MOST_NAMED
    return f"{list(ranks[:MOST_NAMED])}" + (f" and {more} more" if more > 0 else "")


class PushBuffer:
    """`size` bytes for a gradient of any block. What was made to look at them as one is kept."""

    def __init__(self, size: int) -> None:
        self._bytes = torch.empty(size, dtype=torch.uint8, device="cpu")
        self._views: dict[tuple[int, str], tuple[torch.Tensor, memoryview]] = {}

    def of(self, block: Block) -> tuple[torch.Tensor, memoryview]:
        """Room for a block's gradient, 1-D, and its bytes."""
        kind = block.nbytes, block.dtype
        if kind not in self._views:
            flat = self._bytes[: block.nbytes].view(getattr(torch, block.dtype))
            self._views[kind] = flat, memory.view(flat)
        return self._views[kind]


class Gradient:
    """A received gradient in a buffer of its worker's, to which it goes back when it has been applied. `own`: it may be written to.

    `raw` are the bytes of `flat`.
    """

    own = True

    def __init__(self, pool: list[PushBuffer], size: int, block: Block) -> None:
        self._pool, self._buffer = pool, pool.pop() if pool else PushBuffer(size)
        self.flat, self.raw = self._buffer.of(block)

    def free(self) -> None:
        """The buffer may take another block."""
        self._pool.append(self._buffer)


class Lent(Gradient):
    """A gradient where its worker has it: the script may look at it until its step is answered."""

    own = False

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat, self.raw = flat, memory.view(flat)

    def free(self) -> None:
        """Nothing: the worker writes there again when it has been answered."""


def free(batch: Sequence[PendingPush]) -> None:
    """Give back what pushes brought."""
    for arrived in batch:
        if arrived.grad is not None:
            arrived.grad.free()


def push_weights(batch: Sequence[PendingPush]) -> list[float] | None:
    """By push: its processes among all that are there, 0 for an absent rank; None where all count alike."""
    there = [arrived.info.processes for arrived in batch if arrived.grad is not None]
    if len(set(there)) < 2:
        return None
    return [0.0 if arrived.grad is None else arrived.info.processes / sum(there) for arrived in batch]


class MetadataCache:
    """Of one shard, told by the threads of all streams."""

    def __init__(self) -> None:
        self._told: dict[int, dict[int, PushMetadata]] = {}
        """By rank, then by number; the oldest first."""
        self._lock = threading.Lock()

    def learn(self, rank: int, number: int, info: PushMetadata, under_way: int = 0) -> None:
        """Later pushes of `rank` name this by `number`; the last four are kept, whatever they are called, and those `under_way`."""
        with self._lock:
            told = self._told.setdefault(rank, {})
            told.pop(number, None)  # told again, it is the newest
            told[number] = info
            if len(told) > KEPT + under_way:
                del told[next(iter(told))]

    def of(self, header: Header) -> PushMetadata | None:
        """What a worker's frame names; None where it was not told."""
        with self._lock:
            return self._told.get(header.worker, {}).get(header.info)

    def count(self, rank: int) -> int:
        """How many are kept of a worker."""
        with self._lock:
            return len(self._told.get(rank, {}))

    def clear(self) -> None:
        with self._lock:
            self._told.clear()


class StalenessBound:
    """Of the block, or table, at `position` of the admission table that `lock` guards. `barrier`: a coming snapshot's step, or None."""

    def __init__(self, mode: ServedMode, admission: Admission, lock: threading.RLock, position: int) -> None:
        self.mode, self._admission, self._lock, self._position = mode, admission, lock, position
        self._missing: tuple[int, dict[int, list[int]]] = (-1, {})
        """The changes of the table after which it was asked, and by step who has not come to it."""
        with lock:
            admission.watch(position)

    def reached(self, barrier: int | None) -> int:
        """The highest step that a worker may begin which has pushed all before it."""
        with self._lock:
            step = self._admission.tally(self._position).lowest + (self.mode.ahead or 0)
        return step if barrier is None else min(step, barrier - 1)

    def goes(self, barrier: int | None) -> Callable[[int, int], bool]:
        """Whether worker `rank` may begin `step`, as things stand. It also waits for what it has pushed itself."""
        with self._lock:
            lowest = self._admission.tally(self._position).lowest

        def may(rank: int, step: int) -> bool:
            if barrier is not None and step >= barrier:
                return False
            with self._lock:
                row = self._admission.rows[rank]
                waiting = row.complete + (self._position in row.open) < step
            return row.left_at is not None or (not waiting and step - lowest <= (self.mode.ahead or 0))

        return may

    def stands_at(self, step: int) -> bool:
        """Has every worker that has not left come to `step`, and none begun it?"""
        with self._lock:
            return self._admission.tally(self._position).all_at(step)

    def beyond(self, step: int) -> bool:
        """Is it too late for a barrier at `step`: may a worker have been let continue to it already?"""
        with self._lock:
            highest = max(self._admission.pushed(self._position).values(), default=0)
        return highest > step or (highest == step and not self.stands_at(step))

    def passed(self, step: int) -> bool:
        """Has a worker pushed `step`, or told that a process before this shard's had it?"""
        with self._lock:
            return max(self._admission.pushed(self._position).values(), default=0) > step

    def awaited(self, rank: int, step: int, barrier: int | None) -> tuple[list[int], int]:
        """Whom worker `rank` waits for to begin `step`, and the step that they have not pushed."""
        needed = barrier if barrier is not None and step >= barrier else step - (self.mode.ahead or 0)
        with self._lock:
            changes, known = self._missing
            if changes != self._admission.changes:
                known = {}
                self._missing = (self._admission.changes, known)
            if needed not in known:
                pushed, live = self._admission.pushed(self._position), self._admission.live()
                known[needed] = sorted(other for other in live if pushed[other] < needed)
        return (known[needed], needed - 1) if known[needed] else ([rank], step - 1)
