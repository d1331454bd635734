"""Memory of a worker and a shard in sync training: anonymous and shared pages by proportional set size (PSS), where a page that several
processes have counts in parts. Pages of libraries are left out: they count less the more processes of torch a machine has.

A worker is held against a process of plain torch that makes the same steps with the same model; what it has beyond that is to be at most
1.2 times the model's bytes. A shard is held against a process that has imported the runtime and holds nothing, plus its parameters, its
optimizer's state and the credits of its workers; what it has beyond is to be at most a tenth of those, and 60 MiB.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import clock
import job
import torch

import psjob

MIB = 1 << 20
CREDIT = 32 * MIB
STEPS = 20
WAIT_SECONDS = 60.0


def main() -> None:
    words = clock.asked(__doc__)
    if words.part:
        {"worker": attached, "plain": plain, "empty": empty}[words.part](words)
        return
    model = words.megabytes * 1_000_000
    state = {"sgd": 0, "adam": 2}[words.optimizer] * model
    nothing, alone = standing(words, "empty"), standing(words, "plain")
    rows = []
    for transport in ("tcp", "auto"):
        named = "TCP" if transport == "tcp" else "shared memory"
        with job.running(words, transport=transport) as running:
            steady(running.workers[0])
            worker, shard = pss(running.workers[0].pid), pss(running.shards[0].pid)
        base = model + state + CREDIT * words.workers
        note = f"{worker / MIB:.0f} MiB, plain torch {alone / MIB:.0f}"
        rows.append(
            clock.row(f"{named}: worker beyond plain torch, of the model's bytes", (worker - alone) / model, "times", 1.2, None, note)
        )
        note = f"{shard / MIB:.0f} MiB; empty {nothing / MIB:.0f}, parameters, state and credits {base / MIB:.0f}"
        limit = (0.1 * base + 60 * MIB) / MIB
        rows.append(clock.row(f"{named}: shard beyond its parts", (shard - nothing - base) / MIB, "MiB", limit, None, note))
    clock.answer_rows(rows)


def pss(pid: int) -> int:
    """Bytes, each page divided by the number of processes that have it."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return sum(int(lines[name].split()[0]) << 10 for name in ("Pss_Anon", "Pss_Shmem"))


def standing(words: argparse.Namespace, part: str) -> int:
    """PSS of a process of this program that is through with its steps."""
    process = clock.spawn(words, part)
    try:
        steady(process)
        return pss(process.pid)
    finally:
        process.kill()
        process.wait()


def steady(process: subprocess.Popen[str]) -> None:
    """Wait until it says that it has made its steps. Raises RuntimeError if it ends instead."""
    assert process.stdout is not None
    if process.stdout.readline().strip() != "steady":
        raise RuntimeError(f"{sys.argv[0]}: a process ended with {process.wait()} before it had made its steps")


def empty(_words: argparse.Namespace) -> None:
    import psjob.shard.server  # noqa: F401

    torch.ones(4).add_(1)
    stand()


def plain(words: argparse.Namespace) -> None:
    step(*made(words))


def attached(words: argparse.Namespace) -> None:
    step(*psjob.attach(*made(words)))


def made(words: argparse.Namespace) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    each = words.megabytes * 250_000 // words.tensors
    model = torch.nn.ParameterList([torch.zeros(each) for _ in range(words.tensors)])
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    return model, kinds[words.optimizer](model.parameters(), lr=clock.RATE)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Steps with gradients that are made anew each time, as zero_grad and backward do."""
    for _ in range(STEPS):
        optimizer.zero_grad()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    job.check_road()
    stand()


def stand() -> None:
    print("steady", flush=True)
    time.sleep(WAIT_SECONDS)
    os._exit(0)


if __name__ == "__main__":
    main()
