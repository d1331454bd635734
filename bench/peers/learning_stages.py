"""What late gradients cost: eight stages learn digits, and the text of Python's own help, in each way of training.

One process runs what a job's stages compute, old weights from a list: `tests/live/test_stage_late.py` shows that real stages come to the
same bits. Ways with delays of K-1-k updates have one micro-batch an update; 2BW has eight, and is beside a flush of as many samples.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

from psjob.pipeline import predict, schedule
from psjob.pipeline.cuts import split_model
from psjob.pipeline.predict import corrector
from tests.support import pipeline_reference as reference

STAGES, SEEDS = 8, 5
Batch = tuple[torch.Tensor, torch.Tensor]


class Residual(nn.Module):
    """x + tanh(W x + b)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


class Plain(nn.Module):
    """tanh(W x + b), W orthogonal times 1.2: without a path around it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        nn.init.orthogonal_(self.inner.weight, gain=1.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


@dataclass(frozen=True)
class Task:
    """What is learnt. `judge` gives a number of a trained model: more is better."""

    name: str
    unit: str
    steps: int
    samples: int
    rates: tuple[float, ...]
    model: Callable[[], nn.Sequential]
    batches: Callable[[int, int, int], Iterator[Batch]]
    """From a seed, the number of batches and the samples of each."""
    judge: Callable[[nn.Module], float]
    optimizer: Callable[[list[nn.Parameter], float], torch.optim.Optimizer]


def digits(layer: Callable[[int], nn.Module], name: str, rates: tuple[float, ...]) -> Task:
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images = (images.float() - 8) / 8
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    seen, unseen = order[:1437], order[1437:]

    def model() -> nn.Sequential:
        return nn.Sequential(nn.Linear(64, 48), *(layer(48) for _ in range(STAGES - 2)), nn.Linear(48, 10))

    def batches(seed: int, count: int, samples: int) -> Iterator[Batch]:
        draw = torch.Generator().manual_seed(seed)
        for _ in range(count):
            chosen = seen[torch.randint(len(seen), (samples,), generator=draw)]
            yield images[chosen], labels[chosen]

    def judge(net: nn.Module) -> float:
        return 100 * float((net(images[unseen]).argmax(1) == labels[unseen]).float().mean())

    return Task(name, "% right", 480, 16, rates, model, batches, judge, lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9))


class Window(nn.Module):
    """Symbols of a window as one vector."""

    def __init__(self, symbols: int, reach: int, width: int) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(symbols, 16), nn.Linear(16 * reach, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(self.table(x).flatten(1))


def charlm() -> Task:
    text = "".join(topics[name] for name in sorted(topics)).encode()
    known = {byte: number for number, byte in enumerate(sorted(set(text)))}
    numbers = torch.tensor([known[byte] for byte in text])
    reach, edge = 12, len(numbers) * 9 // 10

    def corrector(places: torch.Tensor) -> Batch:
        return numbers[places[:, None] + torch.arange(reach)], numbers[places + reach]

    def model() -> nn.Sequential:
        return nn.Sequential(Window(len(known), reach, 64), *(Residual(64) for _ in range(STAGES - 2)), nn.Linear(64, len(known)))

    def batches(seed: int, count: int, samples: int) -> Iterator[Batch]:
        draw = torch.Generator().manual_seed(seed)
        for _ in range(count):
            yield corrector(torch.randint(edge - reach - 1, (samples,), generator=draw))

    def judge(net: nn.Module) -> float:
        x, y = corrector(torch.arange(edge, len(numbers) - reach - 1, 7))
        return -float(nn.functional.cross_entropy(net(x), y))

    return Task("char-LM", "nats, negative", 400, 64, (1e-3, 3e-3, 1e-2), model, batches, judge, lambda p, lr: torch.optim.Adam(p, lr=lr))


TASKS: dict[str, Callable[[], Task]] = {
    "digits": lambda: digits(Residual, "digits", (0.003, 0.01, 0.03)),
    "digits, no residual": lambda: digits(Plain, "digits, no residual", (0.005, 0.01, 0.02)),
    "char-LM": charlm,
}


@dataclass(frozen=True)
class Way:
    way: schedule.TrainingWay
    microbatches: int = 1
    anneal: int = 0
    """Updates in which the learning rate of a late stage comes to the task's; 0: it has it from the first."""
    correct: str = "none"
    """Of gradients of old weights, with the numbers that the rule of this name has."""
    highest: float | None = None
    """NAdam in place of the task's optimizer: what its momentum of 0.9 comes near to at late stages."""


