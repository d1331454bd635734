"""How long 500 workers take from dialling a shard to being welcome, each on a connection of its own, 32 dialling at a time.

One process plays all of them, so that the time is also that of its own half of each handshake, and of the cores that it shares with the
shard. To compare two commits, run `python bench/peers/joins.py --what once` in a checkout of each, in turn; a ratio is that of one turn.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import clock
import job
from clients_wire import BLOCK, BLOCKS, until_started
from light_clients import Client, Crowd, spent

WORKERS, AT_ONCE, TURNS = 500, 32, 3


def main() -> None:
    words = clock.asked(__doc__)
    words.workers = 0  # none of psjob's own
    turns = [join(words) for _ in range(1 if words.what == "once" else TURNS)]
    seconds, processor = (statistics.median(side) for side in zip(*turns, strict=True))
    note = "of each turn " + ", ".join(f"{took:.3f}" for took, _ in turns)
    clock.answer_rows(
        [
            clock.row(f"join of {WORKERS} workers", seconds, "s", note=note),
            clock.row("processor time of the shard for one that joins", 1e3 * processor / WORKERS, "ms"),
        ]
    )


def join(words: argparse.Namespace) -> tuple[float, float]:
    """Seconds until all are welcome at a fresh shard, and processor seconds of that shard."""
    with job.running(words, workers=WORKERS, mode="sync") as running:
        at, shard = running.config["shards"][0], running.shards[0].pid
        until_started(at["statusPort"])
        clients = Crowd((at["host"], at["port"]), running.config["run"], running.keys["workers"], WORKERS, "sync", BLOCKS, BLOCK)
        try:
            with ThreadPoolExecutor(AT_ONCE) as pool:
                clients._dial = together(clients._dial, pool)
                began, before = time.perf_counter(), spent(shard)
                clients.join()
                return time.perf_counter() - began, spent(shard) - before
        finally:
            clients.close()


def together(dial: Callable[[int], Client], pool: ThreadPoolExecutor) -> Callable[[int], Client]:
    """Who dials ranks in their order: when the second is asked for, all others are under way."""
    rest: list[Iterator[Client]] = []

    def one(rank: int) -> Client:
        if rank == 0:
            return dial(rank)
        if not rest:
            rest.append(pool.map(dial, range(1, WORKERS)))
        return next(rest[0])

    return one


if __name__ == "__main__":
    main()
