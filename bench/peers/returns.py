"""How soon training continues after a SIGKILL: seconds until the next step is counted, by what was lost.

`--what process:1000` kills the process that serves in a shard's pod so often, `worker:20` a worker, `shard:20` a shard with its pod.
Victims and moments, which fall anywhere in a step, follow from a seed. Two workers, two shards, sync; `--megabytes` of weights with Adam.
Steps sleep for 20 ms. `--device cuda`: the models lie on the first GPU.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

import clock
import psjob_run
import torch
from on_device import device_of

import psjob as ps

SLEEP = 0.02
FIRST = 500
"""Steps before the first kill: keepers and spares have made their imports then."""
APART = {"process": 12, "worker": 500, "shard": 600}
"""Steps between two kills, about. A worker, or a shard with its pod, finds a spare process that has made its imports meanwhile."""
FAULT = {"process": ("crash", "shard"), "worker": ("kill", "worker"), "shard": ("kill", "shard")}
MOST = {"process": 0.3, "worker": 1.0, "shard": 3.0}
"""Seconds of the median."""
EPOCH = 20
MEGABYTES = 17
"""Of weights that make a step on two cores last about twice as long as the sleep: with more there are fewer steps between two kills."""


def main() -> None:
    words = clock.asked(__doc__)
    if words.part:
        train(words, int(words.part))
        return
    device_of(words)
    what, _, count = (words.what or "process:40").partition(":")
    longer = 1 + words.megabytes // MEGABYTES
    apart = max(12, APART[what] // longer)
    draw, faults, step = random.Random(7), list[str](), max(apart, FIRST // longer)
    for _ in range(int(count)):
        action, kind = FAULT[what]
        faults += ["--fault", f"{action}:{kind}-{draw.randrange(2)}@step={step}+{longer * draw.random() * SLEEP:.3f}s"]
        step += draw.randint(apart // 2, 3 * apart // 2)
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(__file__).resolve()), "--part", str(step + EPOCH), "--megabytes", str(words.megabytes)]
        command += ["--device", words.device]
        seconds = 120 + 10 * SLEEP * step * longer + 8 * len(faults)
        process = psjob_run.start(folder, command, 2, 2, words=faults, checkpoint={"periodSeconds": 2}, runPolicy={"backoffLimit": 1000})
        summary = psjob_run.ended(folder, process, seconds)
    passed = sorted(float(recovery["secondsToPassStep"]) for recovery in summary["recoveries"])
    rewinds = sum(int(worker["rewinds"]) for worker in summary["workers"])
    note = f"{len(passed)} kills in {summary['steps']} steps of {words.megabytes} MB, longest {passed[-1]:.2f} s"
    rows = [clock.row(f"{what} lost, until the next step: median", statistics.median(passed), "s", most=MOST[what], note=note)]
    rows.append(clock.row("the same: 99th percentile", passed[int(0.99 * (len(passed) - 1))], "s", most=1.0 if what == "process" else None))
    if what != "process":
        first = statistics.median(float(recovery["secondsToFirstPush"]) for recovery in summary["recoveries"])
        rows.append(clock.row("until it had joined again" if what == "worker" else "until its first push again", first, "s"))
    rows.append(clock.row("workers that began again", rewinds, "", most=0 if what == "process" else None))
    clock.answer_rows(rows)


def train(words: argparse.Namespace, steps: int) -> None:
    torch.set_num_threads(1)
    device = device_of(words)
    model = torch.nn.ParameterList([torch.zeros(words.megabytes * 62_500, device=device) for _ in range(4)])
    _, optimizer = ps.attach(model, torch.optim.Adam(model.parameters(), lr=clock.RATE))
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(2 * EPOCH)))
    for _ in ps.epochs(-(-steps // EPOCH)):
        for _ in ps.shard(batches):
            time.sleep(SLEEP)
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()


if __name__ == "__main__":
    main()
