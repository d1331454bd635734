"""What a worker and the shards of its host lend each other: its gradients, and their answers.

`Arena` is the worker's memory, with a place for every block. A gradient that the script keeps from step to step (it zeroes it instead of
dropping it) comes to live there, and then no byte is copied. Any other is copied in before its push is announced.

`Mirror` has the shards' answers: every block where it lies in the memory that its shard lends. In a steady mode the model's parameters
live in it: what a shard has updated is in the model without being moved. The shard cannot be written to through it. What a script writes
into its parameters is its own until the next step, as over TCP. Linux tells in /proc/self/pagemap which pages of a private map this
process has written to, and so no longer shares.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch

from psjob.layout import memory
from psjob.layout.blocks import Layout
from psjob.layout.memory import LentSpan
from psjob.layout.packing import Pack
from psjob.process.system import available_memory
from psjob.wire import shared_memory
from psjob.wire.frame import Header, WireError
from psjob.wire.shared_memory import Offer, Region, Window


def lent_pack(span: LentSpan, region: Region, index: int) -> Pack:
    """A block in the place that it has in every region."""
    block = span.layout.blocks[index]
    return Pack(block, memory.lent(region, span.offsets[index], block.length, block.dtype), span.layout.table)


_SEEN = "_psjob_pushed"
"""Set on a gradient that was pushed: where the next step finds it again, the script keeps it."""


class Arena:
    """Used by the script's thread, and by a link's where it pushes again. Nothing in it changes between a push and its answer."""

    def __init__(self, span: LentSpan) -> None:
        self.span = span
        self.region = Region.lend(span.size)
        layout = span.layout
        self.packs = [lent_pack(span, self.region, block.index) for block in layout.blocks]
        self._homes: dict[int, torch.Tensor] = {}
        for row, spec in enumerate(layout.table):
            place = span.place(row)
            if place is not None:
                self._homes[row] = memory.lent(self.region, place, spec.numel, spec.dtype).view(spec.shape)
        self._kept: dict[int, torch.Tensor] = {}
        """Gradients of the script that live here, by row."""
        self._lock = threading.Lock()
        self._staged: set[int] = set()
        """Blocks of the clock in hand that are in their places: a shard may be reading them, so what is pushed again stays as it is."""

    def lay(self, row: int, grad: torch.Tensor) -> torch.Tensor | None:
        """A tensor in the row's place with the values of `grad`, as one that the script keeps; None where it has no place.

        One that was given before, and that the script holds still, is moved out of it.
        """
        home, spec = self._homes.get(row), self.span.layout.table[row]
        place = self.span.place(row)
        if home is None or place is None or self.region.withdrawn or grad.device != home.device or grad.dtype != home.dtype:
            return None
        old = self._kept.pop(row, None)
        if old is not None and old.data_ptr() == home.data_ptr() and not _forgotten(old):
            old.data = old.detach().clone()
        lent = memory.lent(self.region, place, spec.numel, spec.dtype)
        made = torch.empty(0, dtype=lent.dtype, device="cpu")
        made.set_(lent.untyped_storage(), 0, home.shape, home.stride())  # no view: nothing else holds its storage
        made.copy_(grad)
        self._kept[row] = made
        return made

    def begin(self, grads: Sequence[torch.Tensor | None], scaled: bool) -> frozenset[int]:
        """Rows whose gradient lies in its place already. One that is to be pushed `scaled` may not: the script would see the factor."""
        with self._lock:
            self._staged.clear()
        for row, old in list(self._kept.items()):
            if scaled or grads[row] is not old or old.data_ptr() != self._homes[row].data_ptr():
                del self._kept[row]
                if old.data_ptr() == self._homes[row].data_ptr():  # perhaps the script holds it still
                    old.data = old.detach().clone()
        if not scaled:
            for row, grad in enumerate(grads):
                if grad is not None and row not in self._kept and row in self._homes:
                    self._settle(row, grad)
        return frozenset(self._kept)

    def _settle(self, row: int, grad: torch.Tensor) -> None:
        home = self._homes[row]
        if not hasattr(grad, _SEEN):
            setattr(grad, _SEEN, True)
        elif is_alone(grad, home):
            home.copy_(grad)
            grad.data = home
            self._kept[row] = grad

    def stage(self, block: int, grads: Sequence[torch.Tensor | None], scale: float, kept: frozenset[int]) -> bool:
        """Bring a block's gradients into its place, but for the rows that are `kept` there. False: shards do not see them there."""
        pack = self.packs[block]
        with self._lock:
            if block in self._staged or (kept and pack.rows <= kept):
                return True
            pack.gather(grads, kept)
            if scale != 1.0:
                pack.flat.mul_(scale)
            if self.region.withdrawn:
                return False  # the region may have become private before all of it was there
            self._staged.add(block)
        return True

    def withdraw(self) -> None:
        """Nothing that this process writes from now on reaches a shard, which may still hold a push of the clock in hand."""
        self.region.withdraw()


