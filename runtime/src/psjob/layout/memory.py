"""Bytes of tensors without a copy, and without numpy; and where each block lies in memory that is lent.

Blocks have the same places in every region of a job, on either side.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from psjob.layout.blocks import SIZES, Layout
from psjob.wire.shared_memory import Region, Window


def view(tensor: torch.Tensor) -> memoryview:
    """A writable byte view of a tensor that `has_bytes`, which lives as long as its view. Raises ValueError for another."""
    raw = _raw(tensor)
    raw.tensor = tensor
    return memoryview(raw).cast("B")


def borrowed(tensor: torch.Tensor) -> memoryview:
    """As `view`, but the tensor is not held: for a caller who holds it as long as the bytes are used."""
    return memoryview(_raw(tensor)).cast("B")


def has_bytes(tensor: torch.Tensor) -> bool:
    """Do the bytes of this host's memory at `data_ptr` hold the tensor's values, in their order?

    Torch's lazy conjugate and negative bits say of a tensor that its values are others than its bytes.
    """
    plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and tensor.is_contiguous()
    return plain and not tensor.is_conj() and not tensor.is_neg()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a dense tensor as integers of the same bits, so that NaN is equal to itself. A complex number is two of them."""
    real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return real.view(_INTEGERS[real.element_size()])


_INTEGERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def contiguous_values(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a dense tensor as one that has bytes; the tensor itself, detached, if it has them."""
    return tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()


def all_contiguous_values(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """As `contiguous_values` of each. What lies on one GPU crosses in one copy: each would wait for all that the GPU has begun."""
    found = [tensor if tensor.is_cuda else contiguous_values(tensor) for tensor in tensors]
    for device in dict.fromkeys(tensor.device for tensor in found if tensor.is_cuda):
        rows = [row for row, tensor in enumerate(found) if tensor.device == device]
        for row, tensor in zip(rows, crossed([found[row] for row in rows]), strict=True):
            found[row] = tensor
    return found


def crossed(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Dense tensors of one device in this host's memory, parts of one copy."""
    plain = [tensor.detach().resolve_conj().resolve_neg().contiguous() for tensor in tensors]
    order = sorted(range(len(plain)), key=lambda row: -plain[row].element_size())  # each begins at a multiple of its size
    flat = torch.cat([plain[row].reshape(-1).view(torch.uint8) for row in order]).to("cpu") if order else None
    found, at = list(plain), 0
    for row in order:
        assert flat is not None
        found[row] = flat[at : at + plain[row].nbytes].view(plain[row].dtype).view(plain[row].shape)
        at += plain[row].nbytes
    return found


def underneath(tensor: torch.Tensor) -> torch.Tensor | None:
    """The dense tensor that lies within those of `torch.func`; None of a tensor without values of its own, or while torch traces."""
    if torch._C._len_torch_dispatch_stack() or torch._C._is_tracing():
        return None
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    held = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return tensor if held and tensor.layout is torch.strided and not tensor.is_meta else None


def _raw(tensor: torch.Tensor) -> Any:
    if not has_bytes(tensor):
        raise ValueError("only a contiguous CPU tensor without a lazy conjugate or negative bit has a byte view")
    size = tensor.numel() * tensor.element_size()
    kind: Any = ctypes.c_char * size
    return kind.from_address(tensor.data_ptr()) if size else kind()


def lent(region: Region | Window, offset: int, length: int, dtype: str) -> torch.Tensor:
    """`length` elements of lent memory from byte `offset`, 1-D, with a storage of its own that keeps the memory mapped.

    Raises WireError outside of it.
    """
    if not length:
        return torch.empty(0, dtype=getattr(torch, dtype), device="cpu")
    return torch.frombuffer(region.buffer(offset, length * SIZES[dtype]), dtype=getattr(torch, dtype))


_PORTABLE: Final = 0x01
"""cudaHostRegisterPortable: locked for all devices."""
_READ_ONLY: Final = 0x08
"""cudaHostRegisterReadOnly: devices only read it, and this process may be without the right to write."""


def page_lock(address: int, size: int, device: torch.device, read_only: bool = False) -> str:
    """Lock memory of this process, so that a GPU copies from and to it beside the host, and several times as fast.

    Returns an empty text if it is locked, else CUDA's reason. It must be unlocked before it is unmapped: the driver would take what is
    mapped there next for the same. `read_only` is for memory that this process cannot write, which not every device can lock.
    """
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        found = cudart.cudaHostRegister(address, size, _PORTABLE | (_READ_ONLY if read_only else 0))
        if int(found) == 0:
            return ""
        _forget_error(device)
    return f"{cudart.cudaGetErrorString(found)} (CUDA error {int(found)})"


def page_unlock(address: int, device: torch.device) -> None:
    """Unlock what was locked at this address for this device. No copy from or to it may be under way."""
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with contextlib.suppress(RuntimeError), torch.cuda.device(device):  # a device that is lost unlocks nothing, and its process ends
        if int(cudart.cudaHostUnregister(address)):
            _forget_error(device)


def _forget_error(device: torch.device) -> None:
    with contextlib.suppress(RuntimeError):  # CUDA keeps what it refused for the next kernel of this thread
        torch.zeros(1, dtype=torch.uint8, device=device)


def trim() -> None:
    """Give memory that was freed back to the system, where the C library can: it keeps what lies between blocks that are in use."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


MAPPED = 128 << 10
"""Bytes of a tensor that has pages of its own from the beginning, as the C library has it at first."""


def return_freed() -> None:
    """Let large tensors go back to the system when they are freed, from now on, where the C library can.

    It raises the size from which it does so with each that is freed, to 32 MiB, and then keeps the holes that they leave. Each large
    tensor costs the making of its pages instead.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, MAPPED)
    trim()


