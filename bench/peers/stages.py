"""What `psjob plan-stages` predicts of a pipeline on this machine, beside the same pipeline by torch's Schedule1F1B and gloo.

Each model is profiled in a process of its own, cut in two where the planner says, and trained with a flush by two processes of one thread.
Nothing is pushed to shards. Profile and pipeline are measured in turn, and a row compares the fastest of each: what else runs on the
machine only ever makes them slower. The link is measured first, between two processes.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import clock
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from psjob_client.local.measure import measure
from psjob_client.local.profiling import profile_script
from psjob_client.stages.bounds import Case
from psjob_client.stages.grid import Grid, Wire
from psjob_client.stages.plan import Plan, Stage
from psjob_client.stages.predict import predict
from psjob_client.stages.profile import Profile, read_profile
from psjob_client.stages.ways import Way
from psjob_client.stages.work import Work

MICROBATCHES = 8
STEPS, WARM_UP = 120, 5
ROUNDS = 6
MOST = 0.15
STAGES = 2
SEED = 7


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


MODELS: dict[str, Callable[[], tuple[nn.Sequential, torch.Tensor]]] = {
    "mlp": mlp_model, "transformer": transformer_model, "convolutions": convolutions_model,
}  # fmt: skip


def loss(output: torch.Tensor, *_: Any) -> torch.Tensor:
    return output.square().mean()


def mlp() -> Any:
    return *mlp_model(), loss


def transformer() -> Any:
    return *transformer_model(), loss


def convolutions() -> Any:
    return *convolutions_model(), loss


def main() -> None:
    words = clock.asked(__doc__)
    if words.part:
        train(words)
        return
    link = measure(2, lambda _: None)["links"][0]
    wire = Wire(link["bandwidth"], link["latency"])
    grid = Grid(STAGES, 1, wire, wire, False, 0.0)
    rows = []
    for name in MODELS:
        planned: list[float] = []
        measured: list[float] = []
        plan: Plan | None = None
        for _ in range(ROUNDS):
            case = Case(Work(profiled(name)), grid, Way("flush", MICROBATCHES))
            plan = plan or cut(case)
            planned.append(predict(case, plan).step)
            measured += trained(words, name, case.work.profile.nodes[plan[1].first].name)
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
    return found


def cut(case: Case) -> Plan:
    """The best of all in two, at the beginning of a layer: a process builds whole layers."""
    names = [node.name for node in case.work.profile.nodes]
    plans = [(Stage(0, i, (0,)), Stage(i, len(names), (1,))) for i in range(1, len(names)) if names[i].isdigit()]
    return min(plans, key=lambda plan: predict(case, plan).step)


def trained(words: Any, name: str, layer: str) -> list[float]:
    """Seconds of each step of the pipeline whose second stage begins at `layer`."""
    (port,) = clock.free_ports(1)
    parts = [clock.spawn(words, f"{name}:{layer}", rank, port) for rank in range(STAGES)]
    found = clock.last_line(parts[0])
    parts[1].communicate(timeout=60)
    return found


def train(words: Any) -> None:
    name, _, at = words.part.partition(":")
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[words.rank % len(cores)]})
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(words.port)}
    dist.init_process_group("gloo", rank=words.rank, world_size=STAGES)
    model, inputs = MODELS[name]()
    part = model[: int(at)] if words.rank == 0 else model[int(at) :]
    stage = PipelineStage(part, words.rank, STAGES, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss)
    batch = torch.cat([inputs] * MICROBATCHES)
    target = torch.zeros(len(batch))

    def step() -> None:
        if words.rank == 0:
            schedule.step(batch)
        else:
            schedule.step(target=target)
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
