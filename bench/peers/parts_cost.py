"""What the break-down of a step costs: processor time of a step with it and without, in turn, of all processes of a job together.

Two jobs stand side by side, and the processes of one are halted while those of the other train. In the one without it the workers split no
time and the shards tell none.
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

SIZES = ((5_000, None), (1_000_000, 1.005))
"""Elements of the model, and the most that a step may cost of one without. A step of the first one is some exchange of headers."""
COMPUTE = 256
"""Rows of a matrix whose square is the compute of a step, some milliseconds."""
WORKERS = 2
WARM_UP = 100
"""Steps of a worker: the first ones are compared and recorded more often."""
JOBS = 3
TURNS = 8
SECONDS = 0.6
"""Of a turn."""
SETTLED = 0.05
"""Seconds after which a shard has answered what its workers sent before they were halted."""
BLIND = "PSJOB_BENCH_BLIND"


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
        note = f"quartiles {low:.4f} and {high:.4f} of {len(ratios)} turns; {each} µs with and without"
        rows.append(clock.row(f"a step of {elements:,} elements", statistics.median(ratios), "times", most=most, note=note))
    clock.answer_rows(rows)


def in_turn(words: argparse.Namespace) -> list[tuple[float, float]]:
    """Processor seconds of a worker's step, with the break-down and without, of each turn; which is first changes with each turn."""
    with job.running(words) as seeing:
        halt_when_steady(seeing)
        os.environ[BLIND] = "1"
        try:
            with job.running(words, shard_program=(sys.argv[0], "--part", "blind")) as other:
                halt_when_steady(other)
                found = []
                for number in range(TURNS):
                    first, second = (seeing, other) if number % 2 else (other, seeing)
                    spent_each = {id(one): turn(one) for one in (first, second)}
                    found.append((spent_each[id(seeing)], spent_each[id(other)]))
                return found
        finally:
            del os.environ[BLIND]


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
    port = running.config["shards"][0]["statusPort"]
    return int(ask_shard("127.0.0.1", port, running.keys["questions"], seconds=10)["counters"]["applied"])


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
    if os.environ.get(BLIND):
        shut()
    torch.set_num_threads(1)
    model = torch.nn.ParameterList([torch.zeros(int(words.what))])
    attached, optimizer = psjob.attach(model, torch.optim.SGD(model.parameters(), lr=1e-9))
    for parameter in attached.parameters():
        parameter.grad = torch.ones_like(parameter)
    square = torch.ones(COMPUTE, COMPUTE)
    for step in count():
        if int(words.what) > SIZES[0][0]:
            torch.mm(square, square)
        optimizer.step()
        if step == WARM_UP:
            print("steady", flush=True)


def shut() -> None:
    """A worker that splits no time."""
    from psjob.worker import connection
    from psjob.worker.step_parts import NOBODY, StepParts

    StepParts.to = lambda *_: NOBODY  # type: ignore[method-assign]
    StepParts.enter = StepParts.begin_step = lambda *_: NOBODY  # type: ignore[method-assign]
    StepParts.end_step = lambda *_: None  # type: ignore[method-assign]
    StepParts.wait = lambda *_: (NOBODY, 0.0)  # type: ignore[method-assign]
    StepParts.waited = StepParts.step_boundary = lambda *_: None  # type: ignore[method-assign]
    StepParts.timed = lambda _self, _part, call: call  # type: ignore[method-assign]
    connection.LandedAnswer = lambda *_: None  # type: ignore[assignment, misc]


def blind(_words: argparse.Namespace) -> None:
    """A shard that tells no times."""
    from psjob.shard import __main__ as program
    from psjob.shard.block import ParameterBlock

    def answer(self: ParameterBlock, ranks: object = None) -> None:
        for waiter in self.ready(ranks):  # type: ignore[arg-type]
            waiter.to.param(self, waiter)

    ParameterBlock.answer = answer  # type: ignore[method-assign, assignment]
    sys.exit(program.main())


if __name__ == "__main__":
    main()
