"""Blocks of a model in this host's memory: gradients copied out of where they were computed, weights copied in.

If the model lies on a GPU the memory is pinned and each direction copies on a stream of its own, beside what computes. Events say when a
block is copied. Gradients leave all together, and answers come back as they land. On the CPU the same calls copy at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from psjob.layout.blocks import Block, Layout
from psjob.layout.packing import Pack
from psjob.wire.frame import Header
from psjob.worker.exchange import Exchange

if TYPE_CHECKING:
    from psjob.worker.session import WorkerSession


class Staging:
    """`device` is where the parameters lie. `lands`: answers are staged too (a GPU needs that; else they land in the model itself).

    `stage`: there is memory for the blocks of this stage alone; None: for all.
    """

    def __init__(self, layout: Layout, device: torch.device, lands: bool | None = None, stage: int | None = None) -> None:
        self.layout = layout
        self._apart = device.type == "cuda"
        """Copies are only begun by the call that asks for them."""
        self.lands = device.type == "cuda" if lands is None else lands
        self._out, self._into = StagingSide(device), StagingSide(device)
        self._gradients = _arena(layout, device, stage)
        self._weights = _arena(layout, device, stage) if self.lands else {}
        self._pieces: list[list[tuple[int, torch.Tensor, int]]] = [
            [
                (b.index, self._gradients[b.index].flat[p.block_offset : p.block_offset + p.length], p.tensor_offset)
                for b, p in layout.pieces_of(row)
                if b.index in self._gradients
            ]
            for row in range(len(layout.table))
        ]
        """By row: block, place in its memory, offset in the tensor."""
        self._copied: dict[int, torch.cuda.Event | None] = {}
        self._landed: dict[int, torch.cuda.Event | None] = {}

    # -- gradients -----------------------------------------------------------------------------

    def put(self, row: int, gradient: torch.Tensor | None, only: int | None = None) -> None:
        """Begin to copy a gradient (None: zeros) to its places in all blocks, or in block `only`."""
        source = None if gradient is None else gradient.detach().reshape(-1)
        with self._out.beside(source):
            for block, view, start in self._pieces[row]:
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
        self._copied[block] = self._out.event()

    def gradient(self, block: int) -> torch.Tensor:
        """The block's gradient, 1-D; waits until it is copied."""
        _through(self._copied.get(block))
        return self._gradients[block].flat

    # -- weights -------------------------------------------------------------------------------

    def weights(self, block: int) -> torch.Tensor:
        """Where an answer is received; waits until the one before has been copied on."""
        _through(self._landed.pop(block, None))
        return self._weights[block].flat

    def fence(self) -> None:
        """Weights that land from now on overwrite the model's only after what the calling thread has begun."""
        self._into.fence()

    def take(self, block: int, targets: Sequence[torch.Tensor | None]) -> None:
        """Begin to copy a received block into the model."""
        with self._into.behind_fence():
            self._weights[block].scatter(targets, non_blocking=self._apart)
        self._landed[block] = self._into.event()

    def settle(self, blocks: Iterable[int]) -> None:
        """What the calling thread begins from now on sees these blocks."""
        for block in blocks:
            event = self._landed.get(block)
            if event is not None:
                event.wait(torch.cuda.current_stream(self._into.device))


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


def _arena(layout: Layout, device: torch.device, stage: int | None) -> dict[int, Pack]:
    """A pack a block, by index, each in memory of its own, all in one piece of it; pinned where a GPU copies."""
    edge, blocks = 64, layout.of_stage(stage)
    sizes = [-(-block.nbytes // edge) * edge for block in blocks]
    flat = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda", device="cpu")
    packs: dict[int, Pack] = {}
    at = 0
    for block, size in zip(blocks, sizes, strict=True):
        packs[block.index] = Pack(block, flat[at : at + block.nbytes].view(getattr(torch, block.dtype)), layout.table)
        at += size
    return packs


def _through(event: torch.cuda.Event | None) -> None:
    if event is not None:
        event.synchronize()


class Staged(Exchange):
    """`staging` is between the model and the wire; the copies of a block go on while others are sent or received."""

    lends = False  # they leave from pinned memory

    def __init__(self, session: WorkerSession, staging: Staging) -> None:
        super().__init__(session)
        self.staging = staging

    def push(
        self,
        grads: Sequence[torch.Tensor | None] | None,
        hyperparameters: list[dict[str, Any]],
        skip: bool,
        scale: float,
        targets: Sequence[torch.Tensor],
    ) -> None:
        for block in self.session.blocks if grads is not None and not skip else ():
            self.staging.gather(block.index, grads or ())
        super().push(grads, hyperparameters, skip, scale, targets)

    def gradient(self, block: int, pack: Pack) -> torch.Tensor:
        return self.staging.gradient(block)

    def pieces(self, pack: Pack) -> None:
        """None: what lands is copied and told on, block by block."""
        return

    def landing(self, block: int, pack: Pack) -> tuple[torch.Tensor, Callable[[], None]]:
        if not self.staging.lands:
            return super().landing(block, pack)
        targets = self.targets
        return self.staging.weights(block), lambda: self.staging.take(block, targets)

    def finish(self) -> None:
        super().finish()
        self.staging.settle(block.index for block in self.session.blocks)

    def _ask(self, make: Callable[[Block], Header], targets: Sequence[torch.Tensor]) -> None:
        self.staging.fence()
        super()._ask(make, targets)
        self.staging.settle(block.index for block in self.session.blocks)
