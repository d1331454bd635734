"""A script that trains in the ways of GPU users, on the device that it is told; after any kill it must come to the same bits.

As a script: `python gpu_cases.py CASE DEVICE EPOCHS GATES`. On the CPU the blocks are staged and lent as those of a GPU. The lines of a
captured graph are made eagerly there, and `torch.compile` does not generate code.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps
from tests.e2e.workloads.gates import Gates
from tests.e2e.workloads.on_a_gpu import check_staged, stage_as_on_a_gpu

SAMPLES, BATCH, CLASSES = 1280, 8, 5
SIDE = 8
"""Pixels of an image's side."""
LIMIT = 0.5
"""Of the gradient's norm, where it is clipped."""
OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, fused=True),
    "capturable": lambda parameters: torch.optim.Adam(parameters, lr=3e-3, capturable=True),
    "own": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3),
}
"""`own` has no rule on the shards: the worker's steps are torch's."""
WORKER, SHARD = "kill:worker-0", "kill:shard-1"


@dataclass(frozen=True)
class Case:
    """What a script does. `devices`: over how many its model lies, `host`: the first half of it lies in host memory.

    `faults`: which are the same bits in its mode with so many `workers`.
    """

    scaled: bool = False
    clipped: bool = False
    compiled: Literal["", "before", "after", "reduce-overhead"] = ""
    channels_last: bool = False
    optimizer: str = "sgd"
    dtype: torch.dtype = torch.float32
    loaders: int = 0
    graph: bool = False
    overlap: bool = False
    devices: int = 1
    host: bool = False
    workers: int = 2
    training: Mapping[str, Any] = field(default_factory=lambda: {"mode": "sync"})
    faults: tuple[str, str] = (SHARD, WORKER)


ONE: Any = {"workers": 1}
"""With one worker there is one order of pushes. In these modes a shard that is lost takes its newest updates with it, so the worker is
killed twice. It makes the forward of its last step again, on weights that have that step: only BatchNorm's statistics are others then.
"""
CASES: Mapping[str, Case] = {
    "scaled": Case(scaled=True, clipped=True, channels_last=True, loaders=2),
    "compiled before": Case(compiled="before"),
    "compiled after": Case(compiled="after"),
    "reduce-overhead": Case(compiled="reduce-overhead"),
    "channels_last": Case(channels_last=True),
    "fused": Case(optimizer="fused"),
    "capturable": Case(optimizer="capturable"),
    "bfloat16": Case(dtype=torch.bfloat16),
    "a GPU and the host": Case(host=True),
    "two GPUs": Case(devices=2),
    "loader processes": Case(loaders=2),
    "graph": Case(graph=True, clipped=True),
    "overlap": Case(overlap=True),
    "own steps": Case(optimizer="own"),
    "async": Case(**ONE, training={"mode": "async"}, faults=(WORKER, WORKER)),
    "bounded": Case(**ONE, training={"mode": "bounded", "bounded": {"staleness": 2}}, faults=(WORKER, WORKER)),
    "local": Case(training={"mode": "local", "local": {"innerSteps": 4}}),
}


class Net(nn.Module):
    """A convolution, BatchNorm, Dropout and a layer; two devices where it is told."""

    def __init__(self, first: torch.device, second: torch.device) -> None:
        super().__init__()
        self.places = first, second
        self.front = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()).to(first)
        self.back = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(8 * SIDE * SIDE, CLASSES)).to(second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 3, SIDE, SIDE) to (batch, CLASSES)."""
        out: torch.Tensor = self.back(self.front(x.to(self.places[0])).to(self.places[1]))
        return out


def main(case: Case, device: torch.device, epochs: int, gates: Gates) -> None:
    torch.manual_seed(0)
    second = torch.device("cuda", 1) if case.devices == 2 and device.type == "cuda" else device
    model: nn.Module = Net(torch.device("cpu") if case.host else device, second).to(case.dtype)
    if case.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if case.compiled == "before":
        model = compiled(model, device, case)
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, growth_interval=20, enabled=case.scaled)
    model, optimizer = ps.attach(model, optimizer, overlap=case.overlap, scaler=scaler)
    if device.type == "cpu":
        check_staged()
    trained = compiled(model, device, case) if case.compiled in ("after", "reduce-overhead") else model
    step = Steps(case, trained, optimizer, scaler, device, second)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 3, SIDE, SIDE, generator=generator)
    y = (x.mean((1, 2, 3)) * 40).long().clamp(0, CLASSES - 1)
    loader = DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=True, num_workers=case.loaders, pin_memory=device.type == "cuda")
    for _ in range(epochs):
        for batch, target in ps.shard(loader):
            loss = step(batch, target)
            ps.report(loss=loss)
            time.sleep(0.02)
            gates.pass_at(ps.step())
    print(f"rank {ps.rank()} ends at step {ps.step()} on {device}", flush=True)


def compiled(model: nn.Module, device: torch.device, case: Case) -> nn.Module:
    mode = "reduce-overhead" if case.compiled == "reduce-overhead" else None
    made: Any = torch.compile(model, backend="aot_eager") if device.type == "cpu" else torch.compile(model, mode=mode)
    return made  # type: ignore[no-any-return]


class Steps:
    """Forward, backward and step of a batch, of shape (BATCH, 3, SIDE, SIDE)."""

    def __init__(
        self, case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, device: torch.device,
        second: torch.device,
    ) -> None:  # fmt: skip
        self.case, self.model, self.optimizer, self.scaler, self.second = case, model, optimizer, scaler, second
        self.device = device
        self.x = torch.zeros(BATCH, 3, SIDE, SIDE, device=device, dtype=case.dtype)
        self.y = torch.zeros(BATCH, dtype=torch.int64, device=second)
        self.loss = torch.zeros((), device=second)
        self.graph = self.captured() if case.graph and device.type == "cuda" else None

    def __call__(self, batch: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.x.copy_(batch, non_blocking=True)
        self.y.copy_(target, non_blocking=True)
        if self.graph is not None:
            self.graph.replay()  # type: ignore[no-untyped-call]
        else:
            self.optimizer.zero_grad()
            self.backward()
        if self.case.clipped:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), LIMIT)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.loss.detach()

    def backward(self) -> None:
        half = torch.float16 if self.device.type == "cuda" else torch.bfloat16
        with torch.autocast(self.device.type, half, enabled=self.case.scaled):
            self.loss = nn.functional.cross_entropy(self.model(self.x).float(), self.y)
        self.scaler.scale(self.loss).backward()

    def captured(self) -> torch.cuda.CUDAGraph:
        """As torch's page on CUDA graphs has it: some eager passes on a side stream, then the capture."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.optimizer.zero_grad()
                self.backward()
        torch.cuda.current_stream().wait_stream(side)
        self.optimizer.zero_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.backward()
        return graph


if __name__ == "__main__":
    named, kind = sys.argv[1:3]
    if kind == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    else:
        stage_as_on_a_gpu()
    main(CASES[named], torch.device(kind), int(sys.argv[3]), Gates(sys.argv[4] if len(sys.argv) > 4 else ""))
