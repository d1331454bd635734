"""Memory that the processes of one worker share, and how their gradients come together in it.

It holds the gradients of each process, and the answers of the shards once for all. `collectives.local_sum` chooses the way in which they
are summed. It gets which GPU each process computes on, how quickly that and the CPU move bytes, and what `nvidia-smi` says.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import subprocess
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from psjob.collectives import local_sum
from psjob.collectives.local_sum import CPU, NCCL, SHARED, TopoMatrix
from psjob.layout import memory
from psjob.layout.blocks import Layout
from psjob.layout.memory import ALIGN, LentSpan
from psjob.layout.packing import Pack
from psjob.protocol.worker.local_group import owner
from psjob.rules import arrays
from psjob.worker import exits

_CPU = torch.device("cpu")


class PodMemory:
    """Of process `local` of so many. What `fd` is open for has `size` bytes; it is taken over.

    Each process writes its own gradients. Sums are written over those of the first process that is present, each block by its owner.
    `device` is where this process's tensors lie. For a GPU the memory is pinned in this process, where the driver allows that. It is a
    `PodSum` too: of gradients that all lie here, which the CPU adds.
    """

    everyone = False

    def __init__(self, layout: Layout, processes: int, local: int, fd: int, device: torch.device = _CPU) -> None:
        self._layout, self._local = layout, local
        span = LentSpan.of(layout, ALIGN)
        try:
            self._map = mmap.mmap(fd, size_of(layout, processes))
        finally:
            os.close(fd)
        self._gradients = [self._packs(span, number * span.size) for number in range(processes)]
        self._weights = self._packs(span, processes * span.size)
        self._first = 0
        self._device, self._pinned = device, device.type == "cuda" and pin(self, self._map, device)

    def _packs(self, span: LentSpan, begin: int) -> list[Pack]:
        made = []
        for block in self._layout.blocks:
            dtype = getattr(torch, block.dtype)
            at = begin + span.offsets[block.index]
            flat = (
                torch.frombuffer(self._map, dtype=dtype, count=block.length, offset=at)
                if block.length
                else torch.empty(0, dtype=dtype, device="cpu")
            )
            made.append(Pack(block, flat, self._layout.table))
        return made

    def gather(self, gradients: Sequence[torch.Tensor | None], scale: float) -> None:
        """Copy this process's gradients, `scale` times what they are, to its own place."""
        with torch.no_grad():
            for pack in self._gradients[self._local]:
                pack.gather(gradients, non_blocking=self._pinned)
            self._settle()
            for pack in self._gradients[self._local] if scale != 1.0 else ():
                pack.flat.mul_(scale)

    def sum(self, present: Sequence[int], active: Sequence[int], mean: bool) -> None:
        """Make the sum, or the mean, of the blocks that this process owns among the `active` ones: added in the order of `present`, then
        one multiplication."""
        if not present:
            return
        self._first = present[0]
        with torch.no_grad():
            for block in self._layout.blocks:
                if owner(block.index, active) != self._local:
                    continue
                flats = [self._gradients[number][block.index].flat for number in present]
                for flat in flats[1:]:
                    arrays.combine("add", flats[0], flat, flats[0])
                if mean and len(flats) > 1:
                    flats[0].mul_(1.0 / len(flats))

    @contextmanager
    def filling(self, first: int) -> Iterator[Callable[[int, torch.Tensor], object]]:
        """Inside, what is yielded puts a block of the sum to its place; `first` is the first process that is present."""
        self._first = first
        yield lambda block, flat: self._gradients[first][block].flat.copy_(flat, non_blocking=self._pinned)
        self._settle()

    def summed(self, block: int) -> torch.Tensor:
        """A block of the sum that was made last, 1-D."""
        return self._gradients[self._first][block].flat

    def answer(self, block: int) -> torch.Tensor:
        """If the shards' answer of a block lies, 1-D."""
        return self._weights[block].flat

    def scatter(self, targets: Sequence[torch.Tensor]) -> None:
        """Copy all answers to where they are wanted."""
        for pack in self._weights:
            pack.scatter(targets, non_blocking=self._pinned)
        self._settle()

    def _settle(self) -> None:
        """Copies that were begun are through: what comes next writes to the same memory."""
        if self._pinned:
            torch.cuda.current_stream(self._device).synchronize()


def pin(owner: object, mapped: mmap.mmap, device: torch.device) -> bool:
    """Page-lock memory in this process while `owner` lives. Is it?"""
    flat = torch.frombuffer(mapped, dtype=torch.uint8)
    if memory.page_lock(flat.data_ptr(), flat.nbytes, device):
        return False
    weakref.finalize(owner, _unpin, flat.data_ptr(), device, os.getpid()).atexit = False
    return True


