"""What a shard notices of the pushes that come: counts, NaN and inf, norms that are too large, staleness, other bytes under a taken key.

The status shows each of them, and the coordinator adds some of them up for the job. Workers look for NaN and inf before they push, if
`training.nonFinite` is skip or refuse. A shard looks again, since a worker may be compromised.

The *staleness* of a push is the updates between the weights that its gradient was computed on and those that it is applied to. The *gap*
is the root mean square of what the weights have moved meanwhile (Barkai et al. 2020). Both are estimates on a few blocks, so that a push
costs the same whatever the size of the model. The staleness is the largest of theirs, and is measured of every push. The gap is of
a fixed sample of elements, and of the pushes that are `compared`. In a steady mode (sync) both are 0, and nothing is measured.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import zlib
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from psjob.layout.blocks import Block
from psjob.rules.stability import RULES, Guard
from psjob.shard.pending import Gradient, PendingPush

DONE = {
    "pass": "was applied (training.nonFinite: skip leaves it out)",
    "skip": "was left out (training.nonFinite is skip)",
    "refuse": "training.nonFinite is refuse (skip leaves such a step out, pass applies it)",
}
"""What became of such a push, by policy."""
WHOLE = 1 << 16
"""Elements of a gradient that are looked at whole at each update."""
PARTS = 8
WORDS = {"pushBytes": "bytes", "updatesLost": "lost"}
"""What is reported -> the counter of a shard."""


@dataclass
class Counters:
    """What the status port tells. `applied`, `dropped` and `lost` count worker-clocks of this shard."""

    pushes: int = 0
    bytes: int = 0
    """Payload of pushes as it travelled, that of early ones included."""
    applied: int = 0
    dropped: int = 0
    duplicates: int = 0
    differing: int = 0
    fenced: int = 0
    lost: int = 0
    first_applied: float | None = None
    crashes: int = 0
    """Processes of this attempt that ended, so that another continued from their memory."""

    def word(self, attempt: int) -> dict[str, Any]:
        """What goes to the coordinator of a shard's self."""
        return {"did": "counts", "attempt": attempt, **{said: getattr(self, name) for said, name in WORDS.items()}}


class JobCounts:
    """Counts begin at 0 with this coordinator and never fall: what a shard counted in an attempt before stays."""

    def __init__(self) -> None:
        self._total = dict.fromkeys(WORDS, 0)
        self._heard: dict[int, tuple[int, dict[str, int]]] = {}
        """By shard: its attempt, and what it has told in it."""

    def heard(self, shard: int, body: Mapping[str, Any]) -> None:
        """A shard tells of its counters, as `word` writes it. Raises ValueError, KeyError or TypeError for anything else."""
        attempt, told = int(body["attempt"]), {said: int(body[said]) for said in WORDS}
        known = self._heard.get(shard, (0, dict.fromkeys(WORDS, 0)))
        if attempt < known[0]:
            return
        before = known[1] if attempt == known[0] else dict.fromkeys(WORDS, 0)
        if any(told[said] < before[said] for said in WORDS):
            raise ValueError(f"shard {shard} counts {told} after {before}; counters never fall")
        self._total = {said: count + told[said] - before[said] for said, count in self._total.items()}
        self._heard[shard] = attempt, told

    def told(self) -> dict[str, int]:
        """The job's counts, as contract.STATUS_KEYS has them."""
        return dict(self._total)


class PushAnomalies(ABC):
    """Of one shard. A push (a worker's step) is counted once, however many blocks show it."""

    def __init__(self) -> None:
        self.count = 0
        self.first: tuple[Any, ...] | None = None
        """Worker, step, and what was found in it."""
        self._last: dict[int, int] = {}
        """By worker: the newest step that is counted."""
        self._lock = threading.Lock()

    def note(self, worker: int, clock: int, *what: Any) -> None:
        """A push was found to be one; the first is a line in the log."""
        with self._lock:
            if self._last.get(worker, -1) >= clock:
                return
            self._last[worker] = clock
            self.count += 1
            first = self.first is None
            if first:
                self.first = (worker, clock, *what)
        if first:
            log.warning("%s", self.sentence())

    @abstractmethod
    def sentence(self) -> str | None:
        """What a user reads about the first; None where there was none. It never changes: it stands in a status."""


