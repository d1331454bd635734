"""What ranks do in the tests of collectives. Processes import this module, which needs no test framework."""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from typing import Any

import torch
from torch import nn

import psjob as ps
from psjob.collectives.all_reduce import PeerLost, Pending, PointToPoint, connected, run_schedule
from psjob.collectives.schedule import STRATEGIES, schedule_of

NUMEL = 100_003
STEPS = 8


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.BatchNorm1d(32), nn.Linear(32, 5))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(16, 20, generator=made), torch.randint(0, 5, (16,), generator=made)


def loss(of: nn.Module, given: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(of(given[0]), given[1])


def optimizer(kind: str, of: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(of.parameters(), lr=0.1, fused=True) if kind == "sgd" else torch.optim.Adam(of.parameters(), lr=0.01)


def hashed(of: nn.Module) -> str:
    found = hashlib.sha256()
    for p in of.parameters():
        found.update(p.detach().numpy().tobytes())
    return found.hexdigest()


def trained(kind: str, strategy: str) -> list[str]:
    """A replica's hash after each step; only rank 0 begins with the right values."""
    group = connected(30.0)
    assert group is not None
    net = model(group.rank())
    net, opt = ps.mirror(net, optimizer(kind, net), strategy)
    hashes = [hashed(net)]
    for step in range(STEPS):
        opt.zero_grad()
        loss(net, batch(step, group.rank())).backward()  # type: ignore[no-untyped-call]
        opt.step()
        hashes.append(hashed(net))
    return hashes


def partly() -> list[Any]:
    """Gradients that a rank, or every rank, has not."""
    group = connected(30.0)
    assert group is not None
    net = nn.ParameterList([torch.ones(2), torch.ones(3), torch.ones(4)])
    net, opt = ps.mirror(net, torch.optim.SGD(net.parameters(), lr=1.0))
    for p in list(net)[group.rank() : 2]:
        p.sum().backward()  # type: ignore[no-untyped-call]
    opt.step()
    return [None if p.grad is None else p.grad.tolist() for p in net] + [p.tolist() for p in net]


def trainings() -> dict[str, Any]:
    """What replicas of a strategy come to, and what comes of gradients that some have not."""
    return {"mirrored": trained("adam", "mirrored"), "ring": trained("sgd", "ring"), "partly": partly()}


def unlike() -> None:
    group = connected(30.0)
    assert group is not None
    net = nn.Linear(3, 2 + group.rank())
    ps.mirror(net, torch.optim.SGD(net.parameters(), lr=1.0), deadline=5.0)
    nn.functional.mse_loss(net(torch.ones(1, 3)), torch.ones(1, 2 + group.rank())).backward()  # type: ignore[no-untyped-call]


def closes() -> None:
    net = nn.Linear(1, 1)
    _, opt = ps.mirror(net, torch.optim.SGD(net.parameters(), lr=1.0))
    opt.step(lambda: 0.0)


def stranger() -> None:
    ps.mirror(nn.Linear(1, 1), torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0))


def rows() -> None:
    net = nn.Embedding(4, 2, sparse=True)
    _, opt = ps.mirror(net, torch.optim.SGD(net.parameters(), lr=1.0))
    net(torch.tensor([1])).sum().backward()
    opt.step()


def unknown() -> None:
    net = nn.Linear(1, 1)
    ps.mirror(net, torch.optim.SGD(net.parameters(), lr=1.0), "star")


class Counting(PointToPoint):
    """Counts the elements that this rank sends to each peer."""

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self.sent: Counter[int] = Counter()

    def send(self, data: torch.Tensor, peer: int, tag: int) -> Pending:
        self.sent[peer] += data.numel()
        return super().send(data, peer, tag)


def vectors(ranks: int, whole: bool) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(3)
    return [
        torch.randint(-999, 999, (NUMEL,), generator=made).float() if whole else torch.randn(NUMEL, generator=made) for _ in range(ranks)
    ]


def sums() -> dict[str, Any]:
    """Every strategy in this rank: is the sum of whole numbers right, the hash of a rough one, and what was sent."""
    group = connected(30.0)
    assert group is not None
    rank, ranks, found = group.rank(), group.size(), {}
    for name in STRATEGIES:
        exact = vectors(ranks, True)[rank]
        transport = Counting(group)
        run_schedule(schedule_of(name, ranks, 5, 2), exact, transport, 30.0)
        right = torch.equal(exact, torch.stack(vectors(ranks, True)).sum(0))
        hashes = []
        for _ in range(2):
            rough, second = vectors(ranks, False)[rank].view(-1, 1), torch.full((3,), rank, dtype=torch.int64)
            ps.all_reduce([rough[:60_000], second, rough[60_000:]], name, devices=2)
            assert second.tolist() == [ranks * (ranks - 1) // 2] * 3
            hashes.append(hashlib.sha256(rough.numpy().tobytes()).hexdigest())
        found[name] = {"right": right, "hashes": hashes, "sent": dict(transport.sent)}
    return found


def uplink(name: str) -> dict[str, Any]:
    group = connected(30.0)
    assert group is not None
    exact, transport = vectors(4, True)[group.rank()], Counting(group)
    run_schedule(schedule_of(name, 4, 1, 2), exact, transport, 30.0)
    return {"right": torch.equal(exact, torch.stack(vectors(4, True)).sum(0)), "sent": dict(transport.sent)}


def left_by(strategy: str, how: str) -> dict[str, Any]:
    """The last rank dies, or says nothing more; what the others meet, and after how long."""
    group = connected(30.0)
    assert group is not None
    vector = torch.ones(NUMEL)
    ps.all_reduce(vector, strategy)
    if group.rank() == group.size() - 1:
        if how == "dies":
            os._exit(9)
        time.sleep(4)
        return {}
    began = time.monotonic()
    try:
        while True:
            ps.all_reduce(vector, strategy, deadline=1.0 if how == "is silent" else 30.0)
    except PeerLost as lost:
        return {"lost": str(lost), "after": time.monotonic() - began}


def refusals() -> list[str]:
    said = []
    for tensor, words in ((torch.ones(2), {"strategy": "star"}), (torch.ones(2, dtype=torch.int32), {"mean": True}),
                          (torch.eye(2).to_sparse(), {}), (torch.ones(2), {"strategy": "double-ring"})):  # fmt: skip
        try:
            ps.all_reduce(tensor, **words)  # type: ignore[arg-type]
        except ValueError as error:
            said.append(str(error))
    torch.distributed.barrier()  # a rank that ends while the other still connects breaks the other's connection
    return said
