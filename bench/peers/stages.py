"""What `psjob plan-stages` predicts of a pipeline on this machine, beside the same pipeline by torch's Schedule1F1B and gloo.

Each model is profiled in a process of its own, cut where the planner says, and trained with a flush by a process of one thread per stage.
Three models compute, in two stages. Layers that sleep, in four, show the schedule whatever else the machine does. Nothing is pushed to
shards. Profile and pipeline are measured in turn, and a row compares the fastest of each: what else runs on the machine only ever makes
them slower. The link is measured first, between two processes.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import clock
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from psjob.planning.plan import Grid, ModelWork, PipelineWay, Plan, PlannedStage, Profile, Wire
from psjob.planning.predict import Case, predict
from psjob_client.local.measure import measure, profile_script
from psjob_client.stages import read_profile

MICROBATCHES = 8
STEPS, WARM_UP = 40, 5
ROUNDS = 4
MOST = 0.15
STAGES = {"mlp": 2, "transformer": 2, "convolutions": 2, "sleepers": 4}
SLEEPS = (4e-3, 8e-3, 6e-3, 4e-3, 10e-3, 5e-3, 9e-3, 4e-3)
"""Seconds of each layer's forward pass; the backward pass takes twice as long."""
SEED = 7


class Sleep(torch.autograd.Function):
    """The input, after some time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class Sleeper(nn.Module):
    """A layer that takes time and no processor."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(x * self.weight, self.seconds)


class Block(nn.Module):
    """Of a transformer, before which comes the norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.inner(self.second(x))


def mlp_model() -> tuple[nn.Sequential, torch.Tensor]:
    return nn.Sequential(*itertools.chain(*((nn.Linear(1024, 1024), nn.ReLU()) for _ in range(6)))), torch.randn(24, 1024)


def transformer_model() -> tuple[nn.Sequential, torch.Tensor]:
    return nn.Sequential(nn.Embedding(512, 192), *(Block(192) for _ in range(6)), nn.Linear(192, 512)), torch.randint(0, 512, (2, 64))


def convolutions_model() -> tuple[nn.Sequential, torch.Tensor]:
    widths = [3, 32, 64, 64, 128, 128]
    layers = [
        (nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2) if i in (1, 3) else nn.Identity())
        for i, (a, b) in enumerate(itertools.pairwise(widths))
    ]
    return nn.Sequential(*itertools.chain(*layers), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)), torch.randn(6, 3, 32, 32)


def sleepers_model() -> tuple[nn.Sequential, torch.Tensor]:
    return nn.Sequential(*map(Sleeper, SLEEPS)), torch.ones(2, 16)


MODELS: dict[str, Callable[[], tuple[nn.Sequential, torch.Tensor]]] = {
    "mlp": mlp_model, "transformer": transformer_model, "convolutions": convolutions_model, "sleepers": sleepers_model,
}  # fmt: skip


def loss(output: torch.Tensor, *_: Any) -> torch.Tensor:
    return output.square().mean()


def mlp() -> Any:
    return *mlp_model(), loss


def transformer() -> Any:
    return *transformer_model(), loss


def convolutions() -> Any:
    return *convolutions_model(), loss


def sleepers() -> Any:
    return *sleepers_model(), loss


def main() -> None:
    words = clock.asked(__doc__)
    if words.part:
        train(words)
        return
    link = measure(2, lambda _: None)["links"][0]
    wire = Wire(link["bandwidth"], link["latency"])
    rows = []
    for name, stages in STAGES.items():
        if words.what not in ("", name):
            continue
        grid = Grid(stages, 1, wire, wire, False, 0.0)
        planned: list[float] = []
        measured: list[float] = []
        plan: Plan | None = None
        for _ in range(ROUNDS):
            case = Case(ModelWork(profiled(name)), grid, PipelineWay("flush", MICROBATCHES))
            plan = plan or cut(case, stages)
            planned.append(predict(case, plan).step)
            measured += trained(words, name, [case.work.profile.nodes[stage.first].name for stage in plan])
        took, wanted = min(measured), min(planned)
        middle = [1e3 * statistics.median(found) for found in (measured, planned)]
        note = f"measured {1e3 * took:.1f} ms, predicted {1e3 * wanted:.1f}; medians {middle[0]:.1f} and {middle[1]:.1f}"
        rows.append(clock.row(f"{name}: deviation of the predicted step", abs(took / wanted - 1), "", MOST, note=note))
    clock.answer_rows(rows)


def profiled(name: str) -> Profile:
    raw = profile_script(f"{Path(__file__).resolve()}:{name}", [], meta=False, deadline=120)
    found, problems = read_profile(raw)
    if found is None:
        raise RuntimeError("; ".join(map(str, problems)))
    return found.profile()


def cut(case: Case, stages: int) -> Plan:
    """The best of all in so many, at beginnings of layers: a process builds whole layers."""
    names = [node.name for node in case.work.profile.nodes]
    layers = [i for i in range(1, len(names)) if names[i].isdigit()]
    plans = []
    for cuts in itertools.combinations(layers, stages - 1):
        bounds = itertools.pairwise([0, *cuts, len(names)])
        plans.append(tuple(PlannedStage(first, end, (k,)) for k, (first, end) in enumerate(bounds)))
    return min(plans, key=lambda plan: predict(case, plan).step)


def trained(words: Any, name: str, layers: list[str]) -> list[float]:
    """Seconds of each step of the pipeline whose stages begin at `layers`."""
    (port,) = clock.free_ports(1)
    parts = [clock.spawn(words, f"{name}:{','.join(layers)}", rank, port) for rank in range(len(layers))]
    found = clock.last_line(parts[0])
    for part in parts[1:]:
        part.communicate(timeout=60)
    return found


def train(words: Any) -> None:
    name, _, layers = words.part.partition(":")
    bounds = [int(layer) for layer in layers.split(",")]
    stages = len(bounds)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[words.rank % len(cores)]})
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(words.port)}
    dist.init_process_group("gloo", rank=words.rank, world_size=stages)
    model, inputs = MODELS[name]()
    part = model[bounds[words.rank] : [*bounds, len(model)][words.rank + 1]]
    stage = PipelineStage(part, words.rank, stages, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss)
    batch = torch.cat([inputs] * MICROBATCHES)
    target = torch.zeros(len(batch))

    def step() -> None:
        if words.rank == 0:
            schedule.step(batch)
        elif words.rank == stages - 1:
            schedule.step(target=target)
        else:
            schedule.step()
        dist.barrier()

    found = []
    for _ in range(WARM_UP + STEPS):
        part.zero_grad(set_to_none=False)
        dist.barrier()
        found += clock.once(step)
    clock.answer(found[WARM_UP:])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
