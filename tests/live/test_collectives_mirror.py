"""Mirrored replicas: the same bits in every process after every step, and those of a synchronous job."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import psjob as ps
from psjob import contract
from psjob.collectives.reducing import connected
from psjob.rules.reduction import mean_in_rank_order
from tests.live.collectives_processes import together
from tests.reference import reference

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


def by_hand(kind: str, ranks: int) -> list[str]:
    """One process that has the micro-batches of all ranks and adds their gradients in rank order."""
    net = model()
    opt = optimizer(kind, net)
    hashes = [hashed(net)]
    for step in range(STEPS):
        pushes = []
        for rank in range(ranks):
            opt.zero_grad()
            loss(net, batch(step, rank)).backward()  # type: ignore[no-untyped-call]
            pushes.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
        for p, grads in zip(net.parameters(), zip(*pushes, strict=True), strict=True):
            p.grad = torch.empty_like(p)
            mean_in_rank_order(grads, p.grad)
        opt.step()
        hashes.append(hashed(net))
    return hashes


@pytest.mark.parametrize(("ranks", "kind"), [(2, "sgd"), (3, "adam")])
def test_replicas_are_one_model_with_the_bits_of_rank_order(tmp_path: Path, ranks: int, kind: str) -> None:
    ended = together(ranks, trained, tmp_path, kind, "mirrored")
    assert [rank.found for rank in ended] == [by_hand(kind, ranks)] * ranks, [rank.said for rank in ended]


def test_a_sync_job_has_the_same_bits() -> None:
    """`by_hand`, which replicas equal, against what a job with parameter servers promises."""
    net = model()
    hyperparameters = [{"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}]
    reference(net, "sgd", hyperparameters, lambda step: [batch(step, rank) for rank in range(2)], loss, STEPS)
    assert hashed(net) == by_hand("sgd", 2)[-1]


def test_replicas_of_a_ring_are_one_model(tmp_path: Path) -> None:
    first, *others = together(4, trained, tmp_path, "sgd", "ring")
    assert first.found and all(rank.found == first.found for rank in others)


def partly() -> list[Any]:
    """Gradients that a rank, or every rank, has not."""
    group = connected(30.0)
    assert group is not None
    net = nn.ParameterList([torch.ones(2), torch.ones(3), torch.ones(4)])
    net, opt = ps.mirror(net, torch.optim.SGD(net.parameters(), lr=1.0))
    sum(p.sum() for p in list(net)[group.rank() : 2]).backward()  # type: ignore[union-attr]
    opt.step()
    return [None if p.grad is None else p.grad.tolist() for p in net] + [p.tolist() for p in net]


def test_none_on_some_ranks_counts_as_zeros_and_on_all_stays_none(tmp_path: Path) -> None:
    for rank in together(2, partly, tmp_path):
        assert rank.found == [[0.5] * 2, [1.0] * 3, None, [0.5] * 2, [0.0] * 3, [1.0] * 4]


# -- refused -----------------------------------------------------------------------------------------------------------------------------


def unlike() -> None:
    group = connected(30.0)
    assert group is not None
    net = nn.Linear(3, 2 + group.rank())
    ps.mirror(net, torch.optim.SGD(net.parameters(), lr=1.0), deadline=5.0)
    nn.functional.mse_loss(net(torch.ones(1, 3)), torch.ones(1, 2 + group.rank())).backward()  # type: ignore[no-untyped-call]


def test_another_model_than_rank_0s_is_refused(tmp_path: Path) -> None:
    first, second = together(2, unlike, tmp_path)
    assert second.status == contract.EXIT_REFUSED and "rank 1's model or optimizer is not rank 0's" in second.said
    assert first.status in (0, contract.EXIT_RETRY)


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


@pytest.mark.parametrize(("work", "words"), [
    (closes, "call backward before step, without a closure"),
    (stranger, "a parameter of shape (1, 1) that is not in the model given to mirror"),
    (rows, "has a sparse gradient"),
    (unknown, "no strategy 'star'"),
])  # fmt: skip
def test_what_replicas_cannot_do_ends_with_a_sentence(tmp_path: Path, work: Any, words: str) -> None:
    for rank in together(2, work, tmp_path):
        assert rank.status == contract.EXIT_REFUSED
        assert rank.said.startswith("psjob: ") and words in rank.said and "Traceback" not in rank.said


def test_a_lone_process_goes_on_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", contract.ENV_ROLE):
        monkeypatch.delenv(name, raising=False)
    net = nn.Linear(1, 1)
    opt = torch.optim.SGD(net.parameters(), lr=1.0)
    assert ps.mirror(net, opt) == (net, opt) and not opt._optimizer_step_pre_hooks


def test_in_a_job_workers_are_told_to_attach(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(contract.ENV_ROLE, "worker")
    net = nn.Linear(1, 1)
    with pytest.raises(SystemExit) as ended:
        ps.mirror(net, torch.optim.SGD(net.parameters(), lr=1.0))
    assert ended.value.code == contract.EXIT_REFUSED
    assert "call psjob.attach, or start the script with torchrun" in capsys.readouterr().err
