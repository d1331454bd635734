"""What is trained in the race. Net, data, loss and optimizer are the same for every side; who joins, steps and comes back differs.

Each batch is marked in the weights: SGD with rate 1 and a gradient of -1 at the batch's place in a ledger adds 1 whenever the batch counts.
There are COPIES ledgers, each with its places shifted, so that every shard holds marks of all stretches of the data.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import race
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FEATURES, HIDDEN, KINDS = 32, 64, 10
CHECKPOINT = Path("checkpoint.pt")
QUORUM = 2
"""Replicas of torchft that train without the others. One alone that comes back when all are through would begin anew."""


def main() -> None:
    asked = race.words(__doc__)
    torch.set_num_threads(1)
    {"sync": psjob, "async": psjob, "torchrun": torchrun, "torchft": torchft}[asked.side](asked)


def psjob(asked: argparse.Namespace) -> None:
    import psjob as ps

    net = Net(asked)
    model, optimizer = ps.attach(net, sgd(net))
    share = 1.0 if asked.side == "async" else float(ps.world())
    for batch in ps.shard(DataLoader(data(asked), batch_size=asked.batch)):
        step(asked, net, model, optimizer, batch, lambda: share)
        begun(ps.rank())


def torchrun(asked: argparse.Namespace) -> None:
    """DDP that begins anew from the last checkpoint whenever torchrun starts its ranks again."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, net, every = dist.get_rank(), Net(asked), data(asked)
    optimizer, first = sgd(net), 0
    if CHECKPOINT.exists():
        kept = torch.load(CHECKPOINT, weights_only=True)
        net.load_state_dict(kept["net"])
        optimizer.load_state_dict(kept["optimizer"])
        first = kept["step"]
    model = nn.parallel.DistributedDataParallel(net)
    due = time.monotonic() + asked.save_every
    for at in range(first, asked.steps):
        step(asked, net, model, optimizer, batch_of(asked, every, at, rank), lambda: float(asked.workers))
        begun(rank)
        if rank == 0 and time.monotonic() >= due:
            torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": at + 1}, CHECKPOINT.with_suffix(".part"))
            os.replace(CHECKPOINT.with_suffix(".part"), CHECKPOINT)
            due = time.monotonic() + asked.save_every
    keep_ledger(net)
    dist.destroy_process_group()


def torchft(asked: argparse.Namespace) -> None:
    """Replicas of one process each. One that comes back takes weights and step from another, and the batch of that step."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    net, every, replica = Net(asked), data(asked), int(os.environ["REPLICA_GROUP_ID"])
    plain = sgd(net)

    def load(kept: dict[str, Any]) -> None:
        net.load_state_dict(kept["net"])
        plain.load_state_dict(kept["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(), min_replica_size=QUORUM, replica_id=f"race_{replica}", init_sync=False,
        load_state_dict=load, state_dict=lambda: {"net": net.state_dict(), "optimizer": plain.state_dict()},
    )  # fmt: skip
    model, optimizer = DistributedDataParallel(manager, net), Optimizer(manager, plain)
    Path(f"up-{replica}").touch()
    while not all(Path(f"up-{other}").exists() for other in range(asked.workers)):  # the first quorum has them all
        time.sleep(0.01)
    while (at := manager.current_step()) < asked.steps:
        step(asked, net, model, optimizer, batch_of(asked, every, at, replica), lambda: float(manager.num_participants()))
        begun(replica)
    keep_ledger(net)
    manager.shutdown(wait=False)


def step(
    asked: argparse.Namespace, net: Net, model: nn.Module, optimizer: torch.optim.Optimizer, batch: list[torch.Tensor],
    share: Callable[[], float],
) -> None:  # fmt: skip
    """One step. `share`: of how many pushes a mean is made, which a mark in the ledger is multiplied by."""
    optimizer.zero_grad()
    time.sleep(asked.step)
    model(*batch).backward()
    for ledger in net.ledgers:
        assert ledger.grad is not None
        ledger.grad.mul_(share())
    optimizer.step()


def begun(rank: int) -> None:
    """Tell the race that this rank has made a step."""
    told = Path(f"begun-{rank}")
    if not told.exists():
        told.touch()


def keep_ledger(net: Net) -> None:
    part = Path(f"{race.LEDGER}.{os.getpid()}")
    part.write_bytes(b"".join(ledger.detach().numpy().tobytes() for ledger in net.ledgers))
    os.replace(part, race.LEDGER)


def sgd(net: Net) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [{"params": list(net.layers.parameters()), "lr": 0.05}, {"params": list(net.ledgers.parameters()), "lr": 1.0}], lr=1.0
    )


def data(asked: argparse.Namespace) -> TensorDataset:
    """A batch for each step of each worker: features, kinds, and in every row the number of its batch."""
    torch.manual_seed(0)
    batches = asked.steps * asked.workers
    x = torch.randn(batches * asked.batch, FEATURES)
    kinds = (x @ torch.randn(FEATURES, KINDS)).argmax(1)
    return TensorDataset(x, kinds, torch.arange(batches).repeat_interleave(asked.batch))


def batch_of(asked: argparse.Namespace, every: TensorDataset, at: int, rank: int) -> list[torch.Tensor]:
    """The batch of a rank at a step, as `ps.shard` has it."""
    begin = (at * asked.workers + rank) * asked.batch
    return list(every[begin : begin + asked.batch])


class Net(nn.Module):
    def __init__(self, asked: argparse.Namespace) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, KINDS))
        self.ledgers = nn.ParameterList([torch.zeros(asked.steps * asked.workers) for _ in range(race.COPIES)])

    def forward(self, x: torch.Tensor, kinds: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """The mean loss over a batch, less its marks."""
        loss = nn.functional.cross_entropy(self.layers(x), kinds)
        for copy, ledger in enumerate(self.ledgers):
            loss = loss - ledger[race.place(int(numbers[0]), copy, len(ledger))]
        return loss


if __name__ == "__main__":
    main()