_MMAP_THRESHOLD = -3


class Scratch:
    """Bytes of the calling thread's own, until it asks again."""

    def __init__(self) -> None:
        self._own = threading.local()

    def __call__(self, size: int) -> torch.Tensor:
        found: torch.Tensor | None = getattr(self._own, "bytes", None)
        if found is None or found.numel() < size:
            found = self._own.bytes = torch.empty(size, dtype=torch.uint8, device="cpu")
        return found[:size]


class Spares:
    """Buffers that are taken for a while and given back; a few are kept."""

    KEPT = 4

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def take(self, size: int) -> torch.Tensor:
        """At least `size` bytes."""
        try:
            found = self._free.pop()
        except IndexError:
            return torch.empty(size, dtype=torch.uint8, device="cpu")
        return found if found.numel() >= size else torch.empty(size, dtype=torch.uint8, device="cpu")

    def give(self, *buffers: torch.Tensor) -> None:
        """Nobody looks at these any more."""
        self._free += buffers[: max(0, self.KEPT - len(self._free))]


ALIGN = 64
"""Torch's own tensors begin at multiples of so many bytes; kernels may give other bits for others."""


@dataclass(frozen=True)
class LentSpan:
    """`offsets` in bytes by block, each at a page's begin; a region that holds all of them has `size` bytes."""

    layout: Layout
    page: int
    offsets: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, layout: Layout, page: int) -> LentSpan:
        """Blocks one after the other; those of one tensor leave no gap where all except its last are whole pages."""
        offsets = []
        at = 0
        for block in layout.blocks:
            offsets.append(at)
            at += -(-block.nbytes // page) * page
        return cls(layout, page, tuple(offsets), max(at, page))

    def pages(self, block: int) -> tuple[int, int]:
        """Offset and length of the whole pages that a block has for itself."""
        return self.offsets[block], -(-self.layout.blocks[block].nbytes // self.page) * self.page

    def place(self, row: int) -> int | None:
        """Offset of a tensor of the table that lies there in one piece, aligned as torch's own; None: it does not."""
        spec = self.layout.table[row]
        begin = end = None
        for block, piece in self.layout.pieces_of(row):
            at = self.offsets[block.index] + piece.block_offset * (spec.nbytes // spec.numel)
            if end is not None and at != end:
                return None
            begin = at if begin is None else begin
            end = at + piece.length * (spec.nbytes // spec.numel)
        return None if begin is None or begin % ALIGN else begin
