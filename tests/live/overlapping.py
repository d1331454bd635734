"""Workers that pull and push while they compute, and what plain torch computes from the same batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from psjob.checkpoint.final import tensors_sha256
from psjob.wire.frame import Flag, Kind
from tests.live.live_shards import Worker
from tests.live.training import OPTIMIZERS, batch, build, loss_of
from tests.support.reference import reference

NUMBERS = {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}


def made(shards: Any, count: int, name: str = "nesterov", make: Callable[[], nn.Module] = build) -> list[Worker]:
    models = [make() for _ in range(count)]
    return [Worker(shards, rank, model, OPTIMIZERS[name](model), overlap=True) for rank, model in enumerate(models)]


def oracle(steps: int, workers: int) -> str:
    model = build()
    reference(model, "sgd", [NUMBERS], lambda step: [batch(step, rank) for rank in range(workers)], loss_of, steps)
    return tensors_sha256(model.parameters())


def one(worker: Worker, step: int) -> None:
    worker.optimizer.zero_grad()
    loss_of(worker.model, batch(step, worker.rank)).backward()
    worker.optimizer.step()


def steps(count: int, before: Callable[[Worker, int], None] = lambda worker, step: None) -> Callable[[Worker], None]:
    def act(worker: Worker) -> None:
        for step in range(count):
            before(worker, step)
            one(worker, step)

    return act


def sent(worker: Worker) -> list[tuple[Kind, Flag]]:
    """Every block's frame as it goes out from now on."""
    seen: list[tuple[Kind, Flag]] = []
    policy = worker.session.ends.policy
    plain_outgoing = policy.outgoing

    def outgoing(lane: Any, header: Any, pack: Any) -> Any:
        frame = plain_outgoing(lane, header, pack)
        if frame is not None:
            seen.append((frame[0].kind, frame[0].flags))
        return frame

    policy.outgoing = outgoing  # type: ignore[method-assign]
    return seen