def _forgotten(tensor: torch.Tensor) -> bool:
    """Does nobody but one caller, who was just given its only reference, hold the tensor or its memory?"""
    storage: Any = tensor.untyped_storage()
    return sys.getrefcount(tensor) <= 3 and bool(torch._C._storage_Use_Count(storage._cdata) <= 2)


def is_alone(tensor: torch.Tensor, like: torch.Tensor) -> bool:
    """Could `tensor` have its memory changed for that of `like`, and nobody else see it? Not where other tensors share its memory."""
    if type(tensor.data) is not torch.Tensor or tensor.device != like.device or tensor.dtype != like.dtype or tensor.shape != like.shape:
        return False
    if tensor.layout is not torch.strided or not tensor.is_contiguous() or tensor.is_inference():
        return False
    storage: Any = tensor.untyped_storage()
    whole = not storage.is_shared() and storage.resizable() and storage.nbytes() == tensor.numel() * tensor.element_size()
    return bool(whole and torch._C._storage_Use_Count(storage._cdata) <= 2)  # the tensor, and the object asked here


class Mirror:
    """`window` has the offsets of `span`. A shard's part is empty until `show`."""

    def __init__(self, span: LentSpan) -> None:
        self.span = span
        self.window = Window(span.size)
        self._shown: dict[int, tuple[int, int]] = {}
        """By shard, which memory is shown."""
        self._blocks: set[int] = set()
        self._packs: dict[int, Pack] = {}
        """Over the shards' memory itself: a page of the window may be the script's."""
        self._homes: dict[int, int] = {}
        """By row, the address of a parameter that lives here."""
        self._pagemap = Pagemap(span.page)

    def show(self, index: int, region: Region, blocks: Iterable[int]) -> None:
        """Show what shard `index` lends for its `blocks`. Raises WireError if the model lies in other memory of it.

        The memory under the model's parameters is never changed for another while the script may read it.
        """
        if self._shown.get(index) == region.identity:
            return
        if self._homes:
            raise WireError(f"shard {index} lends other memory than the model lies in")
        self._blocks |= set(blocks)
        self.window.show(region.fd, joined_spans(self.span.pages(block) for block in sorted(blocks)))
        self._shown[index] = region.identity
        self._packs.update({number: lent_pack(self.span, region, number) for number in blocks})

    def adopt(self, parameters: Sequence[torch.Tensor]) -> None:
        """Let each parameter live here whose blocks are all shown, that lies in one piece, and whose memory nobody else uses."""
        layout = self.span.layout
        for row, p in enumerate(parameters):
            place = self.span.place(row)
            if place is None or not all(block.index in self._blocks for block, _ in layout.pieces_of(row)):
                continue
            home = memory.lent(self.window, place, p.numel(), layout.table[row].dtype).view(p.shape)
            if is_alone(p, home):
                p.data = home
                self._homes[row] = home.data_ptr()

    def outside(self, targets: Sequence[torch.Tensor]) -> list[torch.Tensor | None] | None:
        """The targets that do not live here, by row with None for those that do; None: all live here."""
        homes = self._homes
        found = [None if homes.get(row) == target.data_ptr() else target for row, target in enumerate(targets)]
        return None if all(target is None or not target.numel() for target in found) else found

    def shows(self, row: int, target: torch.Tensor) -> bool:
        """Does `target` live here, and hold what the shard holds at this moment?"""
        return self._homes.get(row) == target.data_ptr() and torch.equal(self.held(row).view(target.shape), target)

    def held(self, row: int) -> torch.Tensor:
        """A copy of what the shards hold of a row at this moment, 1-D. The row lives here."""
        spec = self.span.layout.table[row]
        found = torch.empty(spec.numel, dtype=getattr(torch, spec.dtype), device="cpu")
        for block, piece in self.span.layout.pieces_of(row):
            part = self._packs[block.index].flat[piece.block_offset : piece.block_offset + piece.length]
            found[piece.tensor_offset : piece.tensor_offset + piece.length].copy_(part)
        return found

    def untouched(self) -> bool:
        """Has this process written to no page that is shown? Then what lives here is as the shards have it. False too if it is not told."""
        return self._pagemap.own(self.window.address, shared_memory.whole_pages(self.window.size)) == []

    def scatter(self, block: int, targets: Sequence[torch.Tensor | None]) -> None:
        """Copy a block's answer to the targets that are not None."""
        self._packs[block].scatter(targets)

    def settle(self, others: int) -> None:
        """The model stays as it is: what lives here becomes this process's own, where there is memory for that and for `others` alike."""
        pages = [self.span.pages(block) for block in self._blocks] if self._homes else []
        if (1 + others) * sum(size for _, size in pages) < (available_memory() or 0):
            for begin, size in pages:
                self.window.keep(begin, size)

    def refresh(self, block: int) -> None:
        """Forget what the script wrote into parameters that live here: the block is the shard's again."""
        if not self._homes:
            return
        begin, size = self.span.pages(block)
        own = self._pagemap.own(self.window.address + begin, size)
        for offset, length in [(0, size)] if own is None else own:  # what is not told is read anew as a whole
            self.window.forget(begin + offset, length)


