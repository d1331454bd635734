"""How gradients of a worker's processes come together in their shared memory, see `collectives.localsum`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from psjob.collectives.localsum import NCCL, SHARED
from psjob.layout.blocks import Layout
from psjob.layout.packing import Pack
from psjob.protocol.worker.together import owner
from psjob.rules import arrays
from psjob.worker import exits
from psjob.worker.podmemory import PodMemory

MEET_SECONDS = 60.0
SUM_SECONDS = 600.0
"""A process that has died ends the others long before."""
EDGE = 64


class PodSum(Protocol):
    """Of one process. `everyone`: those that are through with their scripts take part in sums all the same."""

    everyone: bool

    def gather(self, gradients: Sequence[torch.Tensor | None], scale: float) -> None:
        """Take this process's gradients, `scale` times what they are."""

    def sum(self, present: Sequence[int], active: Sequence[int], mean: bool) -> None:
        """Put what this process owns of the sum, or of the mean, of those `present` into shared memory.

        `active`: the processes that make this call. Raises RuntimeError where another one has gone.
        """


class SharedSum:
    """All gradients lie in shared memory, and the CPU adds."""

    everyone = False

    def __init__(self, memory: PodMemory) -> None:
        self._memory = memory

    def gather(self, gradients: Sequence[torch.Tensor | None], scale: float) -> None:
        self._memory.gather(gradients, scale)

    def sum(self, present: Sequence[int], active: Sequence[int], mean: bool) -> None:
        self._memory.sum(present, active, mean)


class ExchangedSum:
    """Each process gets the blocks that it owns from all others, and adds on its device. The memory for that is twice the model's.

    `group` is a backend of torch.distributed whose ranks are the processes.
    """

    everyone = True

    def __init__(self, layout: Layout, memory: PodMemory, local: int, processes: int, device: torch.device, group: Any) -> None:
        self._memory, self._local, self._group, self._device = memory, local, group, device
        everybody = range(processes)
        self._owned = [block for block in layout.blocks if owner(block.index, everybody) == local]
        self._sizes = [sum(_room(b.nbytes) for b in layout.blocks if owner(b.index, everybody) == one) for one in everybody]
        self._sent = torch.empty(sum(self._sizes), dtype=torch.uint8, device=device)
        self._got = torch.empty(processes * self._sizes[local], dtype=torch.uint8, device=device)
        self._packs, at = [], 0
        for block in sorted(layout.blocks, key=lambda b: (owner(b.index, everybody), b.index)):
            flat = self._sent[at : at + block.nbytes].view(getattr(torch, block.dtype))
            self._packs.append(Pack(block, flat, layout.table))
            at += _room(block.nbytes)

    def gather(self, gradients: Sequence[torch.Tensor | None], scale: float) -> None:
        for pack in self._packs:
            pack.gather(gradients)
            if scale != 1.0:
                pack.flat.mul_(scale)

    def sum(self, present: Sequence[int], active: Sequence[int], mean: bool) -> None:
        if not present:
            return
        own = self._sizes[self._local]
        given = self._sizes if self._local in present else [0] * len(self._sizes)
        taken = [own if one in present else 0 for one in range(len(self._sizes))]
        _exchange(self._group, self._got[: sum(taken)], self._sent[: sum(given)], taken, given, self._device)
        at = 0
        with torch.no_grad(), self._memory.filling(present[0]) as put:
            for block in self._owned:
                dtype = getattr(torch, block.dtype)
                begins = range(at, at + own * len(present), own) if own else ()
                flats = [self._got[begin : begin + block.nbytes].view(dtype) for begin in begins]
                for flat in flats[1:]:
                    arrays.join("add", flats[0], flat, flats[0])
                if mean and len(flats) > 1:
                    flats[0].mul_(1.0 / len(flats))
                put(block.index, flats[0])
                at += _room(block.nbytes)


def made_sum(sums: PodSum, present: Sequence[int], active: Sequence[int], mean: bool) -> None:
    """`sum`, and where another process has gone under it, this one's end."""
    try:
        sums.sum(present, active, mean)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        exits.wait_for_the_agent(f"a sum with the other processes of this worker failed: {first_line(error)}")


def meet(way: str, fd: int, local: int, processes: int, device: torch.device) -> Any:
    """A group of a worker's processes, beside any that the script makes; they find each other by the file `fd`, which is taken over.

    It stays open as long as this process lives. torch opens the store by its name again, at the group's end too, and would write into
    whatever has the number then.

    Raises RuntimeError where one of them does not come, or the backend cannot be had.
    """
    try:
        backends: Any = dist  # some of its names are not in its stubs
        store = backends.FileStore(f"/proc/self/fd/{fd}", processes)
        if way == NCCL:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=SUM_SECONDS)
            group: Any = dist.ProcessGroupNCCL(store, local, processes, options)
        else:
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._timeout = timedelta(seconds=MEET_SECONDS)
            options._devices = [gloo.create_device(hostname="127.0.0.1")]
            group = gloo(store, local, processes, options)
        ones = torch.ones(processes, dtype=torch.uint8, device=device)
        _exchange(group, torch.empty_like(ones), ones, [1] * processes, [1] * processes, device, MEET_SECONDS)
    except (RuntimeError, AttributeError, ValueError) as error:  # a torch that was built without the backend lacks its names
        raise RuntimeError(first_line(error)) from None
    return group


def made(way: str, layout: Layout, memory: PodMemory, local: int, processes: int, device: torch.device, group: Any) -> PodSum:
    """The sum of that way."""
    return SharedSum(memory) if way == SHARED else ExchangedSum(layout, memory, local, processes, device, group)


def meeting_place() -> int:
    """A file without a name, for `meet` of all processes of a worker."""
    return os.memfd_create("psjob-local-sum", os.MFD_CLOEXEC)


def _exchange(
    group: Any,
    got: torch.Tensor,
    sent: torch.Tensor,
    taken: list[int],
    given: list[int],
    device: torch.device,
    seconds: float = SUM_SECONDS,
) -> None:
    """`given` bytes of `sent` to each process, `taken` bytes from each into `got`. Raises RuntimeError."""
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        group.alltoall_base(got, sent, taken, given, dist.AllToAllOptions()).wait(timedelta(seconds=seconds))


def first_line(error: Exception) -> str:
    """For a log."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _room(nbytes: int) -> int:
    return -(-nbytes // EDGE) * EDGE
