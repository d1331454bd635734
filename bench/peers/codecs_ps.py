"""Codecs on slow links: a cycle with each of them against the same cycle with none, by the link's speed (1 worker, 1 shard, SGD)."""

from __future__ import annotations

import argparse
import os
import statistics
from typing import Any

import clock
import job
import slow_link
import torch

import psjob

LINKS = ((0.1, 0.1), (0.05, 1.0))
"""Gb/s up (pushes) and down (answers)."""
CODECS = (("none", "none"), ("bf16", "bf16"), ("int8", "bf16"), ("topk", "bf16"), ("randomk", "bf16"))
MEGABYTES = 10


def main() -> None:
    words = clock.asked(__doc__)
    if words.part:
        work(words)
        return
    rows = []
    for up, down in LINKS:
        plain = 0.0
        for push, pull in CODECS:
            found = statistics.median(measure(words, (up, down), push, pull))
            plain = plain or found
            note = f"{found * 1e3:.0f} ms a cycle of {MEGABYTES} MB"
            rows.append(clock.row(f"{up} Gb/s up, {down} down, push {push}, pull {pull}", found / plain, "of none", note=note))
    clock.answer_rows(rows)


def measure(words: argparse.Namespace, gigabits: tuple[float, float], push: str, pull: str) -> list[float]:
    """Seconds of each cycle."""
    up, down = (1e9 / 8 * way for way in gigabits)
    links: list[slow_link.SlowLink] = []

    def slowly(config: dict[str, Any], rank: int) -> dict[str, Any]:
        for peer in config["shards"]:
            links.append(slow_link.SlowLink((peer["host"], peer["port"]), slow_link.Bucket(up), slow_link.Bucket(down)))
        return config | {"shards": [peer | {"port": link.port} for peer, link in zip(config["shards"], links, strict=True)]}

    with job.running(words, to_worker=slowly, compression={"push": push, "pull": pull, "ratio": 0.01}) as running:
        found = running.answers()[0]
    for link in links:
        link.close()
    return found


def work(words: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    model = torch.nn.ParameterList([torch.zeros(MEGABYTES * 250_000)])
    attached, optimizer = psjob.attach(model, torch.optim.SGD(model.parameters(), lr=clock.RATE))
    attached[0].grad = torch.randn(MEGABYTES * 250_000)
    found = [second for _ in range(5) for second in clock.once(optimizer.step)][1:]
    clock.answer(found)
    os._exit(0)  # the others of this job are killed next


if __name__ == "__main__":
    main()