def _unpin(address: int, device: torch.device, pid: int) -> None:
    if os.getpid() == pid:  # a fork has no GPU
        memory.page_unlock(address, device)


def size_of(layout: Layout, processes: int) -> int:
    """Bytes of the memory of so many processes."""
    return (processes + 1) * LentSpan.of(layout, ALIGN).size


def make(layout: Layout, processes: int) -> int:
    """A descriptor of new memory of that size, without a name. Raises OSError."""
    fd = os.memfd_create("psjob-processes", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size_of(layout, processes))
    except BaseException:
        os.close(fd)
        raise
    return fd


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

        `active`: the processes that make this call. Raises RuntimeError if another one has gone.
        """


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
                    arrays.combine("add", flats[0], flat, flats[0])
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
        exits.wait_for_the_agent(f"a sum with the other processes of this worker failed: {why_it_failed(error)}")


def make_group(way: str, fd: int, local: int, processes: int, device: torch.device) -> Any:
    """A group of a worker's processes, beside any that the script makes; they find each other by the file `fd`, which is taken over.

    It stays open as long as this process lives. torch opens the store by its name again, at the group's end too, and would write into
    whatever has the number then.

    Raises RuntimeError if one of them does not come, or the backend cannot be had.
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
        raise RuntimeError(why_it_failed(error)) from None
    return group


def made(way: str, layout: Layout, memory: PodMemory, local: int, processes: int, device: torch.device, group: Any) -> PodSum:
    """The sum of that way."""
    return memory if way == SHARED else ExchangedSum(layout, memory, local, processes, device, group)


def meeting_place() -> int:
    """A file without a name, for `make_group` of all processes of a worker."""
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


def why_it_failed(error: Exception) -> str:
    """For a log."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _room(nbytes: int) -> int:
    return -(-nbytes // EDGE) * EDGE


SMI_SECONDS = 20.0
PROBE = 8 << 20
"""Bytes of a measured copy, and of a measured sum."""
TRIES = 3


@dataclass(frozen=True)
class Lying:
    """Where a process's model lies: `cpu`, or its GPU's UUID. `host`, `add`: as in `local_sum.Given`; 0 where they are not measured."""

    device: str
    host: float = 0.0
    add: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """For another process of the worker."""
        return asdict(self)

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Lying:
        """What `to_json` gave. Raises KeyError and ValueError."""
        return cls(str(body["device"]), float(body["host"]), float(body["add"]))


def device_of(parameters: Sequence[torch.Tensor]) -> torch.device:
    """The GPU on which all of them lie; else the CPU."""
    devices = {p.device for p in parameters}
    only = devices.pop() if len(devices) == 1 else torch.device(CPU)
    return only if only.type == "cuda" else torch.device(CPU)


def lying(device: torch.device) -> Lying:
    """Of this process. A GPU's copies are measured, which takes some milliseconds."""
    if device.type != "cuda":
        return Lying(CPU)
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", device)
    there = torch.ones(PROBE, dtype=torch.uint8, device=device)
    here = torch.empty(PROBE, dtype=torch.uint8, pin_memory=True, device="cpu")
    one, other = torch.ones(PROBE // 4, dtype=torch.float32, device="cpu"), torch.ones(PROBE // 4, dtype=torch.float32, device="cpu")

    def copy() -> None:
        here.copy_(there)

    return Lying(str(uuid), PROBE / _least_seconds(copy), PROBE / _least_seconds(lambda: one.add_(other)))


def topology(uuids: Sequence[str]) -> tuple[TopoMatrix | None, list[int]]:
    """How the GPUs are joined, and the number there of each that is named; None where the tool is missing or says something else."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None, []
    try:
        matrix = local_sum.parse_topology(_said(tool, "topo", "-m"))
        rows = [line.split(",") for line in _said(tool, "--query-gpu=index,uuid", "--format=csv,noheader").splitlines()]
        known = {uuid.strip().removeprefix("GPU-"): int(number) for number, uuid in rows}
        numbers = [known[uuid.removeprefix("GPU-")] for uuid in uuids]
    except (OSError, ValueError, KeyError, subprocess.SubprocessError):
        return None, []
    return (matrix, numbers) if set(numbers) <= set(matrix.gpus) else (None, [])


def _said(tool: str, *words: str) -> str:
    return subprocess.run([tool, *words], capture_output=True, text=True, timeout=SMI_SECONDS, check=True).stdout


def _least_seconds(act: Any) -> float:
    taken = []
    for _ in range(TRIES + 1):
        begin = time.perf_counter()
        act()
        taken.append(time.perf_counter() - begin)
    return min(taken[1:])
