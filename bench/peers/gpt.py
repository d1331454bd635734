"""A small GPT on the text of Python's library, with AdamW: two workers of `psjob run`, against torchrun with DDP and gloo.

`--what SIZE-SIDE`, SIZE small or large, SIDE shared, tcp, overlap (over TCP), ddp or alone (two processes that exchange nothing). All sides
have the same weights in the beginning and the same batches, and the same loss in the end but for `alone`. Each step is timed from the end
of the one before, fetching its batch included.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import clock
import psjob_run
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WORKERS = 2
LENGTH = 64
"""Characters of a window."""
SYMBOLS = 128
SECONDS = 200.0
RATE = 1e-3


@dataclass(frozen=True)
class Size:
    """A model, the windows of a worker's batch, and the steps before and while it is timed."""

    layers: int
    width: int
    heads: int
    batch: int
    warm_up: int
    measured: int


SIZES = {"small": Size(3, 128, 4, 8, 10, 100), "large": Size(6, 512, 8, 2, 3, 20)}
ROADS = {"shared": "auto", "tcp": "tcp", "overlap": "tcp"}


def main() -> None:
    words = clock.asked(__doc__)
    name, side = words.what.split("-")
    size = SIZES[name]
    if words.part:
        {"psjob": psjob_worker, "ddp": ddp_worker, "alone": alone_worker}[words.part](size, side)
        return
    script = [os.path.abspath(__file__), "--what", words.what, "--part"]
    with tempfile.TemporaryDirectory() as folder:
        if side in ROADS:
            training = {"mode": "sync", "transport": ROADS[side]}
            summary = psjob_run.run(folder, [*script, "psjob"], SECONDS, WORKERS, training=training)
            psjob_run.check_road(summary, "shared" if side == "shared" else "tcp")
        elif side == "ddp":
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(WORKERS)]
            finish(subprocess.Popen([sys.executable, *torchrun, *script, "ddp"], cwd=folder, env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"}))
        else:
            both = [
                subprocess.Popen([sys.executable, *script, "alone"], cwd=folder, env=os.environ | {"RANK": str(rank)})
                for rank in range(WORKERS)
            ]
            for process in both:
                finish(process)
        found = json.loads((Path(folder) / "rank-0.json").read_text())
    clock.answer(found["seconds"], **({} if side == "alone" else {"loss": found["loss"]}))


def finish(process: subprocess.Popen[bytes]) -> None:
    if process.wait(SECONDS):
        raise RuntimeError(f"a part of it ended with {process.returncode}")


def psjob_worker(size: Size, side: str) -> None:
    import psjob as ps

    model = GPT(size)
    attached, optimizer = ps.attach(model, adamw(model), overlap=side == "overlap")
    train(size, ps.rank(), attached, optimizer, ps.shard(DataLoader(windows(size), batch_size=size.batch)))


def ddp_worker(size: Size, side: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = GPT(size)
    train(size, dist.get_rank(), nn.parallel.DistributedDataParallel(model), adamw(model), slice_of(size, dist.get_rank()))
    dist.destroy_process_group()


def alone_worker(size: Size, side: str) -> None:
    model, rank = GPT(size), int(os.environ["RANK"])
    train(size, rank, model, adamw(model), slice_of(size, rank))


def slice_of(size: Size, rank: int) -> Iterable[list[torch.Tensor]]:
    """Each WORKERS-th batch, as `ps.shard` has it."""
    every = range((size.warm_up + size.measured) * WORKERS)[rank::WORKERS]
    return DataLoader(windows(size), batch_sampler=[list(range(turn * size.batch, (turn + 1) * size.batch)) for turn in every])


def train(size: Size, rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[list[torch.Tensor]]) -> None:
    """Train, and write how long each measured step took and the last loss of this rank."""
    torch.set_num_threads(1)
    ends, loss = [], torch.zeros(())
    for (batch,) in batches:
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        ends.append(time.perf_counter())
    if len(ends) != size.warm_up + size.measured:
        raise RuntimeError(f"a worker made {len(ends)} steps, expected {size.warm_up + size.measured}: that is not the same work")
    ends = ends[size.warm_up - 1 :]
    seconds = [end - begin for begin, end in pairwise(ends)]
    Path(f"rank-{rank}.json").write_text(json.dumps({"seconds": seconds, "loss": loss.item()}))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE)


def windows(size: Size) -> TensorDataset:
    """As many windows of LENGTH + 1 characters as all workers train with, in an order of their own."""
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    symbols = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().clamp(max=SYMBOLS - 1)
    every = symbols[: len(symbols) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(0))
    return TensorDataset(every[order[: (size.warm_up + size.measured) * size.batch * WORKERS]])


class GPT(nn.Module):
    """Guesses each character from those before it; the same weights in every process."""

    def __init__(self, size: Size) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, size.width)
        self.places = nn.Embedding(LENGTH, size.width)
        self.layers = nn.ModuleList([Layer(size) for _ in range(size.layers)])
        self.norm = nn.LayerNorm(size.width)
        self.out = nn.Linear(size.width, SYMBOLS, bias=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """The mean loss over a batch of windows."""
        x = self.symbols(batch[:, :-1]) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        loss: torch.Tensor = nn.functional.cross_entropy(self.out(self.norm(x)).flatten(0, 1), batch[:, 1:].flatten())
        return loss


class Layer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.before, self.between = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv, self.back = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.wide, self.narrow = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, -1))
        x = x + self.back(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.narrow(nn.functional.gelu(self.wide(self.between(x))))
        return out


if __name__ == "__main__":
    main()
