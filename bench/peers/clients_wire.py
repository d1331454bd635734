"""What a push costs a shard's process with many workers that are a socket each: processor time by the number of workers, threads, memory.

A shard of few clients and one of many stand side by side and are measured in turn; a figure is the median of the turns' ratios. 4,000
clients join, step and leave, where the system gives that many descriptors.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import statistics
import time
import urllib.request
from collections.abc import Iterator

import clock
import job
from light_clients import Crowd, spent, status

from psjob.contract import STARTED_PATH

BLOCKS, BLOCK = 2, 4096
"""Of the model; a block's bytes."""
FEW, MANY, MOST = 20, 1000, 4000
PUSHES = 8000
"""Of a turn at least; with few clients, of as many steps as that takes."""
TURNS, WARM_UP = 7, 2
RATIO = 1.2
CLIENT_KIB = 64
"""Memory that a client may cost beside its gradients."""
MODES = ("sync", "async")
OWN_FILES = 64


def main() -> None:
    words = clock.asked(__doc__)
    rows = []
    for mode in MODES:
        with crowd(words, mode, FEW) as (few, shard), crowd(words, mode, MANY) as (many, other):
            found = [(cost(few, shard), cost(many, other)) for _ in range(TURNS)]
            at_few, at_many = (statistics.median(side) * 1e6 for side in zip(*found, strict=True))
            ratio = statistics.median(much / little for little, much in found)
            note = f"{at_many:.0f} µs with {MANY:,}, {at_few:.0f} with {FEW}, medians of {TURNS} turns"
            rows.append(clock.row(f"a push in {mode}, {MANY:,} workers over {FEW}", ratio, "times", most=RATIO, note=note))
            if mode == "sync":
                threads = min(status(other)[0] for _ in range(5))
                rows.append(clock.row(f"threads with {MANY:,} workers", threads, "threads", most=8 + max(2, len(os.sched_getaffinity(0)))))
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = MOST if files == resource.RLIM_INFINITY else min(MOST, files - OWN_FILES)
    with crowd(words, "sync", most) as (clients, shard):
        clients.step()
        own = status(shard)[1] - clients.before
        each = own / most - BLOCKS * BLOCK / 1024
        rows.append(clock.row(f"memory of each of {most:,} workers beside its gradients", each, "KiB", most=CLIENT_KIB))
        began = time.monotonic()
        clients.leave()
        note = f"join {clients.joined:.1f} s, leave {time.monotonic() - began:.1f} s"
        rows.append(clock.row("clients that have joined, stepped and left", most, "clients", least=most, note=note))
    clock.answer_rows(rows)


class Timed(Crowd):
    """`before` is the shard's memory without a client, in KiB; joining took `joined` seconds."""

    before, joined = 0, 0.0


@contextlib.contextmanager
def crowd(words: argparse.Namespace, mode: str, workers: int) -> Iterator[tuple[Timed, int]]:
    """Clients that have joined and made their first steps, and the process of their shard."""
    words.workers = 0  # none of psjob's own
    with job.running(words, workers=workers, mode=mode) as running:
        shard, at = running.shards[0].pid, running.config["shards"][0]
        until_started(at["statusPort"])
        clients = Timed((at["host"], at["port"]), running.config["run"], running.keys["workers"], workers, mode, BLOCKS, BLOCK)
        try:
            clients.before, began = status(shard)[1], time.monotonic()
            clients.join()
            clients.joined = time.monotonic() - began
            for _ in range(WARM_UP):
                clients.step()
            yield clients, shard
        finally:
            clients.close()


def cost(clients: Crowd, shard: int) -> float:
    """Processor seconds of a push."""
    steps = max(1, PUSHES // (clients.workers * BLOCKS))
    began = spent(shard)
    for _ in range(steps):
        clients.step()
    return (spent(shard) - began) / (steps * clients.workers * BLOCKS)


def until_started(port: int, seconds: float = 60.0) -> None:
    """Come back when a shard serves."""
    until = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{STARTED_PATH}", timeout=5):
                return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


if __name__ == "__main__":
    main()
