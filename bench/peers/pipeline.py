"""A job of stages that flushes, beside torch's Schedule1F1B over gloo: the same stages, which sleep or compute, in turn.

Stages that sleep show the schedule and what is around it, whatever else the machine does. Stages that compute are layers of 512, with one
thread each. Both sides make a step of SGD; psjob's is on a shard.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import clock
import psjob_run
import torch
import torch.distributed as dist
from stages import Sleeper
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import psjob as ps
from psjob.api.pipelining import Pipeline
from psjob.pipeline.delays import idle_share
from psjob.worker.idle import share

MICROBATCHES, SAMPLES = 8, 4
STEPS, WARM_UP, ROUNDS = 20, 4, 3
SLEEP = 10e-3
"""Seconds of a stage's forward pass; the backward pass takes twice as long."""
CASES = {"sleep:2": 0.95, "sleep:4": 0.95, "compute:2": 0.95}
"""Kind and stages, and the least share of torch's rate."""
MOST_IDLE = 0.03


def model_of(kind: str, stages: int) -> nn.Sequential:
    torch.manual_seed(7)
    if kind == "sleep":
        return nn.Sequential(*(Sleeper(SLEEP) for _ in range(stages)))
    return nn.Sequential(*(nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(4))) for _ in range(stages)))


def batch_of(kind: str) -> torch.Tensor:
    return torch.ones(MICROBATCHES * SAMPLES, 16) if kind == "sleep" else torch.ones(MICROBATCHES * 64, 512)


def loss(output: torch.Tensor, *_: Any) -> torch.Tensor:
    return output.square().mean()


def main() -> None:
    words = clock.asked(__doc__)
    if words.part:
        kind, stages = words.what.split(":")
        (ours if words.part == "ours" else theirs)(words, kind, int(stages))
        return
    rows = []
    for case, least in CASES.items():
        if words.what not in ("", case):
            continue
        kind, _, stages = case.partition(":")
        found: dict[str, list[float]] = {"psjob": [], "torch": []}
        busy: list[float] = []
        told: list[float] = []
        for _ in range(ROUNDS):
            steps, alone, waits = job(case, int(stages))
            told.append(waits)
            found["psjob"].append(statistics.median(steps))
            busy.append(statistics.median(alone))
            found["torch"].append(statistics.median(torchs(words, case, int(stages))))
        mine, other = (min(found[side]) for side in ("psjob", "torch"))
        note = f"steps of {1e3 * mine:.1f} ms and {1e3 * other:.1f}, medians of {STEPS}, the best of {ROUNDS}"
        rows.append(clock.row(f"{case}: rate over torch's Schedule1F1B", other / mine, "x", least=least, note=note))
        if kind == "sleep":
            formula = idle_share(int(stages), MICROBATCHES)
            idle = share(mine - min(busy), mine)
            note = f"idle {idle:.3f}, (K-1)/(M+K-1) {formula:.3f}; a stage alone takes {1e3 * min(busy):.1f} ms"
            rows.append(clock.row(f"{case}: idle share beyond the formula", idle - formula, "", most=MOST_IDLE, note=note))
            off = min(abs(one - formula) for one in told)
            note = f"status tells {', '.join(f'{one:.3f}' for one in told)}, the mean of all stages but the last, in {ROUNDS} runs"
            rows.append(clock.row(f"{case}: idle share of the status off the formula", off, "", most=MOST_IDLE, note=note))
    clock.answer_rows(rows)


def job(case: str, stages: int) -> tuple[list[float], list[float], float]:
    """Seconds of each step of a job, as its last worker saw them, and of as many of its stage alone in the same process.

    And the idle share that the job's status tells at its end, of the stages that do nothing else.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(__file__).resolve()), "--part", "ours", "--what", case]
        named = [{"name": f"stage-{k}"} for k in range(stages)]
        for k, stage in enumerate(named[1:], 1):
            stage["cut"] = str(k)
        training = {"mode": "sync", "pipeline": {"microbatches": MICROBATCHES}}
        psjob_run.run(folder, command, 240.0, stages, stages=named, training=training)
        found = json.loads((Path(folder) / "steps.json").read_text())
        (live,) = Path(folder).glob(".psjob/*/live.json")
        told = json.loads(live.read_text())["coordinator"]["stages"]
    return found["steps"], found["alone"], statistics.fmean(stage["idle"] for stage in told[:-1])


def ours(words: argparse.Namespace, kind: str, stages: int) -> None:
    _one_core(ps.rank())
    model, batch = model_of(kind, stages), batch_of(kind)
    pipe = ps.pipeline(model, loss, seed=7)
    _, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=1e-4))

    def step() -> None:
        optimizer.zero_grad()
        pipe.step(batch, torch.zeros(len(batch)))
        optimizer.step()

    found = clock.rounds(step, WARM_UP, STEPS)
    if ps.rank() == stages - 1:
        alone = Pipeline(model_of(kind, 1), loss, [], MICROBATCHES, 7)
        seconds = clock.rounds(lambda: alone.step(batch, torch.zeros(len(batch))), 1, STEPS)
        Path("steps.json").write_text(json.dumps({"steps": found, "alone": seconds}))


def torchs(words: argparse.Namespace, case: str, stages: int) -> list[float]:
    asked, words.what = words.what, case
    (port,) = clock.free_ports(1)
    parts = [clock.spawn(words, "theirs", rank, port) for rank in range(stages)]
    words.what = asked
    found = clock.last_line(parts[-1])
    for part in parts:
        part.communicate(timeout=60)
    return found


def theirs(words: argparse.Namespace, kind: str, stages: int) -> None:
    _one_core(words.rank)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(words.port)}
    dist.init_process_group("gloo", rank=words.rank, world_size=stages)
    part, batch = model_of(kind, stages)[words.rank], batch_of(kind)
    schedule = Schedule1F1B(PipelineStage(part, words.rank, stages, torch.device("cpu")), MICROBATCHES, loss)
    optimizer = torch.optim.SGD(part.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        if words.rank == 0:
            schedule.step(batch)
        elif words.rank == stages - 1:
            schedule.step(target=torch.zeros(len(batch)))
        else:
            schedule.step()
        optimizer.step()

    found = clock.rounds(step, WARM_UP, STEPS)
    dist.barrier()
    clock.answer(found)
    dist.destroy_process_group()


def _one_core(rank: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)


if __name__ == "__main__":
    main()
