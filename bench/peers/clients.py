"""What a push costs a shard with many workers: processor time of a push of a block of 4 KB, by the number of workers.

The shard's store is called by one thread, block after block and workers in turn, and each push is answered as its mode answers it: no
socket, process or disk is in the figure. It is the best of several parts of the run: all that is not the push itself only adds to it.
"""

from __future__ import annotations

import time
from typing import Any

import clock
import torch

from psjob.layout.blocks import Layout, TensorSpec
from psjob.modes import Async, Bounded, ServedMode, Sync
from psjob.rules.base import BlockState
from psjob.shard.pending import Gradient, PushMetadata
from psjob.shard.store import Store
from psjob.wire.frame import Header, Kind

BLOCK = 4096
"""Bytes."""
BLOCKS = 8
"""A layout cuts a small model in so many."""
FEW = 20
MANY: dict[int, float | None] = {1000: 1.2, 4000: None}
"""Workers, and how many times a push may cost what it costs with few.

In sync 4,000 workers have 16 MB of gradients at a time, which no cache holds."""
PUSHES = 2000
PARTS = 3
MODES: tuple[ServedMode, ...] = (Sync(), Async(), Bounded(3))


class Answered:
    """Where the answers of all workers go: they are counted."""

    def __init__(self) -> None:
        self.count = 0

    def param(self, cell: Any, waiter: Any) -> None:
        self.count += 1

    rows = waiting = param


def main() -> None:
    clock.asked(__doc__)
    torch.set_num_threads(1)
    rows = []
    for mode in MODES:
        few = spent(mode, FEW)
        for workers, most in MANY.items():
            many = spent(mode, workers)
            note = f"{many * 1e6:.1f} µs with {workers:,}, {few * 1e6:.1f} with {FEW}"
            rows.append(clock.row(f"a push in {mode.name}, {workers:,} workers over {FEW}", many / few, "times", most=most, note=note))
    clock.answer_rows(rows)


def spent(mode: ServedMode, workers: int) -> float:
    """Processor seconds of a push."""
    store = served(mode, workers)
    to = Answered()
    header = Header(Kind.PUSH, attempt=1, start=1, info=1)
    rounds = max(1, PUSHES // (BLOCKS * workers))
    pushes = rounds * workers * BLOCKS
    best, steps = float("inf"), 0
    for part in range(PARTS + 1):
        before = to.count
        began = time.process_time()
        for step in range(steps, steps + rounds):
            for cell in store.cells.values():
                for rank in range(workers):
                    frame = header._replace(worker=rank, clock=step, version=(1, cell.n), block=cell.index)
                    grad = store.target(frame, cell)
                    assert isinstance(grad, Gradient)
                    if not part:
                        grad.flat.zero_()
                    store.push(frame, cell, grad, to, store.restored_by)
        steps += rounds
        taken = (time.process_time() - began) / pushes
        if to.count - before != pushes:
            raise RuntimeError(f"{mode.name}: {to.count - before} of {pushes} pushes were answered")
        best = min(best, taken) if part else best  # the first one makes buffers
    return best


def served(mode: ServedMode, workers: int) -> Store:
    """A store in which every worker has told its hyperparameters."""
    store = Store(0, 1, workers, 1, mode, "bench")
    layout = Layout.of((TensorSpec("w", (BLOCKS * BLOCK // 4,), "float32"),))
    store.restore(layout, "sgd", {block.index: (BlockState(torch.zeros(block.length)), 0) for block in layout.blocks})
    hyperparameters = {"lr": clock.RATE, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}
    for rank in range(workers):
        store.infos.learn(rank, 1, PushMetadata((hyperparameters,), frozenset()))
    store.open(1, 1)
    return store


if __name__ == "__main__":
    main()
