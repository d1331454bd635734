"""A job of stages beside torch's Schedule1F1B over gloo: the same stages, which sleep or compute, in turn.

With flush both sides do the same work. With 2BW psjob's stages do not wait for the end of a batch, where torch's idle for
(K-1)/(M+K-1) of the time. Stages that sleep show the schedule and what is around it, whatever else the machine does. Stages that compute
are layers of 512, with one thread each: `compute` of micro-batches of 64 samples, `large` of 512. Both sides make a step of SGD; psjob's is
on a shard, to which each stage sends 4.2 MB per step, and from which it takes as much.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import clock
import psjob_run
import torch
import torch.distributed as dist
from stages import Sleeper
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import psjob as ps
from psjob.api.pipelining import Pipeline
from psjob.worker.state import waited_share

SAMPLES = 4
"""Of a micro-batch."""
STEPS, WARM_UP, ROUNDS = 20, 4, 3
SLEEP = 10e-3
"""Seconds of a stage's forward pass; the backward pass takes twice as long."""
CASES = {
    "sleep:2:8:flush": 0.95, "sleep:4:8:flush": 0.95, "compute:2:8:flush": 0.95, "large:2:8:flush": 0.95,
    "sleep:2:2:2bw": 1.25, "sleep:4:4:2bw": 1.25, "compute:2:2:2bw": 1.25, "large:2:2:2bw": 1.25,
}  # fmt: skip
"""Kind, stages, micro-batches and schedule, and the least share of torch's rate."""
MOST_IDLE = 0.03


def model_of(kind: str, stages: int) -> nn.Sequential:
    torch.manual_seed(7)
    if kind == "sleep":
        return nn.Sequential(*(Sleeper(SLEEP) for _ in range(stages)))
    return nn.Sequential(*(nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(4))) for _ in range(stages)))


def batch_of(kind: str, microbatches: int) -> torch.Tensor:
    if kind == "sleep":
        return torch.ones(microbatches * SAMPLES, 16)
    return torch.ones(microbatches * (64 if kind == "compute" else 512), 512)


class Case(NamedTuple):
    """A word of CASES."""

    kind: str
    stages: int
    microbatches: int
    schedule: str

    @classmethod
    def of(cls, word: str) -> Case:
        kind, stages, microbatches, schedule = word.split(":")
        return cls(kind, int(stages), int(microbatches), schedule)

    @property
    def idle(self) -> float:
        """The share of time that equal stages wait in a flush."""
        return (self.stages - 1) / (self.microbatches + self.stages - 1)


def loss(output: torch.Tensor, *_: Any) -> torch.Tensor:
    return output.square().mean()


def main() -> None:
    words = clock.asked(__doc__)
    if words.part:
        (ours if words.part == "ours" else theirs)(words, Case.of(words.what))
        return
    rows = []
    for word, least in CASES.items():
        if words.what not in ("", word):
            continue
        case = Case.of(word)
        found: dict[str, list[float]] = {"psjob": [], "torch": []}
        busy: list[float] = []
        told: list[float] = []
        for _ in range(ROUNDS):
            steps, alone, waits = job(word, case)
            told.append(waits)
            found["psjob"].append(statistics.median(steps))
            busy.append(statistics.median(alone))
            found["torch"].append(statistics.median(torchs(words, word, case.stages)))
        mine, other = (min(found[side]) for side in ("psjob", "torch"))
        note = f"steps of {1e3 * mine:.1f} ms and {1e3 * other:.1f}, medians of {STEPS}, the best of {ROUNDS}; bubble {case.idle:.2f}"
        rows.append(clock.row(f"{word}: rate over torch's Schedule1F1B", other / mine, "x", least=least, note=note))
        if case.kind == "sleep":
            formula = case.idle if case.schedule == "flush" else 0.0
            idle = waited_share(mine - min(busy), mine)
            note = f"idle {idle:.3f}, by the formula {formula:.3f}; a stage alone takes {1e3 * min(busy):.1f} ms"
            rows.append(clock.row(f"{word}: idle share beyond the formula", idle - formula, "", most=MOST_IDLE, note=note))
            off = min(abs(one - formula) for one in told)
            note = f"status tells {', '.join(f'{one:.3f}' for one in told)}, the mean of all stages but the last, in {ROUNDS} runs"
            rows.append(clock.row(f"{word}: idle share of the status off the formula", off, "", most=MOST_IDLE, note=note))
    clock.answer_rows(rows)


def job(word: str, case: Case) -> tuple[list[float], list[float], float]:
    """Seconds of each step of a job, as its last worker saw them, and of as many of only its stage in the same process.

    And the idle share that the job's status tells at its end, of the stages that do nothing else.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(__file__).resolve()), "--part", "ours", "--what", word]
        named = [{"name": f"stage-{k}"} for k in range(case.stages)]
        for k, stage in enumerate(named[1:], 1):
            stage["cut"] = str(k)
        training = {"mode": "sync", "pipeline": {"microbatches": case.microbatches, "schedule": case.schedule}}
        psjob_run.run(folder, command, 240.0, case.stages, stages=named, training=training)
        found = json.loads((Path(folder) / "steps.json").read_text())
        (live,) = Path(folder).glob(".psjob/*/live.json")
        told = json.loads(live.read_text())["coordinator"]["stages"]
    return found["steps"], found["alone"], statistics.fmean(stage["idle"] for stage in told[:-1])


def ours(words: argparse.Namespace, case: Case) -> None:
    _one_core(ps.rank())
    model, batch = model_of(case.kind, case.stages), batch_of(case.kind, case.microbatches)
    pipe = ps.pipeline(model, loss, seed=7)
    _, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=1e-4))

    def step() -> None:
        optimizer.zero_grad()
        pipe.step(batch, torch.zeros(len(batch)))
        optimizer.step()

    found = clock.rounds(step, WARM_UP, STEPS)
    if ps.rank() == case.stages - 1:
        alone = Pipeline(model_of(case.kind, 1), loss, [], case.microbatches, 7)
        seconds = clock.rounds(lambda: alone.step(batch, torch.zeros(len(batch))), 1, STEPS)
        Path("steps.json").write_text(json.dumps({"steps": found, "alone": seconds}))


def torchs(words: argparse.Namespace, word: str, stages: int) -> list[float]:
    asked, words.what = words.what, word
    (port,) = clock.free_ports(1)
    parts = [clock.spawn(words, "theirs", rank, port) for rank in range(stages)]
    words.what = asked
    found = clock.last_line(parts[-1])
    for part in parts:
        part.communicate(timeout=60)
    return found


def theirs(words: argparse.Namespace, case: Case) -> None:
    stages = case.stages
    _one_core(words.rank)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(words.port)}
    dist.init_process_group("gloo", rank=words.rank, world_size=stages)
    part, batch = model_of(case.kind, stages)[words.rank], batch_of(case.kind, case.microbatches)
    schedule = Schedule1F1B(PipelineStage(part, words.rank, stages, torch.device("cpu")), case.microbatches, loss)
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
