"""Steps a second of workers while strangers flood their shard, over those of a quiet time just before, in one run.

A worker computes (sleeps) between two exchanges, as those of a job do. With `--what exchange` it only exchanges, which takes all cores.

A flooded window begins with 10,000 connections at once, half of them with all that a stranger may say, which never read; and 1,000 more
say a byte a second and come again when they are closed. The strangers are a process of their own, on the cores that all share: what they
take from workers and shard is in the ratio too. So processor times are told beside it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import resource
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.synchronize import Event

import clock
import job
import strangers
from clients_wire import until_started
from light_clients import Crowd, spent

WORKERS, BLOCKS, BLOCK = 4, 8, 1 << 19
AT_ONCE, TRICKLES = 10_000, 1000
COMPUTE = 0.05
"""Seconds of a step before its exchange."""
PAIRS, WINDOW, CALM = 3, 5.0, 2.0
"""Seconds of a window, and between two of them."""
RATIO = 0.9
SPARE_FILES = 256


def main() -> None:
    words = clock.asked(__doc__)
    words.workers = 0  # none of psjob's own
    compute = 0.0 if words.what == "exchange" else COMPUTE
    with job.running(words, workers=WORKERS, mode="async") as running:
        at, shard = running.config["shards"][0], running.shards[0].pid
        until_started(at["statusPort"])
        clients = Crowd((at["host"], at["port"]), running.config["run"], running.keys["workers"], WORKERS, "async", BLOCKS, BLOCK)
        try:
            clients.join()
            clients.step()
            with flooding((at["host"], at["port"])) as flood:
                found = [(window(clients, shard, compute), flooded(clients, shard, compute, flood)) for _ in range(PAIRS)]
        finally:
            clients.close()
    ratios = [loud[0] / quiet[0] for quiet, loud in found]
    quiet_rate, loud_rate = (statistics.median(side[0] for side in sides) for sides in zip(*found, strict=True))
    note = f"{loud_rate:.1f} against {quiet_rate:.1f} a second; of each pair " + ", ".join(f"{ratio:.2f}" for ratio in ratios)
    title = f"steps a second, {AT_ONCE:,} strangers at once and {TRICKLES:,} that trickle, over a quiet time"
    extra = statistics.median(loud[1] - quiet[1] / quiet[0] * loud[0] for quiet, loud in found)
    clock.answer_rows(
        [
            clock.row(title, statistics.median(ratios), "times", least=RATIO if compute else None, note=note),
            clock.row("processor time of the shard for strangers", extra, "cores", note="beyond that of as many quiet steps"),
            clock.row("processor time of the strangers' process", statistics.median(loud[2] for _, loud in found), "cores"),
        ]
    )


@dataclass(frozen=True)
class Flood:
    """A process of strangers. It begins at `go` and ends at `stop`; then it clears `go`."""

    go: Event
    stop: Event
    pid: int


def window(clients: Crowd, shard: int, compute: float) -> tuple[float, float]:
    """Steps a second, and processor seconds of the shard a second."""
    began, before, steps = time.perf_counter(), spent(shard), 0
    while (took := time.perf_counter() - began) < WINDOW:
        time.sleep(compute)
        clients.step()
        steps += 1
    return steps / took, (spent(shard) - before) / took


def flooded(clients: Crowd, shard: int, compute: float, flood: Flood) -> tuple[float, float, float]:
    """As `window`, with strangers from its beginning on, and their processor seconds a second; comes back when they have gone."""
    flood.stop.clear()
    before = spent(flood.pid)
    flood.go.set()
    try:
        rate, cost = window(clients, shard, compute)
        return rate, cost, (spent(flood.pid) - before) / WINDOW
    finally:
        flood.stop.set()
        while flood.go.is_set():
            time.sleep(0.05)
        time.sleep(CALM)


@contextlib.contextmanager
def flooding(address: tuple[str, int]) -> Iterator[Flood]:
    """Those of another process; killed in the end."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    needed = AT_ONCE + TRICKLES + SPARE_FILES
    if files != resource.RLIM_INFINITY and files < needed:
        raise RuntimeError(
            f"a process may have {files} open files here, and the strangers need {needed}; raise the hard limit (ulimit -Hn)"
        )
    context = multiprocessing.get_context("spawn")
    go, stop = context.Event(), context.Event()
    process = context.Process(target=_act, args=(address, go, stop), daemon=True)
    process.start()
    assert process.pid is not None
    try:
        yield Flood(go, stop, process.pid)
    finally:
        process.kill()
        process.join()


def _act(address: tuple[str, int], go: Event, stop: Event) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    while True:
        go.wait()
        with strangers.trickling(address, TRICKLES):
            strangers.flood(address, AT_ONCE)
            stop.wait()
        go.clear()


if __name__ == "__main__":
    main()