WAYS = {
    "flush": Way(schedule.Flush()),
    "pipedream": Way(schedule.PipeDream()),
    "pipedream, vertical": Way(schedule.PipeDream(vertical_sync=True)),
    "pipedream, lr by delay": Way(schedule.PipeDream(), anneal=120),
    "latest": Way(schedule.Latest()),
    "latest, lr by delay": Way(schedule.Latest(), anneal=120),
    "recompute": Way(schedule.FTPipe(predicts=False)),
    "predict": Way(schedule.FTPipe(recompute=False)),
    "ftpipe": Way(schedule.FTPipe()),
    "flush of 8": Way(schedule.Flush(), STAGES),
    "2bw of 8": Way(schedule.TwoBW(), STAGES),
    "pipedream, dc-asgd": Way(schedule.PipeDream(), correct="dc-asgd"),
    "pipedream, gap-aware": Way(schedule.PipeDream(), correct="gap-aware"),
    "predict, gap-aware": Way(schedule.FTPipe(recompute=False), correct="gap-aware"),
    "2bw of 8, dc-asgd": Way(schedule.TwoBW(), STAGES, correct="dc-asgd"),
    "2bw of 8, gap-aware": Way(schedule.TwoBW(), STAGES, correct="gap-aware"),
    "flush, NAdam": Way(schedule.Flush(), highest=0.9),
    "pipedream, NAdam": Way(schedule.PipeDream(), highest=0.9),
    "pipedream, NAdam by stage": Way(schedule.PipeDream(), highest=0.99),
}


def learnt(task: Task, way: Way, rate: float, seed: int) -> float:
    """What the judge says of a model that was trained so."""
    torch.manual_seed(seed)
    net = task.model()
    parts = split_model(net, list(range(1, STAGES)))
    batches = list(task.batches(seed, task.steps, task.samples * way.microbatches))

    def optimizer(parameters: list[nn.Parameter], delay: int) -> torch.optim.Optimizer:
        if way.highest is None:
            return task.optimizer(parameters, rate)
        return torch.optim.NAdam(parameters, lr=rate, betas=(predict.momentum_by_stage(0.9, delay, STAGES, way.highest), 0.999))

    made = reference.train(
        net, nn.functional.cross_entropy, batches, parts=parts, way=way.way, microbatches=way.microbatches,
        optimizer=optimizer, seed=seed, correct=corrector(way.way, way.correct, {}),
        rate=(lambda delay, step: predict.lr_by_delay(rate, delay, step, way.anneal)) if way.anneal else None,
    )  # fmt: skip
    net.load_state_dict(made.weights)
    with torch.no_grad():
        return task.judge(net.eval())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="", choices=["", *TASKS])
    parser.add_argument("--way", action="append", choices=list(WAYS), help="may be given several times; absent: all")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for task_name, make in TASKS.items():
        if asked.task not in ("", task_name):
            continue
        task = make()
        for rate in task.rates:
            for name in asked.way or WAYS:
                way = WAYS[name]
                found = [learnt(task, way, rate, seed) for seed in range(asked.seeds)]
                note = f"{asked.seeds} seeds, {min(found):.2f} to {max(found):.2f}"
                row = {"what": f"{task.name}, rate {rate}: {name}", "figure": statistics.median(found), "unit": task.unit, "note": note}
                rows.append(row | {"most": None, "least": None})
                print(f"{row['what']}: {row['figure']:.2f} ({note})", file=sys.stderr, flush=True)
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