_PATH: Final = "/proc/self/pagemap"
_ENTRY: Final = 8
"""Bytes that the system tells of each page, a little-endian number; its highest byte says whether it is present, swapped, a file's."""
_PRESENT, _SWAPPED, _OF_FILE = 1 << 7, 1 << 6, 1 << 5
_OTHERS: Final = bytes(top for top in range(256) if not top & (_PRESENT | _SWAPPED) or top & _OF_FILE)


class Pagemap:
    """This process's page table; a process that was forked from it needs one of its own."""

    def __init__(self, page: int) -> None:
        self._page = page
        try:
            self._fd = os.open(_PATH, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = -1

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def own(self, address: int, size: int) -> list[tuple[int, int]] | None:
        """(offset, length) of the pages from `address` on that are this process's own, rising; None where the system does not tell."""
        try:
            entries = os.pread(self._fd, size // self._page * _ENTRY, address // self._page * _ENTRY)
        except OSError:
            return None
        if len(entries) != size // self._page * _ENTRY:
            return None
        tops = entries[_ENTRY - 1 :: _ENTRY]
        if not tops.translate(None, _OTHERS):
            return []
        return joined_spans((number * self._page, self._page) for number, top in enumerate(tops) if top not in _OTHERS)


def joined_spans(pieces: Iterable[tuple[int, int]], most: float = math.inf) -> list[tuple[int, int]]:
    """(offset, length) in rising order, neighbours made one of at most `most` bytes."""
    found: list[tuple[int, int]] = []
    for offset, length in pieces:
        if found and sum(found[-1]) == offset and found[-1][1] + length <= most:
            found[-1] = (found[-1][0], found[-1][1] + length)
        else:
            found.append((offset, length))
    return found


SLOTS = 8
"""Answers in lent memory that this worker takes at a time from a shard whose blocks do not hold still."""


class Sharing:
    """Empty until a shard offers. `steady`: answers lie in the shards' blocks, which hold still until this worker pushes again."""

    def __init__(self, layout: Layout, steady: bool) -> None:
        self.steady = steady
        self.span = LentSpan.of(layout, shared_memory.PAGE)
        self._making = threading.Lock()
        """Links come each by a thread of its own, and all lend the same memory."""
        self._arena: Arena | None = None
        self._mirror: Mirror | None = None
        self._kept: frozenset[int] = frozenset()
        self._outside: Sequence[torch.Tensor | None] | None = ()
        """The targets to which answers must be copied, None for the others; None: all see them as they are."""

    def take(self, index: int, blocks: Sequence[int], offer: Offer) -> Region:
        """Hand over the gradients' memory to shard `index` and take that of its answers. Raises OSError or WireError."""
        with self._making:
            arena = self._arena = self._arena or Arena(self.span)
        region = self.borrow(index, offer, arena.region)
        if self.steady:
            with self._making:
                self._mirror = self._mirror or Mirror(self.span)
                self._mirror.show(index, region, blocks)
        return region

    def borrow(self, index: int, offer: Offer, lent: Region) -> Region:
        """Hand `lent` over to shard `index` for what it offers. Raises OSError or WireError."""
        if self.steady and offer.size != self.span.size:
            raise WireError(f"shard {index} lends {offer.size} bytes, expected {self.span.size}")
        return offer.borrow(lent)

    def adopt(self, parameters: Sequence[torch.Tensor]) -> None:
        """In a steady mode, let the model's parameters live where the shards have them."""
        if self._mirror is not None:
            self._mirror.adopt(parameters)

    def lay(self, row: int, grad: torch.Tensor) -> torch.Tensor | None:
        """Begin the row's gradient of the next push where the shards read it; None: it does not lie there.

        No push may be under way, and the caller adds to what is given until the next one begins.
        """
        return None if self._arena is None or not self.steady else self._arena.lay(row, grad)

    def begin(self, grads: Sequence[torch.Tensor | None] | None, scaled: bool) -> None:
        """A clock begins with these gradients (None: this rank is absent)."""
        self._kept = self._arena.begin(grads, scaled) if self._arena is not None and grads is not None else frozenset()

    def aim(self, targets: Sequence[torch.Tensor]) -> None:
        """Answers that come from now on are for these."""
        self._outside = targets if self._mirror is None else self._mirror.outside(targets)

    def place(self, block: int) -> tuple[int, int]:
        """Offset and length of a block where both sides lend it."""
        return self.span.offsets[block], self.span.layout.blocks[block].nbytes

    def stage(self, block: int, grads: Sequence[torch.Tensor | None], scale: float) -> bool:
        """Bring a block's gradients where the shards read them, before they hear of them. False: they have to be sent."""
        assert self._arena is not None
        return self._arena.stage(block, grads, scale, self._kept)

    def scaled(self, block: int) -> bool:
        """Has the block's gradient, where it leaves from, been multiplied by the scale of its push already?"""
        return False

    def land(self, header: Header) -> bool:
        """An answer lies in lent memory: copy it to those targets that do not live there. False: it has to be read as any other."""
        if self._mirror is None:
            return False
        self.check_place(header)
        if self._outside is not None:
            self._mirror.scatter(header.block, self._outside)
        return True

    def check_place(self, header: Header) -> None:
        """Raise WireError unless an answer lies where its block does."""
        if (header.part, header.length) != self.place(header.block):
            raise WireError(f"PARAM of block {header.block}: {header.length} bytes at {header.part}, expected {self.place(header.block)}")

    def refresh(self, block: int) -> None:
        """What of a block lives in its shard's memory is as the shard has it, whatever the script has written there."""
        if self._mirror is not None:
            self._mirror.refresh(block)

    def shows(self, row: int, target: torch.Tensor) -> bool:
        """Is what the row's parameter holds in this moment the shard's memory as it is?"""
        return self._mirror is not None and self._mirror.shows(row, target.detach())

    def untouched(self) -> bool:
        """Do all targets of the last answers live in the shards' memory, and has this process written to none of their pages?"""
        return self._mirror is not None and self._outside is None and self._mirror.untouched()

    def held(self, row: int) -> torch.Tensor:
        """A copy of what the shards hold at this moment of a row that lives in their memory, 1-D."""
        assert self._mirror is not None
        return self._mirror.held(row)

    def settle(self, others: int) -> None:
        """No update reaches the model any more: who reads it later sees what it holds. `others` may do the same at this moment."""
        if self._mirror is not None:
            self._mirror.settle(others)

    def withdraw(self) -> None:
        """The script continues without an answer, or this is a fork: what it writes must not reach a push that a shard still holds."""
        if self._arena is not None:
            self._arena.withdraw()
