"""Mirrored replicas: the same bits in every process after every step, and those of a synchronous job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import psjob as ps
from psjob import contract
from psjob.rules.reduction import mean_in_rank_order
from tests.live.collectives_processes import Ended, together
from tests.live.collectives_work import (
    STEPS,
    batch,
    closes,
    hashed,
    loss,
    model,
    optimizer,
    rows,
    stranger,
    trained,
    trainings,
    unknown,
    unlike,
)
from tests.support.reference import reference


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


RANKS = 4


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    """Ranks that do the work of several tests: the first step of an optimizer costs a process the import of torch's compiler."""
    return together(RANKS, trainings, tmp_path_factory.mktemp("ranks"))


def test_replicas_are_one_model_with_the_bits_of_rank_order(ranks: list[Ended]) -> None:
    assert [rank.found["mirrored"] for rank in ranks] == [by_hand("adam", RANKS)] * RANKS, [rank.said for rank in ranks]


@pytest.mark.rotating
def test_replicas_of_two_ranks_are_one_model(tmp_path: Path) -> None:
    ended = together(2, trained, tmp_path, "sgd", "mirrored")
    assert [rank.found for rank in ended] == [by_hand("sgd", 2)] * 2, [rank.said for rank in ended]


def test_a_sync_job_has_the_same_bits() -> None:
    """`by_hand`, which replicas equal, against what a job with parameter servers promises."""
    net = model()
    hyperparameters = [{"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}]
    reference(net, "sgd", hyperparameters, lambda step: [batch(step, rank) for rank in range(2)], loss, STEPS)
    assert hashed(net) == by_hand("sgd", 2)[-1]


def test_replicas_of_a_ring_are_one_model(ranks: list[Ended]) -> None:
    first, *others = ranks
    assert first.found["ring"] and all(rank.found["ring"] == first.found["ring"] for rank in others)


def test_none_on_some_ranks_counts_as_zeros_and_on_all_stays_none(ranks: list[Ended]) -> None:
    for rank in ranks:
        assert rank.found["partly"] == [[0.25] * 2, [0.5] * 3, None, [0.75] * 2, [0.5] * 3, [1.0] * 4]


# -- refused -----------------------------------------------------------------------------------------------------------------------------


def test_another_model_than_rank_0s_is_refused(tmp_path: Path) -> None:
    first, second = together(2, unlike, tmp_path)
    assert second.status and "psjob.Refused: rank 1's model or optimizer is not rank 0's" in second.said
    assert not first.status or "psjob.PeerLost: " in first.said


@pytest.mark.parametrize(("work", "words"), [
    (closes, "call backward before step, without a closure"),
    (stranger, "a parameter of shape (1, 1) that is not in the model given to mirror"),
    (rows, "has a sparse gradient"),
    (unknown, "no strategy 'star'"),
])  # fmt: skip
def test_what_replicas_cannot_do_is_refused(tmp_path: Path, work: Any, words: str) -> None:
    for rank in together(2, work, tmp_path):
        assert rank.status and "psjob.Refused: " in rank.said and words in rank.said


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
