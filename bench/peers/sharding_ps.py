"""The sharding law: m workers and n shards, each behind a link of its own rate, over which M bytes go to the shards and come back.

A step cannot be shorter than M/B_worker, what one worker's link takes, nor than m·M/(n·B_server), what a shard's link takes for all
workers; both ways at once. Every worker's and every shard's link is a token bucket for each direction, in a proxy between each pair.
The model is M bytes in as many blocks as tensors (a parameter group each), so that a shard has several even where there are four.
Rates are low: what is measured is who waits for what, not this machine.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from typing import Any

import clock
import job
import slow_link
import torch

import psjob
from psjob.layout.blocks import Layout, TensorSpec, assign

COUNTS = (1, 2, 4)
TENSORS = 64
NUMEL = 1 << 16
BYTES = TENSORS * NUMEL * 4
WORKER_RATE, SERVER_RATE = 48e6, 32e6
"""Bytes a second, each direction."""
BURST = 256 << 10
"""Bytes that a link which was late may catch up, so that a machine that wakes a sleeper late is not taken for a slower link."""
STEPS = 3


def main() -> None:
    words = clock.asked(__doc__)
    if words.part:
        work(words)
        return
    rows = []
    for words.workers, words.shards in itertools.product(COUNTS, COUNTS):
        found = statistics.median(measure(words))
        law = max(BYTES / WORKER_RATE, words.workers * BYTES / (words.shards * SERVER_RATE))
        note = f"{found * 1e3:.0f} ms a step, the law says {law * 1e3:.0f}"
        rows.append(clock.row(f"{words.workers} workers, {words.shards} shards", found / law, "of the law", 1.2, 0.8, note))
    rows += [balance(shards) for shards in COUNTS[1:]]
    clock.answer_rows(rows)


class Both(slow_link.Bucket):
    """What passes two buckets, one after the other."""

    def __init__(self, *buckets: slow_link.Bucket) -> None:
        super().__init__(float("inf"))
        self._buckets = buckets

    def take(self, count: int) -> None:
        for bucket in self._buckets:
            bucket.take(count)


def measure(words: argparse.Namespace) -> list[float]:
    """Seconds of each step of rank 0."""
    shards = [(slow_link.Bucket(SERVER_RATE, BURST), slow_link.Bucket(SERVER_RATE, BURST)) for _ in range(words.shards)]
    links: list[slow_link.SlowLink] = []

    def slowly(config: dict[str, Any], rank: int) -> dict[str, Any]:
        up, down = slow_link.Bucket(WORKER_RATE, BURST), slow_link.Bucket(WORKER_RATE, BURST)
        peers = []
        for peer, (into, out) in zip(config["shards"], shards, strict=True):
            links.append(slow_link.SlowLink((peer["host"], peer["port"]), Both(up, into), Both(down, out)))
            peers.append(peer | {"port": links[-1].port})
        return config | {"shards": peers}

    with job.running(words, to_worker=slowly) as running:
        found = running.answers()[0]
    for link in links:
        link.close()
    return found


def balance(shards: int) -> dict[str, object]:
    """The largest shard of a model with tensors of very different sizes, as the planner of blocks assigns them."""
    sizes = [50_000_000, 12_345_678, *(997 * k for k in range(1, 400)), *(64 for _ in range(500))]
    layout = Layout.of([TensorSpec(f"t{index}", (size,), "float32") for index, size in enumerate(sizes)])
    loads = [0] * shards
    for block, owner in zip(layout.blocks, assign(layout, shards), strict=True):
        loads[owner] += block.nbytes
    return clock.row(f"largest of {shards} shards over the mean, 901 uneven tensors", max(loads) * shards / sum(loads), "times", 1.1)


def work(words: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    tensors = torch.nn.ParameterList([torch.zeros(NUMEL) for _ in range(TENSORS)])
    optimizer = torch.optim.SGD([{"params": [tensor]} for tensor in tensors], lr=clock.RATE)
    attached, stepping = psjob.attach(tensors, optimizer)
    for parameter in attached.parameters():
        parameter.grad = torch.ones_like(parameter)
    stepping.step()
    found = [seconds for _ in range(STEPS) for seconds in clock.once(stepping.step)]
    clock.check((float(p[at].detach()) for p in attached.parameters() for at in (0, -1)), -clock.RATE * (1 + STEPS))
    clock.answer(found)


if __name__ == "__main__":
    main()
