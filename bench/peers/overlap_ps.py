"""Overlap on a slow link: a net that sleeps, LAYERS layers of c ms compute and d ms transfer each.

Half of c is a layer's forward and half its backward; half of d is the push of its gradient and half the pull of its weights.
What hides all that can be hidden takes L·c + d a step where d is at most c, else c + L·d. `--what on` (the default) measures with
overlap against that, `--what off` without it against L·(c + d). `--what dense` and `dense-off` train a net of --megabytes that computes,
with nothing between it and its shard.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import clock
import job
import slow_link
import torch

import psjob

LAYERS = 8
COMPUTE = 0.040
TRANSFERS = (0.010, 0.020, 0.040, 0.080)
BATCH = 32
NUMEL = 1 << 18
"""Elements of a layer: 1 MiB, a block."""


def main() -> None:
    words = clock.asked(__doc__)
    if words.part:
        work(words)
        return
    if words.what.startswith("dense"):
        with job.running(words) as running:
            clock.answer(running.answers()[0])
        return
    on = words.what != "off"
    rows = []
    for transfer in TRANSFERS:
        found = statistics.median(measure(words, transfer))
        hidden = LAYERS * COMPUTE + transfer if transfer <= COMPUTE else COMPUTE + LAYERS * transfer
        model = hidden if on else LAYERS * (COMPUTE + transfer)
        what = f"c {COMPUTE * 1e3:.0f} ms, d {transfer * 1e3:.0f} ms, overlap {'on' if on else 'off'}"
        note = f"{found * 1e3:.0f} ms a step, the model says {model * 1e3:.0f}"
        rows.append(clock.row(what, found / model, "of the model", most=1.15 if on else None, note=note))
    clock.answer_rows(rows)


def measure(words: argparse.Namespace, transfer: float) -> list[float]:
    """Seconds of each step."""
    rate = NUMEL * 4 / (transfer / 2)
    links: list[slow_link.SlowLink] = []

    def slowly(config: dict[str, Any], rank: int) -> dict[str, Any]:
        links.extend(
            slow_link.SlowLink((peer["host"], peer["port"]), slow_link.Bucket(rate), slow_link.Bucket(rate)) for peer in config["shards"]
        )
        return config | {"shards": [peer | {"port": link.port} for peer, link in zip(config["shards"], links, strict=True)]}

    with job.running(words, to_worker=slowly) as running:
        found = running.answers()[0]
    for link in links:
        link.close()
    return found


def work(words: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dense, on = words.what.startswith("dense"), not words.what.endswith("off")
    width = round((words.megabytes * 250_000 / LAYERS) ** 0.5)
    torch.manual_seed(0)
    x = torch.randn(BATCH, width) if dense else torch.ones(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) if dense else Sleeper() for _ in range(LAYERS)])
    attached, optimizer = psjob.attach(model, torch.optim.SGD(model.parameters(), lr=clock.RATE), overlap=on)

    def step() -> None:
        optimizer.zero_grad()
        out = attached(x)
        (out.square().mean() if dense else out.sum()).backward()
        optimizer.step()

    found = clock.rounds(step)
    psjob.wait()
    if not dense:
        clock.check((float(p[at].detach()) for p in attached.parameters() for at in (0, -1)), clock.moved(found))
    clock.answer(found)
    os._exit(0)  # the others of this job are killed next


class Sleeper(torch.nn.Module):
    """A layer that computes by sleeping; its gradient is ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(NUMEL))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Sleeps.apply(x, self.weight)
        return out


class Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        time.sleep(COMPUTE / 2)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        time.sleep(COMPUTE / 2)
        return grads[0], torch.ones(NUMEL)


if __name__ == "__main__":
    main()
