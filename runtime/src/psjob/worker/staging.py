"""Blocks of a model that lies on a GPU, in this host's memory: gradients copied out of where they were computed, weights copied in.

Each direction copies on a stream of its own, beside what computes, and events say when a block is copied. Gradients leave all together,
and answers come back as they land. On the CPU the same calls copy at once.

The memory of the gradients is lent to the shards of this host, so a gradient crosses the bus and no byte of it is sent. If the shards
lend their answers too, the GPU copies them from there. Memory that a GPU copies from or to is page-locked, so that the copy runs beside
the host. If a driver or a limit forbids that, the copy takes longer, and a log line says so.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, TypeAlias

import torch

from psjob.layout import devices, memory
from psjob.layout.blocks import Block, Layout
from psjob.layout.memory import LentSpan
from psjob.layout.packing import Pack
from psjob.wire import shared_memory
from psjob.wire.frame import Header, WireError
from psjob.wire.shared_memory import Offer, Region
from psjob.wire.unauthenticated import one_line
from psjob.worker import exits
from psjob.worker.exchange import ModelMemory
from psjob.worker.sharing import Sharing, joined_spans, lent_pack

log = logging.getLogger("psjob.worker")


class Staging(ModelMemory):
    """Between the model and the wire. The copies of a block continue while others are sent or received.

    `device` is where the parameters lie. `lands`: answers are staged too (a GPU needs that; else they land in the model itself).

    `stage`: there is memory only for the blocks of this stage; None: for all.
    """

    def __init__(self, layout: Layout, device: torch.device, lands: bool | None = None, stage: int | None = None) -> None:
        self.layout, self.device = layout, device
        self._apart = device.type == "cuda"
        """Copies are only begun by the call that asks for them."""
        self._named = devices.named(device)
        self.lands = device.type == "cuda" if lands is None else lands
        self._out, self._into = StagingSide(device), StagingSide(device)
        self.span = LentSpan.of(layout, shared_memory.PAGE)
        self.region: Region | None = None
        """The memory of the gradients, where it may be lent."""
        self.page_lock = PageLock(device)
        blocks = layout.of_stage(stage)
        if self.lands and shared_memory.possible():
            self._lend(blocks)
        self.lends = self.region is not None
        self._gradients = (
            arena(layout, device, blocks)
            if self.region is None
            else {block.index: lent_pack(self.span, self.region, block.index) for block in blocks}
        )
        self._weights: dict[int, Pack] = {}
        """By block, where an answer is received that does not lie in lent memory; made when the first one comes."""
        self._making = threading.Lock()
        self._pieces = pieces(layout, self._gradients)
        self._copied: dict[int, torch.cuda.Event | None] = {}
        self._landed: dict[int, torch.cuda.Event | None] = {}

    def share(self, layout: Layout, steady: bool) -> Sharing:
        return super().share(layout, steady) if self.region is None else StagedSharing(self, self.region, steady)

    def _lend(self, blocks: Sequence[Block]) -> None:
        try:
            self.region = Region.lend(self.span.size)
        except OSError as error:
            log.warning("no memory can be lent on this host, so blocks go over TCP: %s", error)
            return
        self.page_lock.lock(self.region, [self.span.pages(block.index) for block in blocks], "gradients", read_only=False)

    # -- gradients -----------------------------------------------------------------------------

    def put(self, row: int, gradient: torch.Tensor | None, only: int | None = None, into: Pieces | None = None) -> None:
        """Begin to copy a gradient (None: zeros) to its places in all blocks, or in block `only`; `into`: not those where it leaves."""
        source = None if gradient is None else gradient.detach().reshape(-1)
        with self._out.beside(source):
            for block, view, start in (self._pieces if into is None else into)[row]:
                if only is not None and block != only:
                    continue
                if source is None:
                    view.zero_()
                else:
                    view.copy_(source[start : start + view.numel()], non_blocking=self._apart)

    def gather(self, block: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Begin to copy all of a block; gradients by table row, None: zeros."""
        for row in dict.fromkeys(piece.tensor for piece in self.layout.blocks[block].pieces):
            self.put(row, gradients[row], only=block)
        self.copied(block)

    def copied(self, block: int) -> None:
        """All of the block has been put; what comes after is not waited for."""
        self._copied[block] = self.all_put()

    def all_put(self) -> torch.cuda.Event | None:
        """Comes to pass when all is copied that was put; None: it is."""
        return self._out.event()

    def gradient(self, block: int) -> torch.Tensor:
        """The block's gradient, 1-D; waits until it is copied."""
        _wait_for(self._copied.get(block))
        return self._gradients[block].flat

    def differs(self, block: int, gradients: Sequence[torch.Tensor | None]) -> int | None:
        """The first table row whose gradient is not, bit by bit, what was copied of it to the block; None: no row. Waits for a device."""
        flat = self.gradient(block)
        for piece in self.layout.blocks[block].pieces:
            copied, now = flat[piece.block_offset : piece.block_offset + piece.length], gradients[piece.tensor]
            if now is None:
                same = not bool(memory.bits(copied).any())
            else:
                part = now.detach().reshape(-1)[piece.tensor_offset : piece.tensor_offset + piece.length]
                same = torch.equal(memory.bits(copied), memory.bits(memory.contiguous_values(part)))
            if not same:
                return piece.tensor
        return None

    def keep_back(self) -> None:
        """What the calling thread begins from now on changes a gradient only after its copy is complete."""
        self._out.join()

    def leaving(self, block: int, pack: Pack, sources: Sequence[torch.Tensor | None]) -> torch.Tensor:
        return self.gradient(block)

    # -- weights -------------------------------------------------------------------------------

    def weights(self, block: int) -> torch.Tensor:
        """Where an answer is received; waits until the one before has been copied on."""
        self.release(block)
        with self._making:
            if block not in self._weights:
                self._weights |= arena(self.layout, self.device, [self.layout.blocks[block]])
        return self._weights[block].flat

    def release(self, block: int) -> None:
        _wait_for(self._landed.get(block))

    def expect(self) -> None:
        """Weights that land from now on overwrite the model's only after what the calling thread has begun."""
        self._into.fence()

    def pieces(self, pack: Pack, targets: Sequence[torch.Tensor]) -> None:
        """None: what lands is copied and told on, block by block."""
        return

    def landing(self, block: int, pack: Pack, targets: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        if not self.lands:
            return super().landing(block, pack, targets)
        flat = self.weights(block)
        return flat, lambda: self.take(block, targets)

    def take(self, block: int, targets: Sequence[torch.Tensor | None], source: Pack | None = None) -> None:
        """Begin to copy a received block into the model, from `source` or else from where `weights` had it received."""
        with self._into.behind_fence():
            (source or self._weights[block]).scatter(targets, non_blocking=self._apart)
        self._landed[block] = self._into.event()

    def arrive(self, block: int, targets: Sequence[torch.Tensor], source: Pack) -> None:
        """The block's answer lies in `source`, which its shard lends: begin to copy it into the model."""
        self.take(block, targets, source)

    def settle(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            event = self._landed.get(block)
            if event is not None:
                event.wait(torch.cuda.current_stream(self._into.device))

    def rest(self) -> None:
        """Wait until no copy is under way. A device that is lost copies nothing more; a log line says so."""
        try:
            with exits.device_answers(self._named):
                for event in [*self._copied.values(), *self._landed.values()]:
                    _wait_for(event)
        except RuntimeError as error:
            log.warning("a copy from or to %s has failed: %s", self.device, one_line(error, 300))
            if (lost := devices.lost_device(error)) is not None:
                exits.note_lost_device(lost.fact(self._named), lost.step)


class StagedSharing(Sharing):
    """What a worker whose gradients are staged in `region` and the shards of its host lend each other.

    A place of a gradient is written when the answer to the push before has come. In a steady mode a shard changes a lent answer only after
    this worker's next push of its block, and that push waits until the answer is copied (`Staging.release`).
    """

    def __init__(self, staging: Staging, region: Region, steady: bool) -> None:
        super().__init__(staging.layout, steady)
        self._staging, self._region = staging, region
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._staged: set[int] = set()
        """Blocks of the clock in hand that were announced: a shard may be reading them, so they stay as they are."""
        self._scaled: set[int] = set()
        self._shown: dict[int, Region] = {}
        """By shard, the memory that it lends."""
        self._answers: dict[int, tuple[Pack, int]] = {}
        """By block, over the memory of its shard, and which shard that is."""
        self._unlocked: dict[int, list[tuple[int, int]]] = {}
        """By shard, the pieces that are page-locked when its first answer comes: its pages are there then, made by the shard."""
        self._targets: Sequence[torch.Tensor] = ()

    def take(self, index: int, blocks: Sequence[int], offer: Offer) -> Region:
        region, known = self.borrow(index, offer, self._region), self._shown.get(index)
        if not self.steady or (known is not None and known.identity == region.identity):
            return region
        with self._lock:
            if known is not None:
                self._staging.rest()
                self._staging.page_lock.unlock(known)
            self._unlocked[index] = [self.span.pages(block) for block in blocks]
            self._shown[index] = region
            self._answers.update({block: (lent_pack(self.span, region, block), index) for block in blocks})
        return region

    def adopt(self, parameters: Sequence[torch.Tensor]) -> None:
        """Parameters of a model on a GPU stay where they are."""

    def lay(self, row: int, grad: torch.Tensor) -> None:
        """A gradient is made on the device."""

    def begin(self, grads: Sequence[torch.Tensor | None] | None, scaled: bool) -> None:
        with self._lock:
            self._staged.clear()
            self._scaled.clear()

    def aim(self, targets: Sequence[torch.Tensor]) -> None:
        self._targets = targets

    def stage(self, block: int, grads: Sequence[torch.Tensor | None], scale: float) -> bool:
        flat = self._staging.gradient(block)
        with self._lock:
            if block in self._staged:
                return True
            if scale != 1.0 and block not in self._scaled:
                flat.mul_(scale)
                self._scaled.add(block)
            if self._region.withdrawn:
                return False
            self._staged.add(block)
        return True

    def scaled(self, block: int) -> bool:
        return block in self._scaled

    def land(self, header: Header) -> bool:
        if not self.steady:
            return False
        self.check_place(header)
        if header.block not in self._answers:
            raise WireError(f"PARAM of block {header.block} lies in memory that no shard has lent")
        answer, index = self._answers[header.block]
        if index in self._unlocked:
            with self._lock:
                if pieces := self._unlocked.get(index):
                    self._staging.page_lock.lock(self._shown[index], pieces, f"weights of shard {index}", read_only=True)
                    del self._unlocked[index]
        self._staging.arrive(header.block, self._targets, answer)
        return True

    def refresh(self, block: int) -> None:
        """What the script writes into its parameters is the script's; an answer overwrites all of it."""

    def settle(self, others: int) -> None:
        self._staging.rest()

    def withdraw(self) -> None:
        if os.getpid() == self._pid:  # a fork has no GPU, and its parent's memory stays locked
            self._staging.rest()
            self._staging.page_lock.unlock(self._region)
        self._region.withdraw()


class StagingSide:
    """A stream beside the one that computes; on a device without streams everything is done in its turn."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._fence: torch.cuda.Event | None = None

    @contextmanager
    def beside(self, source: torch.Tensor | None) -> Iterator[None]:
        """Copies from `source` come after what the current stream has begun, and keep its memory until they are through."""
        with torch.no_grad():
            if self._stream is None:
                yield
                return
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream):
                yield
            if source is not None and source.is_cuda:
                source.record_stream(self._stream)

    def join(self) -> None:
        """What the current stream begins from now on comes after what was begun here."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def fence(self) -> None:
        if self._stream is not None:
            self._fence = torch.cuda.current_stream(self.device).record_event()

    @contextmanager
    def behind_fence(self) -> Iterator[None]:
        with torch.no_grad():
            if self._stream is None:
                yield
                return
            if self._fence is not None:
                self._stream.wait_event(self._fence)
            with torch.cuda.stream(self._stream):
                yield

    def event(self) -> torch.cuda.Event | None:
        """Comes to pass when what was begun here is through; None where that is now."""
        return None if self._stream is None else self._stream.record_event()


class PageLock:
    """Memory that is page-locked for a GPU, so that copies from and to it run beside the host. On the CPU nothing is locked."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pid = device, os.getpid()
        self._locked: list[tuple[Region, int]] = []
        """Each piece's region and address. A region that is held here stays mapped."""
        self._lock = threading.Lock()
        self._told: set[bool] = set()
        """Of memory that is only read, and of other memory: a log line has said that it cannot be locked."""

    def lock(self, region: Region, pieces: Sequence[tuple[int, int]], what: str, read_only: bool) -> None:
        """Lock (offset, length) pieces of a region. No copy may span two pieces. If it cannot be done, a log line says so.

        `read_only`: of memory that this process cannot write, which not every device can lock.
        """
        if self._device.type != "cuda":
            return
        for begin, size in joined_spans(sorted(piece for piece in pieces if piece[1]), PORTION):  # a copy must not span two
            if reason := memory.page_lock(region.address + begin, size, self._device, read_only):
                self._tell(what, size, reason, read_only)
                return
            with self._lock:
                self._locked.append((region, region.address + begin))

    def unlock(self, region: Region) -> None:
        """Unlock what was locked of a region. No copy from or to it may be under way."""
        with self._lock:
            mine = [pair for pair in self._locked if pair[0] is region]
            self._locked = [pair for pair in self._locked if pair[0] is not region]
        for _, address in mine:
            memory.page_unlock(address, self._device)

    def _tell(self, what: str, size: int, reason: str, read_only: bool) -> None:
        if read_only in self._told:
            return
        self._told.add(read_only)
        step = (
            "the device cannot lock memory that it only reads"
            if read_only
            else ("check that the driver allows cudaHostRegister in this container, and that its memory limit holds the model once more")
        )
        log.warning(
            "%d bytes of %s cannot be page-locked: %s. Steps take longer, since copies from or to %s hold up the host; %s",
            size, what, reason, self._device, step,
        )  # fmt: skip

    def __del__(self) -> None:
        if self._locked and os.getpid() == self._pid and not sys.is_finalizing():
            for region in [pair[0] for pair in self._locked]:
                self.unlock(region)


PORTION: Final = 256 << 20
"""Bytes that are locked in one call: it holds up all who map memory in this process meanwhile."""


Pieces: TypeAlias = Sequence[Sequence[tuple[int, torch.Tensor, int]]]
"""By row: block, place in its memory, offset in the tensor."""


def pieces(layout: Layout, packs: Mapping[int, Pack]) -> Pieces:
    """The place of each gradient in the memory of `packs`, which has some of the blocks."""
    return [
        [
            (b.index, packs[b.index].flat[p.block_offset : p.block_offset + p.length], p.tensor_offset)
            for b, p in layout.pieces_of(row)
            if b.index in packs
        ]
        for row in range(len(layout.table))
    ]


def arena(layout: Layout, device: torch.device, blocks: Sequence[Block]) -> dict[int, Pack]:
    """A pack a block, by index, each in memory of its own, all in one piece of it; pinned where a GPU copies."""
    edge = 64
    sizes = [-(-block.nbytes // edge) * edge for block in blocks]
    flat = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda", device="cpu")
    packs: dict[int, Pack] = {}
    at = 0
    for block, size in zip(blocks, sizes, strict=True):
        packs[block.index] = Pack(block, flat[at : at + block.nbytes].view(getattr(torch, block.dtype)), layout.table)
        at += size
    return packs


def _wait_for(event: torch.cuda.Event | None) -> None:
    if event is not None:
        event.synchronize()
