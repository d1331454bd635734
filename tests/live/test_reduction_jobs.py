"""Reductions on real shards in this process: what the pushes of a clock come to, and what is refused."""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import psjob as ps
from psjob.contract import EXIT_REFUSED
from psjob.process.config import CompressionConfig
from psjob.worker.exits import SessionEnd
from tests.live.live_shards import Worker, all_well, aside, serving
from tests.support.soaking import rotating

pytestmark = pytest.mark.usefixtures("last_words")
WORKERS, STEPS, SIZE = 4, 6, 3000


def spread(pushes: list[torch.Tensor]) -> torch.Tensor:
    whole = torch.stack(pushes)
    return whole.amax(0) - whole.amin(0)


def breaks_later(pushes: list[torch.Tensor]) -> torch.Tensor:
    if len(pushes) > 1 and float(pushes[0][0]) == 3.0 and len(pushes[0]) > 4:
        sys.exit("these are odd pushes")
    return pushes[0] + 0


OWN = f"{__name__}:spread"
ORACLES: dict[str, Callable[[Any], Any]] = {
    "mean": lambda pushes: pushes.sum(0) * np.float32(1 / len(pushes)),
    "sum": lambda pushes: pushes.sum(0),
    "median": lambda pushes: np.median(pushes, axis=0),
    "trimmed_mean": lambda pushes: np.sort(pushes, axis=0)[len(pushes) // 4 : len(pushes) - len(pushes) // 4].mean(0, dtype=np.float32),
    OWN: lambda pushes: pushes.max(0) - pushes.min(0),
}


TRANSPORTS = ("auto", "tcp")
WAYS, NAMES = ("update on the worker", "bf16", "early leavers"), ("sum", OWN)


def divided(quick: Set[tuple[str, str]], first: Iterable[str], second: Iterable[str]) -> list[Any]:
    """All pairs; those that are not `quick` are left to `make soak`."""
    return [pytest.param(*pair) if pair in quick else rotating(*pair) for pair in itertools.product(first, second)]


def gradient(step: int, rank: int) -> Any:
    """Whole numbers, in which every sum is exact."""
    return np.random.default_rng([step, rank]).integers(-50, 50, SIZE).astype(np.float32)


class Vector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE))


def workers_of(shards: Any, count: int = WORKERS, make: Any = torch.optim.SGD) -> list[Worker]:
    return [Worker(shards, rank, model, make(model.parameters(), lr=1.0)) for rank, model in enumerate(Vector() for _ in range(count))]


def pushing(last: Sequence[int] = (STEPS,) * WORKERS, seed: int | None = None) -> Callable[[Worker], None]:
    """Each rank pushes its gradients up to its last step."""

    def act(worker: Worker) -> None:
        chance = random.Random(f"{seed}-{worker.rank}")
        for step in range(last[worker.rank]):
            if seed is not None:
                time.sleep(chance.random() * 0.004)
            worker.model.weight.grad = torch.from_numpy(gradient(step, worker.rank))
            worker.optimizer.step()

    return act


def expected(name: str, last: Sequence[int] = (STEPS,) * WORKERS) -> Any:
    """Weights after plain gradient descent on what numpy makes of the pushes."""
    weights = np.zeros(SIZE, dtype=np.float32)
    for step in range(max(last)):
        weights -= ORACLES[name](np.stack([gradient(step, rank) for rank, until in enumerate(last) if step < until])).astype(np.float32)
    return weights


@pytest.mark.parametrize(
    ("name", "transport"), divided({(name, TRANSPORTS[at % 2]) for at, name in enumerate(ORACLES)}, ORACLES, TRANSPORTS)
)
def test_whole_numbers_come_to_the_same_bits_whoever_comes_first(tmp_path: Path, name: str, transport: str) -> None:
    with serving(tmp_path, workers=WORKERS, shards=2, reduction=name, transport=transport) as shards:
        workers = workers_of(shards)
        all_well(workers, pushing(seed=TRANSPORTS.index(transport)))
    assert all(np.array_equal(worker.model.weight.detach().numpy(), expected(name)) for worker in workers)


