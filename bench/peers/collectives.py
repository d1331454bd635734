"""Collectives of psjob between four processes over slow links, against their cost model.

Every pair of ranks has a link of its own each way: a message leaves it α + bytes/B after the message before, and only then goes through
gloo. Rates are low: what is measured is who waits for whom, not this machine. Each strategy runs in the chunks that it has for so many
bytes, and every rank checks its sums, and what it sent on each link, against the schedule.
"""

from __future__ import annotations

import argparse
import os
import queue
import statistics
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import clock
import slow_link
import torch
import torch.distributed as dist

from psjob.collectives.all_reduce import Pending, PointToPoint, run_schedule
from psjob.collectives.schedule import Schedule, schedule_of
from psjob_client.topology import costs

RANKS, DEVICES, CHUNKS = 4, 2, 8
NUMEL = 1 << 20
SMALL = 1 << 10
"""Elements of float32, of a large vector and of one whose messages are all latency."""
RATE, LATENCY = 10e6, 4e-3
"""Bytes a second of a link each way, and seconds of each message. What a message costs this machine, 1 to 2 ms, is little beside."""
ROUNDS, DEADLINE = 3, 60.0
LARGE = NUMEL * 4
LAWS = {
    "mirrored": costs.chain_seconds(LARGE, RANKS, RATE, LATENCY, chunks=CHUNKS),
    "ring": costs.ring_seconds(LARGE, RANKS, RATE, LATENCY),
    "both-ways-ring": costs.both_ways_ring_seconds(LARGE, RANKS, RATE, LATENCY),
    "tree": costs.tree_seconds(LARGE, RANKS, RATE, LATENCY),
    "pipelined-tree": costs.pipelined_tree_seconds(LARGE, RANKS, RATE, LATENCY, chunks=CHUNKS),
    "servers": 2 * (LATENCY + LARGE / (RANKS * RATE)),
    "hierarchical": costs.levels(
        2 * costs.tree_one_way(LARGE, DEVICES, RATE, LATENCY, chunks=RANKS // DEVICES),
        costs.ring_seconds(LARGE, RANKS // DEVICES, RATE, LATENCY),
    ),
}
"""Seconds of a large vector. Four ranks have no double ring, and the links of their double tree are shared."""


def main() -> None:
    words = clock.asked(__doc__)
    if words.part:
        work(words)
        return
    (port,) = clock.free_ports(1)
    parts = [clock.spawn(words, "rank", rank, port) for rank in range(RANKS)]
    found = clock.last_line(parts[0])
    for part in parts[1:]:
        part.communicate(timeout=60)
    rows = []
    for name, seconds in zip(LAWS, found, strict=False):
        note = f"{seconds * 1e3:.0f} ms for {LARGE / 1e6:.1f} MB, the model says {LAWS[name] * 1e3:.0f}"
        rows.append(clock.row(name, seconds / LAWS[name], "of the model", 1.15, 0.85, note))
    ring, tree = found[len(LAWS) :]
    said = costs.ring_seconds(4 * SMALL, RANKS, RATE, LATENCY) / costs.tree_seconds(4 * SMALL, RANKS, RATE, LATENCY)
    rows.append(clock.row("ring over tree for 4 KiB", ring / tree, "times", said * 1.2, said / 1.2, f"the model says {said:.2f}"))
    clock.answer_rows(rows)


def join(words: argparse.Namespace, ranks: int) -> None:
    """Be one rank of a group on this machine."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(words.port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=words.rank, world_size=ranks)


def work(words: argparse.Namespace) -> None:
    join(words, RANKS)
    links = Links(dist.group.WORLD)
    found = [measure(schedule_of(name, RANKS, CHUNKS, DEVICES), NUMEL, links) for name in LAWS]
    found += [measure(schedule_of(name, RANKS), SMALL, links) for name in ("ring", "tree")]
    clock.answer(found)
    dist.barrier()
    dist.destroy_process_group()


def measure(plan: Schedule, numel: int, links: Links) -> float:
    """Median seconds until the last rank has its sum. Raises RuntimeError if a sum or the use of a link is not as planned."""
    found = []
    for _ in range(ROUNDS):
        vector = torch.arange(numel, dtype=torch.float32).remainder_(97).add_(links.rank)
        wanted = torch.arange(numel, dtype=torch.float32).remainder_(97).mul_(RANKS).add_(RANKS * (RANKS - 1) / 2)
        links.passed.clear()
        dist.barrier()
        slowest = torch.tensor(clock.once(lambda vector=vector: run_schedule(plan, vector, links, DEADLINE)))
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        found.append(slowest.item())
        planned = {peer: count for (rank, peer), count in plan.link_elements(numel).items() if rank == links.rank}
        if not torch.equal(vector, wanted) or links.passed != planned:
            raise RuntimeError(f"rank {links.rank} sent {dict(links.passed)} elements, the schedule says {planned}; or its sum is wrong")
    return statistics.median(found)


class Links(PointToPoint):
    """Messages to each peer go through a link of RATE and LATENCY, one after the other."""

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self.passed: Counter[int] = Counter()
        self._lines: dict[int, queue.SimpleQueue[tuple[torch.Tensor, int, Leaving]]] = {}

    def send(self, data: torch.Tensor, peer: int, tag: int) -> Pending:
        self.passed[peer] += data.numel()
        if peer not in self._lines:
            self._lines[peer] = queue.SimpleQueue()
            threading.Thread(target=self._carry, args=(peer, self._lines[peer]), daemon=True).start()
        leaving = Leaving()
        self._lines[peer].put((data, tag, leaving))
        return leaving

    def way(self, peer: int) -> Callable[[int], None]:
        """What makes a message of so many bytes wait on its way to `peer`."""
        bucket = slow_link.Bucket(RATE, burst=0.0)
        return lambda nbytes: bucket.take(nbytes + int(LATENCY * RATE))

    def _carry(self, peer: int, line: queue.SimpleQueue[tuple[torch.Tensor, int, Leaving]]) -> None:
        passed = self.way(peer)
        while True:
            data, tag, leaving = line.get()
            passed(data.nbytes)
            leaving.work = super().send(data, peer, tag)
            leaving.left.set()


@dataclass
class Leaving:
    """A message on its link, and then on its way through gloo."""

    left: threading.Event = field(default_factory=threading.Event)
    work: Pending | None = None

    def wait(self, timeout: timedelta) -> object:
        if not self.left.wait(timeout.total_seconds()) or self.work is None:
            raise RuntimeError("the link carried it too late")
        return self.work.wait(timeout)


if __name__ == "__main__":
    main()
