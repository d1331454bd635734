"""A block's flat buffer and the tensors of a model: copied in and out by views that are made once.

Parameters and buffers are those that torch's Module finds. A model's class may give others by the same methods, or other groups. Names are
those of torch's `state_dict`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import cached_property

import torch

from psjob.layout import memory
from psjob.layout.blocks import Block, Layout, TensorSpec

_whole_at_a_time = threading.Lock()
"""Blocks of one tensor land side by side; where one is put in by way of all of it, another must not be between."""


class Pack:
    """`flat` is 1-D of the block's length and dtype; `table` the rows that the block's pieces name. Raises ValueError if they differ."""

    def __init__(self, block: Block, flat: torch.Tensor, table: Sequence[TensorSpec]) -> None:
        if flat.shape != (block.length,) or str(flat.dtype) != f"torch.{block.dtype}":
            raise ValueError(
                f"block {block.index} is {block.length} elements of {block.dtype}, got shape {tuple(flat.shape)} of {flat.dtype}"
            )
        self.flat = flat
        self._whole: list[tuple[int, torch.Tensor]] = []
        """Row and view of its shape, where the block holds all of a tensor."""
        self._parts: list[tuple[int, slice, torch.Tensor]] = []
        self.rows = frozenset(piece.tensor for piece in block.pieces)
        self._single = (block.pieces[0].tensor, block.pieces[0].tensor_offset) if len(block.pieces) == 1 else None
        for piece in block.pieces:
            view = flat[piece.block_offset : piece.block_offset + piece.length]
            if piece.length == table[piece.tensor].numel:
                self._whole.append((piece.tensor, view.view(table[piece.tensor].shape)))
            else:
                self._parts.append((piece.tensor, slice(piece.tensor_offset, piece.tensor_offset + piece.length), view))
        self._even = None if self._parts else _even(flat, [table[piece.tensor].shape for piece in block.pieces])
        self._lying: tuple[list[int], list[memoryview]] = ([], [])
        """If the tensors of a block of whole tensors lay when they were last asked for, and their bytes there."""

    def direct(self, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """The block's elements as they lie in `tensors`, 1-D and not copied; None where they are not one piece of this host's memory."""
        if self._single is None:
            return None
        row, begin = self._single
        tensor = tensors[row]
        if tensor is None or not self._plain(tensor):
            return None
        return tensor.detach().view(-1)[begin : begin + self.flat.numel()]

    def pieces(self, tensors: Sequence[torch.Tensor | None]) -> Sequence[memoryview] | None:
        """Bytes of the block's tensors where they lie, in the block's order, good while `tensors` holds them.

        None where the block has a part of a tensor, or a tensor is left out or is not one piece of this host's memory.
        """
        if self._parts:
            return None
        found = [tensors[row] for row, _ in self._whole]
        places = [0 if t is None or not t.is_contiguous() or t.is_neg() else t.data_ptr() for t in found]
        if places != self._lying[0]:
            if not all(t is not None and self._plain(t) for t in found):
                return None
            self._lying = (places, [memory.borrowed(t.detach()) for t in found if t is not None])
        return self._lying[1]

    def _plain(self, tensor: torch.Tensor) -> bool:
        return tensor.dtype == self.flat.dtype and memory.has_bytes(tensor)

    def gather(
        self, tensors: Sequence[torch.Tensor | None], leave: frozenset[int] = frozenset(), non_blocking: bool = False
    ) -> torch.Tensor:
        """Copy the block's elements of `tensors` (by table row; None: zeros) into the buffer, which is given back; rows in `leave` stay.

        `non_blocking`: as the current stream of a GPU comes to it, for which the buffer is pinned.
        """
        with torch.no_grad():
            if leave or non_blocking or self._even is None or not _joined([tensors[row] for row, _ in self._whole], self._even):
                self._gather_each(tensors, leave, non_blocking)
        return self.flat

    def _gather_each(self, tensors: Sequence[torch.Tensor | None], leave: frozenset[int], non_blocking: bool) -> None:
        views, sources = [], []
        for row, view in self._whole:
            if row in leave:
                continue
            source = tensors[row]
            if source is None:
                view.zero_()
            else:
                views.append(view)
                sources.append(_dense(row, source))
        if views:
            torch._foreach_copy_(views, sources, non_blocking)
        for row, span, view in self._parts:
            if row in leave:
                continue
            source = tensors[row]
            if source is None:
                view.zero_()
            else:
                view.copy_(_dense(row, source).reshape(-1)[span], non_blocking)

    def scatter(self, tensors: Sequence[torch.Tensor | None], non_blocking: bool = False) -> None:
        """Copy the buffer back into `tensors` in place (None: left out); `non_blocking`: as the current stream of a GPU comes to it."""
        views, targets = [], []
        with torch.no_grad():
            for row, view in self._whole:
                target = tensors[row]
                if target is not None:
                    views.append(view)
                    targets.append(target)
            if views:
                torch._foreach_copy_(targets, views, non_blocking)
            for row, span, view in self._parts:
                target = tensors[row]
                if target is None:
                    continue
                if target.is_contiguous():
                    target.view(-1)[span].copy_(view, non_blocking)
                else:
                    with _whole_at_a_time:
                        whole = target.reshape(-1).clone()
                        whole[span].copy_(view)
                        target.copy_(whole.view(target.shape))


class Packs:
    """By block index, a `Pack` in one buffer of the largest block's size, made when it is first asked for."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._made: dict[int, Pack] = {}

    def __getitem__(self, index: int) -> Pack:
        pack = self._made.get(index)
        if pack is None:
            block = self._layout.blocks[index]
            flat = self._buffer[: block.nbytes].view(getattr(torch, block.dtype))
            pack = self._made[index] = Pack(block, flat, self._layout.table)
        return pack

    @cached_property
    def _buffer(self) -> torch.Tensor:
        return torch.empty(max(block.nbytes for block in self._layout.blocks), dtype=torch.uint8, device="cpu")


def _even(flat: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> torch.Tensor | None:
    """`flat` as tensors of these shapes lie in it, joined along their first dimension; None where they differ in the others."""
    inner = {shape[1:] for shape in shapes}
    return flat.view(-1, *inner.pop()) if len(inner) == 1 and all(shapes) else None


def _joined(found: list[torch.Tensor | None], even: torch.Tensor) -> bool:
    """Were all copied by one call, which takes half the time? It takes no None and no other layouts. Raises ValueError on other sizes."""
    size = even.shape
    try:
        torch.cat(found, out=even)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):
        return False
    if even.shape != size:
        raise ValueError(f"the tensors of a block have {tuple(even.shape)} elements, expected {tuple(size)}: one has another shape by now")
    return True


def _dense(row: int, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        raise ValueError(f"row {row} of the table is a {tensor.layout} tensor; only dense tensors are pushed and pulled")
    return tensor


def named_parameters(model: torch.nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Each parameter with its name, tied ones by all of theirs if `remove_duplicate` is false."""
    return torch.nn.Module.named_parameters(model, remove_duplicate=remove_duplicate)


def named_buffers(model: torch.nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """The same of buffers."""
    return torch.nn.Module.named_buffers(model, remove_duplicate=remove_duplicate)


def tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """All parameters, and then all buffers."""
    return [*(p for _, p in named_parameters(model)), *(buffer for _, buffer in named_buffers(model))]
