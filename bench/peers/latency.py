"""A step of 1,000 parameters, two workers in sync: median and 95th percentile with psjob by each road, and of gloo's all_reduce with SGD.

The gradient is there already: what is timed is `optimizer.step()`, and on the other side the sum, its mean and a fused SGD step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import clock
import psjob_run
import torch

WORKERS = 2
ELEMENTS = 1000
WARM_UP, MEASURED = 200, 1000
RUNS = 3
"""Of each side, in turn; a row's figure is the median of its runs."""
SECONDS = 90.0
MOST = 1.2
"""Milliseconds that the median step by shared memory may take."""


def main() -> None:
    words = clock.asked(__doc__)
    if words.part:
        {"psjob": psjob_worker, "gloo": gloo_rank}[words.part](words)
        return
    sides: dict[str, Callable[[], Sequence[float]]] = {
        "psjob by shared memory": lambda: psjob("auto"),
        "psjob over TCP": lambda: psjob("tcp"),
        "gloo all_reduce and SGD": lambda: gloo(words),
    }
    found: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    for _ in range(RUNS):
        for side, measure in sides.items():
            seconds = measure()
            found[side].append((statistics.median(seconds), statistics.quantiles(seconds, n=20)[-1]))
    rows = []
    for side, runs in found.items():
        for what, each in zip(("median", "95th percentile"), zip(*runs, strict=True), strict=True):
            note = "runs: " + ", ".join(f"{one * 1e3:.2f}" for one in each)
            most = MOST if (side, what) == ("psjob by shared memory", "median") else None
            rows.append(clock.row(f"{side}: {what}", statistics.median(each) * 1e3, "ms", most=most, note=note))
    clock.answer_rows(rows)


def psjob(transport: str) -> Sequence[float]:
    """Seconds of each step of worker 0."""
    with tempfile.TemporaryDirectory() as folder:
        command = [os.path.abspath(__file__), "--part", "psjob"]
        summary = psjob_run.run(folder, command, SECONDS, WORKERS, training={"mode": "sync", "transport": transport})
        psjob_run.check_road(summary, "shared" if transport == "auto" else "tcp")
        found: list[float] = json.loads((Path(folder) / "rank-0.json").read_text())
    return found


def psjob_worker(words: argparse.Namespace) -> None:
    import psjob as ps

    torch.set_num_threads(1)
    model = torch.nn.ParameterList([torch.zeros(ELEMENTS)])
    attached, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=clock.RATE))
    attached[0].grad = torch.ones(ELEMENTS)
    found = clock.rounds(optimizer.step, WARM_UP, MEASURED)
    clock.check((float(attached[0][at].detach()) for at in (0, -1)), clock.moved(found, WARM_UP))
    Path(f"rank-{ps.rank()}.json").write_text(json.dumps(found))


def gloo(words: argparse.Namespace) -> Sequence[float]:
    """Seconds of each step of rank 0."""
    (port,) = clock.free_ports(1)
    parts = [clock.spawn(words, "gloo", rank, port) for rank in range(WORKERS)]
    try:
        found = [clock.last_line(part, SECONDS) for part in parts]
        return found[0]
    finally:
        for part in parts:
            part.kill()
            part.wait()


def gloo_rank(words: argparse.Namespace) -> None:
    import torch.distributed as dist

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(words.port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=words.rank, world_size=WORKERS)
    weight = torch.zeros(ELEMENTS, requires_grad=True)
    weight.grad = torch.ones(ELEMENTS)
    optimizer, grad = torch.optim.SGD([weight], lr=clock.RATE, fused=True), weight.grad

    def step() -> None:
        dist.all_reduce(grad)
        grad.mul_(1.0 / WORKERS)
        optimizer.step()

    found = clock.rounds(step, WARM_UP, MEASURED)
    clock.check((float(weight[at].detach()) for at in (0, -1)), clock.moved(found, WARM_UP))
    clock.answer(found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
