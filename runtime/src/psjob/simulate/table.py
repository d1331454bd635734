"""The whole table of digits-64, its trainings spread over this machine's cores; tables that read well and pipe well, and a progress bar."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from psjob.simulate.protocol import ENTRIES, Table, Task, Trained, mean, train

WIDTH = 30
EVERY = 0.1


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns with two spaces between; the first is text, the others are numbers to the right."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            word.ljust(width) if i == 0 else word.rjust(width) for i, (word, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


class Bar:
    """How much of `total` is done, on standard error; nothing where that is no terminal."""

    def __init__(self, total: int, unit: str) -> None:
        self._total, self._unit, self._shown = total, unit, 0.0
        self._began = time.monotonic()
        self._live = sys.stderr.isatty()

    def at(self, done: int) -> None:
        now = time.monotonic()
        if not self._live or now - self._shown < EVERY:
            return
        self._shown = now
        part = min(1.0, done / self._total)
        left = f", {(now - self._began) * (1 / part - 1):.0f} s left" if part else ""
        bar = "█" * round(WIDTH * part)
        print(f"\r{bar:░<{WIDTH}} {done:,}/{self._total:,} {self._unit}{left}\x1b[K", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Take it off the terminal."""
        if self._live and self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


GAP_AT = (16, 32)


def fill(tasks: Sequence[Task], processes: int, told: Callable[[int], None] = lambda done: None) -> Table:
    """Train all of `tasks`; `told` hears how many are done. One process trains here, more in processes of their own.

    Raises ValueError when a process was killed.
    """
    found: dict[int, Trained] = {}
    if processes == 1:
        for place, task in enumerate(tasks):
            found[place] = train(task)
            told(len(found))
    else:
        with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
            with _deaf():
                waiting = {pool.submit(train, task): place for place, task in enumerate(tasks)}
            try:
                for future in as_completed(waiting):
                    found[waiting[future]] = future.result()
                    told(len(found))
            except KeyboardInterrupt:
                for process in multiprocessing.active_children():
                    process.terminate()
                raise
            except BrokenProcessPool:
                raise ValueError("simulate digits-64: a training's process was killed, perhaps for memory; try --processes 1") from None
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
    table: dict[tuple[str, int], list[Trained]] = {}
    for place, task in enumerate(tasks):
        table.setdefault((task.entry, task.workers), []).append(found[place])
    return table


@contextmanager
def _deaf() -> Iterator[None]:
    """Processes started here do not hear Ctrl-C: this one does, and ends them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def text(table: Table) -> str:
    """Test accuracy in %, the mean over seeds, and the mean gap x 10,000 at 16 and 32 workers."""
    keys = [key for key in ENTRIES if any(key == entry for entry, _ in table)]
    counts = sorted({workers for _, workers in table})
    gaps = [n for n in GAP_AT if n in counts]
    rows = [
        [
            ENTRIES[key].title,
            *(f"{100 * mean(table[key, n], 'accuracy'):.1f}" for n in counts),
            *(f"{1e4 * mean(table[key, n], 'gap'):.0f}" for n in gaps),
        ]
        for key in keys
    ]
    return columns(["workers", *map(str, counts), *(f"gap at {n}" for n in gaps)], rows)
