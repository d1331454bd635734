"""How long 500 workers take from dialling a shard to being welcome, each on a connection of its own, one dialling after the other.

One process plays all of them, and reads what comes between two dials. To compare two commits, run this in a checkout of each, in turn:
`python bench/peers/joins.py --what once` there and here; a ratio is that of one turn.
"""

from __future__ import annotations

import argparse
import statistics
import time

import clock
import job
from clients_wire import BLOCK, BLOCKS, until_started
from light_clients import Crowd, spent

WORKERS, TURNS = 500, 3


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
            began, before = time.perf_counter(), spent(shard)
            clients.join()
            return time.perf_counter() - began, spent(shard) - before
        finally:
            clients.close()


if __name__ == "__main__":
    main()
