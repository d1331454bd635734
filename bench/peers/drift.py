"""What it costs that shard 0 compares the weights of workers: the script's thread, a step of 100 MB and a checkpoint of it."""

from __future__ import annotations

import argparse
import statistics
import time

import clock
import job
import torch

import psjob
from psjob.api import attach as attaching

STEPS = 96
"""Looks come every 16 steps."""
WHOLES = 5
INTERVAL = 30.0
"""Seconds from one checkpoint to the next where nobody says otherwise."""


def main() -> None:
    words = clock.asked(__doc__)
    if words.part:
        work(words)
        return
    words.workers = 2
    with job.running(words) as running:
        step, look, whole = running.answers()[0]
    note = f"{look * 1e6:.0f} µs of a step of {step * 1e3:.1f} ms"
    clock.answer_rows(
        [
            clock.row("looks, as a part of a step", look / step, "", most=0.01, note=note),
            clock.row("sums at a checkpoint, as a part of 30 s", whole / INTERVAL, "", most=0.01, note=f"{whole * 1e3:.1f} ms"),
        ]
    )


def work(words: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    each = words.megabytes * 250_000 // words.tensors
    model = torch.nn.ParameterList([torch.zeros(each) for _ in range(words.tensors)])
    attached, optimizer = psjob.attach(model, torch.optim.SGD(model.parameters(), lr=clock.RATE))
    for parameter in attached.parameters():
        parameter.grad = torch.ones_like(parameter)
    current = attaching.current
    assert current is not None
    looks: list[float] = []

    def looked(snapshot: bool) -> None:
        began = time.thread_time()
        current.digests.step_boundary(snapshot)
        looks.append(time.thread_time() - began)

    current.session.at_step_boundary = looked
    steps = [clock.once(optimizer.step)[0] for _ in range(STEPS)]
    wholes = []
    for _ in range(WHOLES):
        began = time.thread_time()
        current.digests.step_boundary(snapshot=True)
        wholes.append(time.thread_time() - began)
    clock.answer([statistics.median(steps), sum(looks) / len(looks), statistics.median(wholes)])


if __name__ == "__main__":
    main()