class NonFinitePushes(PushAnomalies):
    """What is found in a push: the tensor that held such a number."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = "pass"
        """`training.nonFinite`."""
        self.on_refused: Callable[[str], None] = lambda sentence: None
        """Told of a push that is to end the job."""
        self.names: Sequence[str] = ()
        """Of the model's tensors, in the table's order, then of tables of rows."""

    def named(self, index: int) -> str:
        """The name of a tensor or table."""
        return self.names[index] if 0 <= index < len(self.names) else f"tensor {index}"

    @property
    def passes(self) -> bool:
        """Is an update that is not finite made? Then what is large is looked at in parts."""
        return self.policy == "pass"

    def bad(self, numbers: torch.Tensor, update: int) -> bool:
        """Does this sum or push hold NaN or inf, as far as it is looked at?"""
        looked = looked_at(numbers, update) if self.passes else numbers
        return not is_sound(looked) and first_bad(numbers) is not None

    def told(self) -> dict[str, Any] | None:
        """For the status: as contract.STATUS_KEYS has it."""
        if self.first is None:
            return None
        return {"pushes": self.count, **dict(zip(("worker", "step", "tensor"), self.first, strict=True))}

    def sentence(self) -> str | None:
        if self.first is None:
            return None
        worker, clock, tensor = self.first
        return f"worker {worker}'s gradient of {tensor[:100]} held NaN or inf at step {clock} and {DONE[self.policy]}"

    def left_out(self) -> bool:
        """Is an update that was found to be bad not made? Ends the job where the policy says so; once it is noted."""
        if self.policy == "refuse":
            self.on_refused(self.sentence() or "a gradient held NaN or inf, and training.nonFinite is refuse")
        return not self.passes

    def blame(self, block: Block, batch: Sequence[PendingPush], reduced: torch.Tensor) -> None:
        """An update of `block` is not finite: note the pushes that are to blame. `reduced` may lie in the memory of the first push."""
        over, found = None, False
        for arrived in batch:
            flat = getattr(arrived.grad, "flat", None)
            if not isinstance(flat, torch.Tensor):
                continue
            if flat.data_ptr() == reduced.data_ptr():
                over = arrived
            elif (at := first_bad(flat)) is not None:
                self.note(arrived.push.worker, arrived.push.clock, self._tensor(block, at))
                found = True
        if found or (at := first_bad(reduced)) is None:
            return
        if over is not None:
            self.note(over.push.worker, over.push.clock, self._tensor(block, at))
        else:  # each is finite
            push = batch[0].push
            self.note(push.worker, push.clock, f"{self._tensor(block, at)} (added to those of others)")

    def _tensor(self, block: Block, at: int) -> str:
        inside = [piece for piece in block.pieces if piece.block_offset <= at < piece.block_offset + piece.length]
        return self.named(inside[0].tensor) if inside else f"block {block.index}"


def looked_at(numbers: torch.Tensor, update: int) -> torch.Tensor:
    """What is looked at of a gradient: all of it, or where it is large an eighth of it at an update, each in turn.

    A whole look takes a tenth of the time of a large update. NaN in one weight is found at the latest eight updates later, since it
    stays; NaN all over a gradient, as after a loss that is NaN, at once.
    """
    flat = numbers if numbers.dim() == 1 else numbers.view(-1)
    if flat.numel() <= WHOLE:
        return flat
    size = -(-flat.numel() // PARTS)
    begin = update % PARTS * size
    return flat.narrow(0, begin, min(size, flat.numel() - begin))


def is_sound(numbers: torch.Tensor) -> bool:
    """Is the sum of these finite? If it is, so is each of them; where it is not, the sum of large ones may be to blame."""
    return not numbers.is_floating_point() or math.isfinite(float(numbers.sum()))


def first_bad(numbers: torch.Tensor) -> int | None:
    """The place of the first NaN or inf of a tensor of any shape; None without one."""
    if is_sound(numbers):
        return None
    bad = torch.isfinite(numbers).logical_not_().reshape(-1).nonzero()
    return int(bad[0]) if len(bad) else None


PART = 1024
"""Elements that are summed in float32 before their sums are added in float64."""


class PushNorms(PushAnomalies):
    """What is found in a push: the block or table that was too large, and its norm; None where it held NaN or inf."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit

    def bounded(self, worker: int, clock: int, name: str, numbers: torch.Tensor) -> torch.Tensor:
        """`numbers`, a gradient of any shape, or another tensor whose 2-norm is the limit. One that holds NaN or inf gives zeros."""
        norm = norm_of(numbers)
        if norm is not None and norm <= self.limit:
            return numbers
        self.note(worker, clock, name, norm)
        if norm is None:
            return torch.zeros_like(numbers)
        # In half precision the factor itself could be lost.
        wide = numbers.float() if numbers.dtype in (torch.float16, torch.bfloat16) else numbers
        return (wide * (self.limit / norm)).to(numbers.dtype)

    def told(self) -> dict[str, Any] | None:
        """For the status: as contract.STATUS_KEYS has it."""
        if self.first is None:
            return None
        return {"pushes": self.count, **dict(zip(("worker", "step", "of", "norm"), self.first, strict=True))}

    def sentence(self) -> str | None:
        if self.first is None:
            return None
        worker, clock, name, norm = self.first
        was = "held NaN or inf and was left out" if norm is None else f"had a norm of {norm:.4g} and was scaled down to it"
        return f"worker {worker}'s push of {name} at step {clock} is beyond training.maxPushNorm {self.limit:g}: it {was}"