@pytest.mark.parametrize(("way", "name"), divided(set(zip(WAYS, NAMES * 2, strict=False)), WAYS, NAMES))
def test_reductions_hold_whatever_else_a_job_has(tmp_path: Path, way: str, name: str) -> None:
    last = (STEPS, 4, STEPS - 1, 4) if way == "early leavers" else (STEPS,) * WORKERS
    options: dict[str, Any] = {"compression": CompressionConfig(push="bf16")} if way == "bf16" else {}
    if way == "update on the worker":
        options["update_at"] = "worker"
    with serving(tmp_path, workers=WORKERS, shards=2, reduction=name, **options) as shards:
        workers = workers_of(shards)
        all_well(workers, pushing(last))
    assert np.array_equal(workers[0].model.weight.detach().numpy(), expected(name, last))


def test_rows_are_added_where_the_job_says_sum(tmp_path: Path) -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = ps.Embedding(9, 3, init="zeros", optimizer="sgd", lr=1.0)

    held: dict[tuple[str, int], torch.Tensor] = {}

    def act(worker: Worker) -> None:
        for _ in range(2):
            worker.optimizer.zero_grad()
            worker.model.rows(torch.arange(worker.rank, 6)).sum().backward()
            worker.optimizer.step()
        with torch.no_grad():
            held[(name, worker.rank)] = worker.model.rows(torch.arange(9))[:, 0]

    for name in ("mean", "sum"):
        (folder := tmp_path / name).mkdir()
        with serving(folder, workers=4, shards=2, reduction=name) as shards:
            models = [Rows() for _ in range(4)]
            all_well([Worker(shards, rank, m, torch.optim.SGD(m.parameters(), lr=1.0)) for rank, m in enumerate(models)], act)
    naming = torch.tensor([1.0, 2, 3, 4, 4, 4, 0, 0, 0])
    assert all(torch.equal(held[("sum", rank)], -2 * naming) and torch.equal(held[("mean", rank)], -2 * naming / 4) for rank in range(4))


def test_a_reduction_that_fails_ends_the_job_with_its_sentence(tmp_path: Path) -> None:
    with serving(tmp_path, workers=2, shards=1, reduction=f"{__name__}:breaks_later") as shards:
        workers = workers_of(shards, 2)
        for starting in [aside(worker.attach) for worker in workers]:
            starting.join(20)
        for step in (1.0, 3.0):
            for worker in workers:
                worker.model.weight.grad = torch.full((SIZE,), step)
            pushes = [aside(worker.optimizer.step) for worker in workers]
            if step == 1.0:
                assert [push.join(20) for push in pushes] == [None, None] and workers[0].session.clock == 1
        assert shards.wait_ended() == [EXIT_REFUSED]
        words = shards.servers[0].termination_message["error"]
        for worker, push in zip(workers, pushes, strict=True):
            worker.session._end(SessionEnd("lost"))
            push.join(20)
    assert (
        words.startswith("step 1 of block 0: ")
        and "breaks_later failed on 2 pushes of float32 [1024]: SystemExit: these are odd pushes" in words
    )


class Both(Vector):
    def __init__(self) -> None:
        super().__init__()
        self.rows = ps.Embedding(9, 3)


@pytest.mark.parametrize(
    ("options", "model", "words"),
    [
        ({"compression": CompressionConfig(push="topk")}, Vector, "most elements may be left out; take compression none, bf16"),
        ({}, Both, "does not go with rows of rows on the shards: .*; take mean or sum"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, last_words: Path, options: dict[str, Any], model: Any, words: str) -> None:
    from psjob.process.errors import Refused

    with serving(tmp_path, workers=1, shards=1, reduction="median", **options) as shards, pytest.raises(Refused, match=words):
        made = model()
        Worker(shards, 0, made, torch.optim.SGD(made.parameters(), lr=1.0))
