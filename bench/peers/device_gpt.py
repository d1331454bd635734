"""A GPT of 124 M parameters on a GPU, bfloat16 autocast, AdamW: what a step takes, by what shares the model or keeps its optimizer.

`--what` alone (processes that exchange nothing), psjob, overlap, async (the same mode of psjob), ddp (gloo) or fsdp (FSDP2, whose optimizer
lies on the host: CPUOffloadPolicy and fused AdamW). All but async and fsdp of one rank have the same batches by rank, so that `bench`
compares their losses. `--device cpu` does the same with a small model. Each step is timed until the device is through with it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import clock
import psjob_run
import torch
from on_device import device_of, wait_for
from torch import nn

SECONDS = 240.0
RATE = 3e-4
WAYS: dict[str, tuple[dict[str, Any], dict[str, bool]]] = {
    "psjob": ({"mode": "sync"}, {}),
    "overlap": ({"mode": "sync"}, {"overlap": True}),
    "async": ({"mode": "async"}, {}),
}
"""Each way of psjob: what the manifest says of training, and what `attach` is given. A way with `training.delay` is one more entry."""


@dataclass(frozen=True)
class Size:
    """A model, a batch of a worker, and the steps before and while it is timed."""

    layers: int
    width: int
    heads: int
    length: int
    symbols: int
    batch: int
    warm_up: int
    measured: int


SIZES = {"cuda": Size(12, 768, 12, 512, 50304, 8, 6, 14), "cpu": Size(1, 16, 2, 8, 64, 2, 2, 3)}


def main() -> None:
    words = clock.asked(__doc__)
    device, size = device_of(words), SIZES[words.device]
    if words.part:
        {"ps": psjob_worker, "ddp": ddp_worker, "fsdp": fsdp_worker, "alone": alone_worker}[words.part](words, size, device)
        return
    script = [os.path.abspath(__file__), "--what", words.what, "--device", words.device, "--workers", str(words.workers), "--part"]
    with tempfile.TemporaryDirectory() as folder:
        if words.what in WAYS:
            environment = [{"name": "OMP_NUM_THREADS", "value": "1"}]
            container = {"name": "worker", "image": "none", "command": ["python", *script, "ps"], "env": environment}
            pods = {"replicas": words.workers, "template": {"spec": {"containers": [container]}}}
            psjob_run.run(folder, [], SECONDS, words.workers, words.shards, workers_spec=pods, training=WAYS[words.what][0])
        else:
            started(folder, script, words)
        found = [json.loads((Path(folder) / f"rank-{rank}.json").read_text()) for rank in range(words.workers)]
    slowest = max(found, key=lambda each: sorted(each["seconds"])[len(each["seconds"]) // 2])
    clock.answer(slowest["seconds"], **({"loss": found[0]["loss"]} if words.what in ("psjob", "overlap", "alone", "ddp", "fsdp") else {}))


def started(folder: str, script: list[str], words: argparse.Namespace) -> None:
    """All ranks of a peer. Raises RuntimeError if one ends badly."""
    (port,) = clock.free_ports(1)
    both = []
    for rank in range(words.workers):
        own = {"RANK": str(rank), "WORLD_SIZE": str(words.workers), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", **own}
        both.append(subprocess.Popen([sys.executable, *script, words.what], cwd=folder, env=environment))
    for process in both:
        if process.wait(SECONDS):
            raise RuntimeError(f"a rank ended with {process.returncode}")


def psjob_worker(words: argparse.Namespace, size: Size, device: torch.device) -> None:
    import psjob as ps

    model = GPT(size).to(device)
    attached, optimizer = ps.attach(model, torch.optim.AdamW(model.parameters(), lr=RATE), **WAYS[words.what][1])
    train(size, ps.rank(), attached, optimizer, device)


def ddp_worker(_words: argparse.Namespace, size: Size, device: torch.device) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = GPT(size).to(device)
    train(size, dist.get_rank(), nn.parallel.DistributedDataParallel(model), torch.optim.AdamW(model.parameters(), lr=RATE), device)
    dist.destroy_process_group()


def fsdp_worker(_words: argparse.Namespace, size: Size, device: torch.device) -> None:
    """On the CPU nothing is offloaded: there it proves that these lines run."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device.index or 0)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = CPUOffloadPolicy(pin_memory=True) if on_gpu else OffloadPolicy()
    model = GPT(size)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    train(size, dist.get_rank(), model, optimizer, device, threads=os.cpu_count() or 1)
    dist.destroy_process_group()


def alone_worker(_words: argparse.Namespace, size: Size, device: torch.device) -> None:
    model = GPT(size).to(device)
    train(size, int(os.environ["RANK"]), model, torch.optim.AdamW(model.parameters(), lr=RATE), device)


def train(
    size: Size, rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, threads: int = 1
) -> None:  # fmt: skip
    """Train, and write how long each measured step took and the last loss of this rank."""
    torch.set_num_threads(threads)
    generator, seconds, loss = torch.Generator().manual_seed(rank), [], torch.zeros(())
    for _ in range(size.warm_up + size.measured):
        batch = torch.randint(size.symbols, (size.batch, size.length + 1), generator=generator).to(device)
        wait_for(device)
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wait_for(device)
        seconds.append(time.perf_counter() - start)
    Path(f"rank-{rank}.json").write_text(json.dumps({"seconds": seconds[size.warm_up :], "loss": loss.item()}))


class GPT(nn.Module):
    """Logits of the next symbol from those before it; the same weights in every process."""

    def __init__(self, size: Size) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.symbols, self.places = nn.Embedding(size.symbols, size.width), nn.Embedding(size.length, size.width)
        self.layers = nn.ModuleList([Layer(size) for _ in range(size.layers)])
        self.out = nn.Linear(size.width, size.symbols, bias=False)
        nn.init.normal_(self.symbols.weight, std=0.02)
        self.out.weight = self.symbols.weight

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """(batch, length) of symbols to (batch, length, symbols)."""
        x = self.symbols(batch) + self.places(torch.arange(batch.shape[1], device=batch.device))
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.out(x)
        return logits


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
