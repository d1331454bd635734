"""What a shard has of its blocks, in memory that outlives its process: weights, state tensors, versions, and who may speak.

Each line says which failure it survives, as of a process that is killed between any two instructions:

- A block's tensors are updated in place. Before that they are copied to a slab of the updating thread, and `BUSY` names the slab and the
  version. Killed in the update: the copy is put back, and the update is made again from pushes that their workers still have.
- After it, the block's counts are written to the record of the new version, of two in turn; then `VERSION` is raised by one store. Killed
  before that store: as above. Killed after it: the block has the new version, whatever `BUSY` says.
- An answer goes out after that store only, so no worker has seen a version that is not there.
- `SERVES` is 0 while blocks are set up or restored: then nothing can be continued from.

Only sync is covered, where a version is a clock: a push that is not in a block's version was answered to nobody, and comes again.

If a store has its memory from, if that is to outlive its process: from the keeper, or from a process before this one."""

from __future__ import annotations

import json
import logging
import struct
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from psjob.layout import memory
from psjob.layout.blocks import Block
from psjob.layout.memory import LentSpan
from psjob.rules.base import BlockState
from psjob.shard.deduplication import taken_by
from psjob.shard.keeper import BEATS, PROGRESS, SERVES, SILENCE, STATE, WEIGHTS, Keeping, LeftMemory
from psjob.shard.push_metrics import Counters
from psjob.wire.shared_memory import Region, whole_pages


class Outliving:
    """`keeping` is the way to the keeper; None: this process has none."""

    def __init__(self, keeping: Keeping | None) -> None:
        self._keeping = keeping
        self.found: LeftMemory | None = None
        """What a process before this one has left, until it is taken up."""

    @property
    def possible(self) -> bool:
        """Is there a keeper?"""
        return self._keeping is not None

    def memory(
        self, said: Mapping[str, Any], places: LentSpan, blocks: Sequence[Block], workers: int, slots: tuple[str, ...]
    ) -> StateMemory | None:  # fmt: skip
        """That of a store whose blocks, with state tensors of these names, lie at `places`; None: nobody holds it."""
        held, self.found = self.found, None
        if held is not None:
            return StateMemory(*held.take(), places, blocks, slots)
        if self._keeping is None:
            return None
        try:
            weights = self._keeping.lend(WEIGHTS, places.size)
            state = self._keeping.lend(STATE, StateMemory.room(said, places, len(blocks), workers, len(slots)))
        except OSError:
            self.drop()  # one of two would stay there for nothing
            self._keeping = None
            return None
        return StateMemory.begin(weights, state, said, places, blocks, workers, slots)

    def drop(self) -> None:
        """What the keeper holds is not what this process serves."""
        if self._keeping is not None:
            self._keeping.drop()


WHICH, TOLD, BLOCKS, WORKERS, SNAPSHOT, CLIP, FACTOR = range(SILENCE + 1, SILENCE + 8)
"""More words of the head: which of two texts holds; bytes of a text; how many blocks and workers there are; the highest snapshot's number;
the update whose norm was clipped last, plus one; by what factor.
"""
COUNTERS: Final = 16
"""The first word of the counters."""
MICRO: Final = 1e6
HEAD: Final = 4096
WORD: Final = 8
RANK_WORDS: Final = 3
"""Of a rank: its incarnation, and the clock from which on it is absent (-1: it has not left)."""
BLOCK_WORDS: Final = 8
VERSION, BUSY = 0, 1
RECORD: Final = 4096
"""Bytes for the counts of a block."""
END: Final = b"\0"
SPARE: Final = 4096
"""Bytes by which the text may grow: its numbers."""
SLABS: Final = 64
"""Threads that may update blocks at one time and keep a copy."""
NO_SLAB: Final = SLABS


log = logging.getLogger("psjob.shard")


class Untaken(Exception):
    """What a process has left in memory is not all that another one needs."""