def norm_of(numbers: torch.Tensor) -> float | None:
    """The 2-norm, to about a millionth of it, also where squares are beyond float32; None of what holds NaN or inf."""
    flat = numbers.reshape(-1)
    if not len(flat):
        return 0.0
    squares = squares_of(flat)
    if math.isfinite(squares) and squares > 1e-30:
        return math.sqrt(squares)
    largest = float(flat.abs().max())
    if not math.isfinite(largest):
        return None
    if largest == 0.0:
        return 0.0
    return largest * math.sqrt(squares_of(flat.float() / largest if flat.dtype != torch.float64 else flat / largest))


def squares_of(gradient: torch.Tensor) -> float:
    """Sum of the squares of a flat tensor, exact to about a millionth of it: float32 within parts, float64 between them."""
    flat = gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient
    whole = len(flat) // PART * PART
    total = 0.0
    if whole:
        parts = flat[:whole].view(-1, 1, PART)
        total = float(torch.bmm(parts, parts.transpose(1, 2)).sum(dtype=torch.float64))
    if whole < len(flat):
        rest = flat[whole:].double()
        total += float(rest.dot(rest))
    return total


log = logging.getLogger("psjob.shard")


BLOCKS = 4
"""Blocks of a shard that are looked at, spread over all of them."""
ELEMENTS = 1024
"""Elements of a shard that are looked at, spread over those blocks."""
RUN = 8
"""Neighbours that are looked at together: half a cache line."""
FIRST = 256
"""Versions of a block at its beginning of which every push is compared."""
TOGETHER = 8
"""Versions in a row that are compared or not: the guard's pairs are of pushes that overlap."""
STALENESS_EDGES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)
GAPS = tuple(step * 10.0**power for power in range(-7, 2) for step in (1, 3))


