"""What the look at staleness and gap costs a push in async: processor time of the shard and its workers, with it and without, in turn.

Two jobs stand side by side, and the workers of one are halted while those of the other train. Of each turn the processor time of all its
processes is divided by the pushes that its shard has applied. The first updates, of which every push is compared, are not counted.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import time
from itertools import count

import clock
import job
import torch

import psjob
from psjob.process.status_client import ask_shard

SIZES = ((5_000, 1.08), (1_000_000, 1.03))
"""Elements of the model, and the most that a push may cost of one without the look."""
WORKERS = 3
WARM_UP = 150
"""Steps of a worker."""
JOBS = 3
TURNS = 6
SECONDS = 0.6
"""Of a turn."""
SETTLED = 0.05
"""Seconds after which a shard has answered what its workers sent before they were halted."""


def main() -> None:
    words = clock.asked(__doc__)
    if words.part:
        {"worker": work, "blind": blind}[words.part](words)
        return
    words.workers = WORKERS
    rows = []
    for elements, most in SIZES:
        words.what = str(elements)
        pairs = [pair for _ in range(JOBS) for pair in in_turn(words)]
        ratios = [seeing / other for seeing, other in pairs]
        low, _, high = statistics.quantiles(ratios, n=4)
        each = " and ".join(f"{statistics.median(side) * 1e6:.0f}" for side in zip(*pairs, strict=True))
        note = f"quartiles {low:.3f} and {high:.3f} of {len(ratios)} turns; {each} µs with and without"
        rows.append(clock.row(f"a push of {elements:,} elements", statistics.median(ratios), "times", most=most, note=note))
    clock.answer_rows(rows)


def in_turn(words: argparse.Namespace) -> list[tuple[float, float]]:
    """Processor seconds of a push, with the look and without, of each turn."""
    with job.running(words, mode="async") as seeing:
        halt_when_steady(seeing)
        with job.running(words, shard_program=(sys.argv[0], "--part", "blind"), mode="async") as other:
            halt_when_steady(other)
            return [(turn(seeing), turn(other)) for _ in range(TURNS)]


def turn(running: job.Running) -> float:
    seconds, pushes = spent(running), applied(running)
    send(running, signal.SIGCONT)
    time.sleep(SECONDS)
    send(running, signal.SIGSTOP)
    time.sleep(SETTLED)
    return (spent(running) - seconds) / (applied(running) - pushes)


def spent(running: job.Running) -> float:
    """Processor seconds of all processes of a job: Linux makes a clock's number of a process's."""
    return sum(time.clock_gettime(~process.pid << 3 | 2) for process in (*running.shards, *running.workers))


def applied(running: job.Running) -> int:
    return int(
        ask_shard("127.0.0.1", running.config["shards"][0]["statusPort"], running.keys["questions"], seconds=10)["counters"]["applied"]
    )


def halt_when_steady(running: job.Running) -> None:
    for worker in running.workers:
        assert worker.stdout is not None
        if worker.stdout.readline().strip() != "steady":
            raise RuntimeError(f"{sys.argv[0]}: a worker ended with {worker.wait()} before it had made its steps")
    send(running, signal.SIGSTOP)
    time.sleep(SETTLED)


def send(running: job.Running, number: signal.Signals) -> None:
    for worker in running.workers:
        os.kill(worker.pid, number)


def work(words: argparse.Namespace) -> None:
    """Step until it is killed."""
    torch.set_num_threads(1)
    model = torch.nn.ParameterList([torch.zeros(int(words.what))])
    attached, optimizer = psjob.attach(model, torch.optim.SGD(model.parameters(), lr=1e-9))
    for parameter in attached.parameters():
        parameter.grad = torch.ones_like(parameter)
    for step in count():
        optimizer.step()
        if step == WARM_UP:
            print("steady", flush=True)


def blind(_words: argparse.Namespace) -> None:
    """A shard that looks at no push."""
    from psjob.shard import __main__ as program
    from psjob.shard import store

    store.watch = lambda *_: None  # type: ignore[assignment]
    sys.exit(program.main())


if __name__ == "__main__":
    main()
