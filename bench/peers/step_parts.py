"""Where a step goes, and what shortens it: jobs in which one part of a step dominates, each with the settings that psjob names for it.

`--what NAME` runs only that case. A case is a job of this machine: a slow link, a worker that is slow, a large update, copies of large
gradients. Each remedy is tried alone. The figure is the time of a step in the case over that with the remedy.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import clock
import job
import slow_link
import torch

import psjob
from psjob.process.status_client import ask_shard

WARM_UP = 3
SECONDS = 3.0
"""Of the steps that are measured, of each job."""


@dataclass(frozen=True)
class Setting:
    """One job. `config`: what its config has beside the others'. `rate`: bytes a second of its links each way, 0: no limit.

    A step computes for `compute` seconds, `late` more on worker 1 in each second step. The model has `megabytes` MB.
    """

    megabytes: float = 8.0
    workers: int = 2
    shards: int = 1
    compute: float = 0.02
    late: float = 0.0
    rate: float = 0.0
    optimizer: str = "sgd"
    overlap: bool = False
    layers: int = 8
    keeps: bool = False
    """The script keeps its gradients."""
    config: Mapping[str, Any] = field(default_factory=dict)


def main() -> None:
    words = clock.asked(__doc__)
    if words.part:
        work(words)
        return
    setting = Setting(**json.loads(words.what or "{}"))
    print(json.dumps(measure(words, setting)))


def measure(words: argparse.Namespace, setting: Setting) -> dict[str, Any]:
    """Seconds of a step by the worker's clock, and what shard 0 says of it."""
    links: list[slow_link.SlowLink] = []

    def slowly(config: dict[str, Any], rank: int) -> dict[str, Any]:
        if not setting.rate:
            return config
        found = [
            slow_link.SlowLink((peer["host"], peer["port"]), slow_link.Bucket(setting.rate), slow_link.Bucket(setting.rate))
            for peer in config["shards"]
        ]
        links.extend(found)
        return config | {"shards": [peer | {"port": link.port} for peer, link in zip(config["shards"], found, strict=True)]}

    words.workers, words.shards = setting.workers, setting.shards
    words.what = json.dumps(setting.__dict__ | {"config": dict(setting.config)})
    with job.running(words, to_worker=slowly, **setting.config) as running:
        lines = []
        for worker in running.workers:
            lines.append(json.loads(worker.stdout.readline()))
        told = ask_shard("127.0.0.1", running.config["shards"][0]["statusPort"], running.keys["questions"], seconds=10)
        for worker in running.workers:
            worker.kill()
    for link in links:
        link.close()
    return {
        "step": lines,
        "parts": told["coordinator"]["stepParts"],
        "advice": told["coordinator"]["stepAdvice"],
        "transport": told["coordinator"]["transport"],
    }


def work(words: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    setting, rank = Setting(**json.loads(words.what)), int(os.environ["PSJOB_INDEX"])
    numel = max(1, int(setting.megabytes * 250_000 / setting.layers))
    model = torch.nn.Sequential(*[Sleeper(numel, setting.compute / setting.layers / 2) for _ in range(setting.layers)])
    made = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[setting.optimizer]
    attached, optimizer = psjob.attach(model, made(model.parameters(), lr=1e-6), overlap=setting.overlap)
    number = 0

    def step() -> None:
        nonlocal number
        number += 1
        optimizer.zero_grad(set_to_none=not setting.keeps)
        if setting.late and rank == number % 2:
            time.sleep(setting.late)
        attached(torch.ones(1)).backward()
        optimizer.step()

    for _ in range(WARM_UP):
        step()
    seconds, began = [], time.perf_counter()
    while time.perf_counter() - began < SECONDS or len(seconds) < 5:
        last = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - last)
    print(json.dumps(sum(seconds) / len(seconds)), flush=True)
    while True:
        step()


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds, ctx.weight = seconds, weight
        time.sleep(seconds)
        return x + 0.0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        time.sleep(ctx.seconds)
        return grad, torch.ones_like(ctx.weight), None


class Sleeper(torch.nn.Module):
    def __init__(self, numel: int, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = torch.nn.Parameter(torch.zeros(numel)), seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(x, self.weight, self.seconds)


if __name__ == "__main__":
    main()