def compared(version: int) -> bool:
    """Are weights of this version kept when a worker is sent them, to see how far they have moved when its push comes?

    Of the first ones all are, so that a learning rate that is too high is seen soon. Then an eighth are, by squares of a place times the
    golden section. These fall evenly on workers that come in turn, however many they are (Weyl 1916).
    """
    return version < FIRST or (version // TOGETHER) ** 2 * 2654435769 % 2**32 < 2**32 // 8


class StalenessMetrics:
    """Staleness and gap of pushes that counted here. One is seen when the last of `blocks`, those looked at, has taken its part."""

    def __init__(self, blocks: int, guard: Guard | None) -> None:
        self.guard = guard
        self._blocks = blocks
        self._staleness, self._gap = Histogram(STALENESS_EDGES), Histogram(GAPS)
        self._began = time.monotonic()
        self._open: dict[tuple[int, int], _Seen] = {}
        """By rank and clock."""
        self._lock = threading.Lock()

    def told(self) -> dict[str, Any]:
        """The histograms, as contract.STATUS_KEYS has them."""
        with self._lock:
            return {"staleness": self._staleness.told(), "gap": self._gap.told()}

    def word(self, attempt: int) -> dict[str, Any]:
        """What goes to the coordinator."""
        return {"did": "staleness", "attempt": attempt, "began": self._began, **self.told()}

    def add(self, rank: int, clock: int, part: _Seen, hyperparameters: Mapping[str, float | bool]) -> None:
        """A block has taken its part of a push."""
        with self._lock:
            whole = self._open.setdefault((rank, clock), _Seen(part.staleness))
            whole.take(part)
            if whole.blocks < self._blocks:
                return
            del self._open[rank, clock]
            self._staleness.see(whole.staleness)
            if whole.elements:
                self._gap.see(math.sqrt(whole.squares / whole.elements))
            warning = self.guard.see(whole.staleness, whole.agreed, whole.moved, hyperparameters) if self.guard is not None else None
        if warning:
            log.warning("%s", warning)


@dataclass
class _Seen:
    """What blocks have shown of a push: sums over their samples."""

    staleness: int
    blocks: int = 0
    squares: float = 0.0
    elements: int = 0
    agreed: float = 0.0
    moved: float = 0.0

    def take(self, part: _Seen) -> None:
        self.staleness = max(self.staleness, part.staleness)
        self.blocks += 1
        self.squares += part.squares
        self.elements += part.elements
        self.agreed += part.agreed
        self.moved += part.moved


class Sample(NamedTuple):
    """`runs` of `length` elements, the first ones of every `step`."""

    runs: int
    length: int
    step: int

    @classmethod
    def of(cls, elements: int, wanted: int) -> Sample:
        """About `wanted` of so many elements, spread evenly."""
        if elements <= wanted:
            return cls(1, elements, elements)
        runs = max(1, wanted // RUN)
        # An odd step: one that divides the rows of a matrix would meet the same columns again and again.
        return cls(runs, min(RUN, elements), max(RUN, (elements // runs - 1) | 1))

    def of_block(self, whole: torch.Tensor) -> torch.Tensor:
        """These elements of a 1-D tensor, a view of two dimensions."""
        return whole.as_strided((self.runs, self.length), (self.step, 1))


class BlockStaleness:
    """One block's part; called with its lock held."""

    def __init__(self, staleness: StalenessMetrics, sample: Sample) -> None:
        self._sight, self._sample = staleness, sample
        self._sent: dict[int, tuple[int, torch.Tensor]] = {}
        """By rank: the last version that is compared and that it was answered with, and its weights."""
        self._first: tuple[int, torch.Tensor, torch.Tensor] | None = None
        """An earlier gradient, what it was computed on, and the number of updates before it was applied."""

    def answered(self, rank: int, weights: torch.Tensor, version: int) -> None:
        """This worker's next gradient is of these weights."""
        if compared(version):
            self._sent[rank] = version, self._sample.of_block(weights).to(torch.float64, copy=True)

    def counted(self, batch: Sequence[PendingPush], weights: torch.Tensor, n: int, group: int) -> None:
        """These pushes make the update that follows the first `n`; `weights` are those before it."""
        for arrived in batch:
            push, grad = arrived.push, arrived.grad
            if not isinstance(grad, Gradient) or push.base is None:
                continue
            seen = _Seen(n - push.base)
            version, sent = self._sent.get(push.worker, (None, None))
            if sent is not None and version == push.base:
                seen.squares, seen.elements = _product(gone := self._sample.of_block(weights) - sent, gone), sent.numel()
                if self._sight.guard is not None:
                    seen.agreed, seen.moved = self._pair(self._sample.of_block(grad.flat), sent, push.base, n)
            self._sight.add(push.worker, push.clock, seen, arrived.info.hyperparameters[group])

    def _pair(self, grad: torch.Tensor, sent: torch.Tensor, base: int, n: int) -> tuple[float, float]:
        """⟨Δg, Δw⟩ and ⟨Δw, Δw⟩ to an earlier gradient that these weights know nothing of."""
        if self._first is None or base > self._first[0]:
            self._first = (n, grad.to(torch.float64, copy=True), sent)
            return 0.0, 0.0
        moved = sent - self._first[2]
        return _product(grad - self._first[1], moved), _product(moved, moved)


def watch(blocks: Sequence[Block], rule: str, first: bool) -> tuple[StalenessMetrics, dict[int, BlockStaleness]]:
    """What looks at the pushes of a shard's blocks, and by index its parts in some of them.

    On the `first` shard the learning rate is judged too, where the rule can be.
    """
    looked = blocks[:: max(1, -(-len(blocks) // BLOCKS))]
    staleness = StalenessMetrics(len(looked), Guard(rule) if first and rule in RULES else None)
    return staleness, {block.index: BlockStaleness(staleness, Sample.of(block.length, ELEMENTS // len(looked))) for block in looked}


def _product(x: torch.Tensor, y: torch.Tensor) -> float:
    """⟨x, y⟩, both float64, so that no square overflows."""
    return float(x.view(-1).dot(y.view(-1)))


EDGES = {"staleness": STALENESS_EDGES, "gap": GAPS}


class StalenessHistogram:
    """Counts begin at 0 with this coordinator and never fall: what a shard saw before it began anew stays."""

    def __init__(self) -> None:
        self._total = {word: Histogram(edges) for word, edges in EDGES.items()}
        self._told: dict[int, tuple[tuple[int, float], dict[str, Histogram]]] = {}
        """By shard: when it began to look (its attempt, and a time of that process), and what it has seen since."""

    def heard(self, shard: int, body: Mapping[str, Any]) -> None:
        """A shard tells of its pushes, as `StalenessMetrics.word` writes it. Raises ValueError, KeyError or TypeError for anything else."""
        began = (int(body["attempt"]), float(body["began"]))
        seen = {name: Histogram.read(edges, body[name]) for name, edges in EDGES.items()}
        known = self._told.get(shard)
        if known is not None and began < known[0]:
            return
        if known is not None:
            old: Mapping[str, Histogram | None] = known[1] if began == known[0] else dict.fromkeys(EDGES)
            self._total = {word: one.plus(seen[word], old[word]) for word, one in self._total.items()}
        self._told[shard] = began, seen

    def told(self) -> dict[str, Any]:
        """The job's histograms, as contract.STATUS_KEYS has them; None each where no shard has told of any (mode sync)."""
        return {word: one.told() if self._told else None for word, one in self._total.items()}


class Histogram:
    """Counts finite numbers of 0 or more; `edges` rise. Not locked."""

    def __init__(self, edges: Sequence[float]) -> None:
        self._edges = tuple(edges)
        self._counts = [0] * (len(edges) + 1)
        self._sum = self._max = 0.0

    def see(self, value: float) -> None:
        """Count it; one that is not finite is left out."""
        if math.isfinite(value):
            self._counts[bisect_left(self._edges, value)] += 1
            self._sum += value
            self._max = max(self._max, value)

    def told(self) -> dict[str, Any]:
        """As contract.STATUS_KEYS has it: buckets are cumulative, and what is above the last edge is only in `count`."""
        below = list(accumulate(self._counts))
        buckets = [[edge, count] for edge, count in zip(self._edges, below, strict=False)]
        return {"count": below[-1], "sum": self._sum, "max": self._max, "buckets": buckets}

    @classmethod
    def read(cls, edges: Sequence[float], told: Mapping[str, Any]) -> Histogram:
        """What `told` said. Raises ValueError if that has other edges, falls, or is not finite; KeyError, TypeError where it is none."""
        found = cls(edges)
        if [edge for edge, _ in told["buckets"]] != list(edges):
            raise ValueError(f"a histogram of {len(told['buckets'])} buckets has other edges than these {len(edges)}")
        below = [0, *(int(count) for _, count in told["buckets"]), int(told["count"])]
        found._counts = [high - low for low, high in pairwise(below)]
        found._sum, found._max = float(told["sum"]), float(told["max"])
        if min(found._counts) < 0 or not (math.isfinite(found._sum) and math.isfinite(found._max)):
            raise ValueError("a histogram falls, or is not finite")
        return found

    def plus(self, new: Histogram, old: Histogram | None = None) -> Histogram:
        """This with what `new` has counted, less what `old` had; all have the same edges."""
        found, less = Histogram(self._edges), old or Histogram(self._edges)
        found._counts = [a + b - c for a, b, c in zip(self._counts, new._counts, less._counts, strict=True)]
        found._sum, found._max = self._sum + new._sum - less._sum, max(self._max, new._max)
        return found


SAMPLE_BYTES = 64
"""Bytes of each of the three parts of a sample."""
UNKNOWN, EMPTY = 0, 1


class PushSamples:
    """Checksums of samples of pushes: the same push that comes again differs from another one under its key.

    Of each worker and block four bytes are kept, of the newest push that was admitted: crc32 over its first, middle and last bytes. A
    whole checksum would cost a push of 4 MiB a millisecond. So other bytes are found if they differ in the sample. Those of a push
    before the newest, of one before the last restore and of rows of tables are not compared.

    `owned` is the number of positions in the admission table."""

    def __init__(self, owned: int) -> None:
        self._owned = owned
        self._kept: dict[int, array[int]] = {}

    def keep(self, rank: int, position: int, gradient: memoryview | None) -> None:
        """A push of these bytes was admitted; None: it has no payload."""
        if rank not in self._kept:
            self._kept[rank] = array("I", bytes(4 * self._owned))
        self._kept[rank][position] = sample(gradient)

    def forget(self, rank: int) -> None:
        """The worker continues at another clock: its newest push is not known."""
        self._kept.pop(rank, None)

    def knows(self, rank: int, position: int) -> bool:
        """Could a push that comes again be compared?"""
        return rank in self._kept and self._kept[rank][position] != UNKNOWN

    def differs(self, rank: int, position: int, gradient: memoryview | None) -> bool:
        """Has a push other bytes than the one that was admitted, as far as that is known?"""
        return self.knows(rank, position) and self._kept[rank][position] != sample(gradient)


def sample(raw: memoryview | None) -> int:
    """The checksum of the sample of a gradient's bytes."""
    if raw is None:
        return EMPTY
    middle = len(raw) // 2
    crc = zlib.crc32(raw[-SAMPLE_BYTES:], zlib.crc32(raw[middle : middle + SAMPLE_BYTES], zlib.crc32(raw[:SAMPLE_BYTES])))
    return crc if crc > EMPTY else EMPTY + 1


NOTICE_SECONDS = 60.0
"""From one line about a worker to the next."""


class DifferingPushes:
    """Each is counted, few are logged. `now` is monotonic seconds."""

    def __init__(self) -> None:
        self._told: dict[int, float] = {}
        self._since: dict[int, int] = {}
        """By rank: how many came since its last line."""

    def came(self, rank: int, clock: int, name: str, now: float) -> None:
        """Worker `rank` pushed step `clock` of a block or table called `name` again, with other bytes."""
        self._since[rank] = self._since.get(rank, 0) + 1
        if rank in self._told and now - self._told[rank] < NOTICE_SECONDS:
            return
        more = f" ({self._since[rank]} such pushes since the last line)" if rank in self._told else ""
        self._told[rank], self._since[rank] = now, 0
        log.error(
            "worker %d pushed step %d of %s again with other bytes than those that count; the new ones are left out%s. A process that was "
            "started again may compute other bits (a GPU's atomics do); from one process this is a fault",
            rank, clock, name, more,
        )  # fmt: skip
