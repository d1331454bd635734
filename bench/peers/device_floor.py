"""What a machine allows between a GPU and processes that update on the host, with plain Python between: a bare prototype of a step.

Gradients go from the device to page-locked shared memory block by block, `--shards` processes update a block there (`--optimizer sgd`, or
adam: fused AdamW) while the next is copied, and its weights go back at once. Nothing is sent, checked, saved or waited for beside that.
With `--device cpu` the copies are those of the host.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import multiprocessing
import os
import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import clock
import torch
from on_device import device_of, wait_for

MEMORY = Path("/dev/shm")  # noqa: S108 - shared memory has no other place
BLOCK = 4 << 20
"""Bytes of a block; a model of fewer is one block."""
ADAMW = {"lr": clock.RATE, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "eps": 1e-8}


@dataclass(frozen=True)
class Shared:
    """Two regions of /dev/shm: gradients and weights, float32, of `blocks` blocks of `block` elements."""

    names: tuple[str, str]
    blocks: int
    block: int

    def opened(self, make: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        size = self.blocks * self.block * 4
        found = []
        for name in self.names:
            fd = os.open(MEMORY / name, os.O_RDWR | (os.O_CREAT | os.O_EXCL if make else 0), 0o600)
            if make:
                os.ftruncate(fd, size)
            found.append(torch.frombuffer(mmap.mmap(fd, size), dtype=torch.float32))
            os.close(fd)
        return found[0], found[1]

    def slice(self, block: int) -> slice:
        return slice(block * self.block, (block + 1) * self.block)


def main() -> None:
    words = clock.asked(__doc__)
    device = device_of(words)
    elements = words.megabytes * 250_000
    block = min(BLOCK // 4, elements)
    own = secrets.token_hex(6)
    shared = Shared((f"bench-g-{own}", f"bench-w-{own}"), elements // block, block)
    grads, weights = shared.opened(make=True)
    try:
        with locked(device, grads, weights):
            measure(words, device, shared, grads, weights)
    finally:
        for name in shared.names:
            (MEMORY / name).unlink()


def measure(words: argparse.Namespace, device: torch.device, shared: Shared, grads: torch.Tensor, weights: torch.Tensor) -> None:
    """Time the cycles, and check that every weight has moved as it must."""
    context = multiprocessing.get_context("spawn")
    ready, done = context.Semaphore(0), context.SimpleQueue()
    queues = [context.SimpleQueue() for _ in range(words.shards)]
    shards = [context.Process(target=update, args=(shared, words.optimizer, ready, queue, done), daemon=True) for queue in queues]
    for shard in shards:
        shard.start()
    for _ in shards:
        ready.acquire()
    gradient, model = torch.ones(grads.numel(), device=device), torch.zeros(weights.numel(), device=device)
    sides = Sides(device)
    found = clock.cycles(lambda: cycle(shared, queues, done, (gradient, grads), (weights, model), sides), words.seconds)
    for queue in queues:
        queue.put(None)
    for shard in shards:
        shard.join()
    clock.check((float(model[at]) for at in (0, -1)), clock.moved(found))  # AdamW of equal gradients moves by the rate, too
    clock.answer(found)


def update(shared: Shared, optimizer: str, ready: Any, queue: Any, done: Any) -> None:
    """One process that updates the blocks that its queue names."""
    torch.set_num_threads(1)
    grads, weights = shared.opened()
    moments: dict[int, tuple[torch.Tensor, ...]] = {}
    ready.release()
    while (block := queue.get()) is not None:
        part = shared.slice(block)
        if optimizer == "sgd":
            weights[part].add_(grads[part], alpha=-clock.RATE)
        else:
            first, second, step = moments.setdefault(block, (torch.zeros(shared.block), torch.zeros(shared.block), torch.zeros(())))
            step += 1
            torch._fused_adamw_([weights[part]], [grads[part]], [first], [second], [], [step], amsgrad=False, maximize=False, **ADAMW)  # type: ignore[call-overload]
        done.put(block)


class Sides:
    """A stream for each direction; on the CPU none, and a copy is through when it was asked for."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu, self.device = device.type == "cuda", device
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if self._on_gpu else []  # type: ignore[no-untyped-call]

    def on(self, side: int) -> Any:
        return torch.cuda.stream(self._streams[side]) if self._on_gpu else contextlib.nullcontext()

    def event(self, side: int) -> torch.cuda.Event | None:
        return self._streams[side].record_event() if self._on_gpu else None


def cycle(
    shared: Shared, queues: list[Any], done: Any, out: tuple[torch.Tensor, torch.Tensor], back: tuple[torch.Tensor, torch.Tensor],
    sides: Sides,
) -> None:  # fmt: skip
    """`out` and `back` are from and to."""
    copied = []
    with sides.on(0):
        for block in range(shared.blocks):
            part = shared.slice(block)
            out[1][part].copy_(out[0][part], non_blocking=True)
            copied.append(sides.event(0))

    def feed() -> None:
        for block, event in enumerate(copied):
            if event is not None:
                event.synchronize()
            queues[block % len(queues)].put(block)

    feeding = threading.Thread(target=feed)
    feeding.start()
    with sides.on(1):
        for _ in range(shared.blocks):
            part = shared.slice(done.get())
            back[1][part].copy_(back[0][part], non_blocking=True)
    feeding.join()
    wait_for(sides.device)


@contextlib.contextmanager
def locked(device: torch.device, *tensors: torch.Tensor) -> Iterator[None]:
    """Page-locked for a GPU. Raises RuntimeError if the driver does not allow it."""
    if device.type != "cuda":
        yield
        return
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    for tensor in tensors:
        found = cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
        if int(found):
            raise RuntimeError(f"{tensor.nbytes} bytes cannot be page-locked: {cudart.cudaGetErrorString(found)}")
    try:
        yield
    finally:
        for tensor in tensors:
            cudart.cudaHostUnregister(tensor.data_ptr())


if __name__ == "__main__":
    main()