class StateMemory:
    """Of the blocks of one layout. `weights` holds them where `span` says, `region` all else. Raises OSError if there is no memory.

    Its methods may be called by any thread, those of a block with the block's lock held.
    """

    def __init__(self, weights: Region, region: Region, span: LentSpan, blocks: Iterable[Block], slots: tuple[str, ...]) -> None:
        self.weights, self.region, self.span, self.slots = weights, region, span, slots
        self._raw, self._words = memoryview(region.buffer(0, region.size)).cast("B"), region.words(0, HEAD // WORD)
        self._places = _Places(self._words[TOLD], self._words[BLOCKS], self._words[WORKERS], span.size, len(slots), _largest(span))
        self._ranks = region.words(HEAD, (self._places.blocks - HEAD) // WORD)
        self.blocks = {block.index: BlockMemory(self, block, at) for at, block in enumerate(blocks)}
        self._own = threading.local()
        self._taken = 0
        self._serves = False
        self._unplaced: set[int] = set()
        """Blocks that lie elsewhere, or whose counts do not fit."""
        self._lock = threading.Lock()

    @classmethod
    def room(cls, told: Mapping[str, Any], span: LentSpan, blocks: int, workers: int, slots: int) -> int:
        """Bytes of `region`; most of them are never touched."""
        return _Places(len(_text(told)) + SPARE, blocks, workers, span.size, slots, _largest(span)).size

    @classmethod
    def begin(
        cls, weights: Region, region: Region, told: Mapping[str, Any], span: LentSpan, blocks: Iterable[Block], workers: int,
        slots: tuple[str, ...],
    ) -> StateMemory:  # fmt: skip
        """In a new region of `room` bytes, which is all zeros."""
        blocks = list(blocks)
        words = region.words(0, HEAD // WORD)
        words[TOLD], words[BLOCKS], words[WORKERS] = len(_text(told)) + SPARE, len(blocks), workers
        made = cls(weights, region, span, blocks, slots)
        made.tell(told)
        return made

    # -- of the whole --------------------------------------------------------------------------

    def serve(self, serves: bool) -> None:
        """Can another process continue from here?"""
        with self._lock:
            self._serves = serves
            self._words[SERVES] = serves and not self._unplaced

    def give_up(self) -> None:
        """Its blocks are served from elsewhere. The memory goes with the last who uses it, and not when a collector finds a circle."""
        self.blocks = {}

    def place(self, block: int, placed: bool) -> None:
        """Is all of a block here? Nobody can continue while one is not."""
        if placed == (block not in self._unplaced):
            return
        with self._lock:
            (self._unplaced.discard if placed else self._unplaced.add)(block)
            self._words[SERVES] = self._serves and not self._unplaced
        if not placed:
            log.info("block %d does not fit in memory that outlives this process: a crash restores this shard from a checkpoint", block)

    def tell(self, told: Mapping[str, Any]) -> None:
        """Put another text in place of the one before: what it says of the whole, as JSON."""
        text, other = _text(told), 1 - self._words[WHICH]
        if len(text) > self._words[TOLD]:
            raise ValueError(f"{len(text)} bytes do not fit in {self._words[TOLD]}")
        at = self._places.texts + other * self._words[TOLD]
        self._raw[at : at + self._words[TOLD]] = text.ljust(self._words[TOLD])
        self._words[WHICH] = other

    def count(self, counters: Counters, complete: int) -> None:
        """Keep what was counted. `complete`: clocks of all workers that are complete."""
        first = 0 if counters.first_applied is None else int(counters.first_applied * MICRO)
        numbers = (counters.pushes, counters.bytes, counters.applied, counters.dropped, counters.duplicates, counters.differing,
                   counters.fenced, counters.lost, first, complete, counters.crashes)  # fmt: skip
        for at, number in enumerate(numbers, COUNTERS):
            self._words[at] = number
        if not self.blocks:  # what has none makes no update: that it lives is all that it can show
            self._words[PROGRESS] += 1

    def counted(self, complete: int) -> Counters:
        """What was kept, brought to where the blocks are: so many clocks are complete now. The process that kept it has crashed."""
        found = Counters(*self._words[COUNTERS : COUNTERS + 8])
        first, then, crashes = self._words[COUNTERS + 8 : COUNTERS + 11]
        found.crashes = self._words[COUNTERS + 10] = crashes + 1
        found.first_applied = first / MICRO if first else None
        found.applied += complete - then
        return found

    def beat(self, silence: float) -> None:
        """This process is alive. After so many seconds without another sign it hangs."""
        self._words[SILENCE] = int(silence * 1000)
        self._words[BEATS] += 1

    def note_snapshot(self, number: int) -> None:
        """Such a number was given to a snapshot."""
        self._words[SNAPSHOT] = max(self._words[SNAPSHOT], number)

    @property
    def highest_snapshot(self) -> int:
        """The highest number that was noted."""
        return self._words[SNAPSHOT]

    def note_clip(self, version: int, factor: float) -> None:
        """The gradient of an update is clipped by a factor."""
        self._words[CLIP] = 0
        (self._words[FACTOR],) = struct.unpack("q", struct.pack("d", factor))
        self._words[CLIP] = version + 1

    @property
    def clip(self) -> tuple[int, float] | None:
        """The update that was noted last, and its factor."""
        (factor,) = struct.unpack("d", struct.pack("q", self._words[FACTOR]))
        return (self._words[CLIP] - 1, factor) if self._words[CLIP] else None

    def note_rank(self, rank: int, incarnation: tuple[int, int], left_at: int | None) -> None:
        """Who of a rank may speak, and since when it is absent."""
        at = rank * RANK_WORDS
        self._ranks[at + 2] = -1 if left_at is None else left_at
        self._ranks[at + 1] = 0  # an older pair than either, if it is seen now
        self._ranks[at] = incarnation[0]
        self._ranks[at + 1] = incarnation[1]

    def rows(self) -> dict[str, dict[str, Any]]:
        """The table of what was taken, as `Admission.load` has it."""
        words = self._ranks[: self._words[WORKERS] * RANK_WORDS].tolist()
        ranks = {
            rank: ((start, rewinds), None if left < 0 else left)
            for rank, (start, rewinds, left) in enumerate(zip(words[::3], words[1::3], words[2::3], strict=True))
        }
        return taken_by([block.version for block in self.blocks.values()], ranks)

    # -- of a block's update -------------------------------------------------------------------

    def slab(self) -> int:
        """The calling thread's own; NO_SLAB where too many have one."""
        found: int | None = getattr(self._own, "slab", None)
        if found is None:
            with self._lock:
                found = self._own.slab = min(self._taken, NO_SLAB)
                self._taken += 1
        return found

    def lent(self, region: Region, offset: int, block: Block) -> torch.Tensor:
        """A block's worth of memory."""
        return memory.lent(region, offset, block.length, block.dtype)


class BlockMemory:
    """Of the block at a position of its shard."""

    def __init__(self, whole: StateMemory, block: Block, position: int) -> None:
        self._whole, self.block, places = whole, block, whole._places
        self._words = whole.region.words(places.blocks + position * BLOCK_WORDS * WORD, BLOCK_WORDS)
        self._records = places.records + position * 2 * RECORD
        self.weights = whole.lent(whole.weights, whole.span.offsets[block.index], block)
        self._slots: dict[str, torch.Tensor] = {}
        self._copies: dict[int, dict[str, torch.Tensor]] = {}
        """By slab."""

    @property
    def version(self) -> int:
        """Updates that the block has had."""
        return self._words[VERSION]

    def room(self, name: str) -> torch.Tensor:
        """Where a state tensor lies. Raises ValueError for one that the rule does not name."""
        found = self._slots.get(name)
        if found is None:
            whole = self._whole
            at = whole._places.slots + whole.slots.index(name) * whole.span.size + whole.span.offsets[self.block.index]
            found = self._slots[name] = whole.lent(whole.region, at, self.block)
        return found

    def begin(self, state: BlockState) -> None:
        """The block is about to be updated: keep a copy."""
        slab = self._whole.slab()
        if slab < NO_SLAB:
            copies = self._copies_in(slab)
            copies[""].copy_(state.weights)
            for name, slot in state.slots.items():
                copies[name].copy_(slot)
        self._words[BUSY] = self._words[VERSION] * (SLABS + 1) * 2 + slab * 2 + 1

    def commit(self, state: BlockState, version: int, skipped: bool) -> None:
        """The block has come to `version`: its tensors are what they are to be."""
        placed = state.weights is self.weights and all(self._slots.get(name) is slot for name, slot in state.slots.items())
        record = _text({**state.counts(), "slots": sorted(state.slots), "skipped": skipped}) + END
        placed = placed and len(record) <= RECORD
        if not placed:
            self._whole.place(self.block.index, False)
            return
        at = self._records + version % 2 * RECORD
        self._whole._raw[at : at + len(record)] = record
        self._words[VERSION] = version
        self._words[BUSY] = 0
        self._whole.place(self.block.index, True)
        self._whole._words[PROGRESS] = version

    def found(self) -> tuple[BlockState, int, bool]:
        """The block as another process has left it: its state, its version, and whether the last update was skipped.

        Raises Untaken if it was being updated and no copy of it was kept.
        """
        version, busy = self._words[VERSION], self._words[BUSY]
        at = self._records + version % 2 * RECORD
        said = json.loads(bytes(self._whole._raw[at : at + RECORD]).partition(END)[0])
        slots = {name: self.room(name) for name in said["slots"]}
        if busy and busy // 2 // (SLABS + 1) == version:
            slab = busy // 2 % (SLABS + 1)
            if slab == NO_SLAB:
                raise Untaken(f"block {self.block.index} was being updated by one thread too many")
            copies = self._copies_in(slab)
            self.weights.copy_(copies[""])
            for name, slot in slots.items():
                slot.copy_(copies[name])
        self._words[BUSY] = 0
        return BlockState.of(self.weights, slots, said), version, bool(said["skipped"])

    def _copies_in(self, slab: int) -> dict[str, torch.Tensor]:
        copies = self._copies.get(slab)
        if copies is None:
            whole = self._whole
            at = whole._places.slabs + slab * whole._places.slab
            copies = self._copies[slab] = {
                name: whole.lent(whole.region, at + number * whole._places.largest, self.block)
                for number, name in enumerate(("", *whole.slots))
            }
        return copies


class _Places:
    """Where everything lies in the region."""

    def __init__(self, told: int, blocks: int, workers: int, span: int, slots: int, largest: int) -> None:
        self.largest = largest
        self.blocks = HEAD + whole_pages(workers * RANK_WORDS * WORD)
        self.records = self.blocks + whole_pages(blocks * BLOCK_WORDS * WORD)
        self.texts = self.records + blocks * 2 * RECORD
        self.slots = whole_pages(self.texts + 2 * told)
        self.slabs = self.slots + slots * span
        self.slab = (1 + slots) * largest
        self.size = self.slabs + SLABS * self.slab


def told(region: Region) -> dict[str, Any]:
    """The text of a region that a process before this one has made."""
    words = region.words(0, HEAD // WORD)
    size = words[TOLD]
    at = _Places(size, words[BLOCKS], words[WORKERS], 0, 0, 0).texts + words[WHICH] * size
    found: dict[str, Any] = json.loads(bytes(memoryview(region.buffer(at, size)).cast("B")))
    return found


_ENCODER: Final = json.JSONEncoder(separators=(",", ":"))


def _text(told: Mapping[str, Any]) -> bytes:
    return _ENCODER.encode(told).encode()


def _largest(span: LentSpan) -> int:
    return whole_pages(max((block.nbytes for block in span.layout.blocks), default=1))
