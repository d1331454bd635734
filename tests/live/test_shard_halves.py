"""Rules that have a half in the worker, in a job: real shards, real sockets, and what a worker that returns has kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from psjob.process.config import CheckpointConfig, CompressionConfig
from psjob.process.errors import Refused
from psjob.resume import record
from psjob.worker import compression, session
from tests.live.live_shards import Worker, all_well, eventually, serving
from tests.live.training import batch, build, learn, loss_of, steps, whole_loss
from tests.support.soaking import rotating

SLIM = {"mode": "async", "update_rule": "dana-slim"}


@pytest.fixture(autouse=True)
def one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setenv("PSJOB_TERMINATION_LOG", str(tmp_path / "last-words"))


def slim(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups with numbers of their own."""
    first, *rest = model.parameters()
    return torch.optim.SGD([{"params": [first], "lr": 0.05}, {"params": rest}], lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("transport", ["auto", rotating("tcp")])
def test_one_worker_of_an_async_job_is_torchs_nesterov_bit_for_bit(tmp_path: Path, transport: str) -> None:
    alone = build()
    optimizer = slim(alone)
    for step in range(40):
        optimizer.zero_grad()
        loss_of(alone, batch(step, 0)).backward()
        optimizer.step()
    with serving(tmp_path, workers=1, shards=2, transport=transport, **SLIM) as shards:
        model = build()
        worker = Worker(shards, 0, model, slim(model), overlap=False)
        all_well([worker], steps(40))
    assert same(model, alone)


def test_parameters_without_a_gradient_and_steps_with_inf_leave_the_momentum(tmp_path: Path) -> None:
    """A GradScaler's step, one that it skips, and one where a layer took no part; against torch with the same."""
    models, losses = [build(), build()], []
    with serving(tmp_path, workers=1, shards=2, **SLIM) as shards:
        worker = Worker(shards, 0, models[0], slim(models[0]), overlap=False)

        def act(worker: Worker) -> None:
            for model, optimizer in ((models[0], worker.optimizer), (models[1], slim(models[1]))):
                for step in range(9):
                    optimizer.zero_grad()
                    loss = loss_of(model, batch(step, 0))
                    (8.0 * loss).backward()
                    if step == 4:
                        next(iter(model.parameters())).grad = None
                    scale(optimizer, model, 8.0, skip=step == 6)
                    losses.append(loss.item())

        all_well([worker], act)
    assert losses[:9] == losses[9:] and same(*models)


def scale(optimizer: torch.optim.Optimizer, model: nn.Module, by: float, skip: bool) -> None:
    """What torch.amp.GradScaler does at `step`, to an optimizer that takes its scale and to one that does not."""
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(by), torch.tensor(float(skip))  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    elif not skip:
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(1 / by)
        optimizer.step()


def test_a_worker_that_returns_has_its_momentum(tmp_path: Path) -> None:
    """It dies after a checkpoint at clock 12; its follower continues from that clock's record as if nothing had been."""
    alone = build()
    optimizer = slim(alone)
    for step in range(20):
        optimizer.zero_grad()
        loss_of(alone, batch(step, 0)).backward()
        optimizer.step()
    every = CheckpointConfig(interval_seconds=3600.0, every_steps=4, keep=3, disabled=False, resume_from=None)
    with serving(tmp_path, workers=1, shards=2, checkpoint=every, **SLIM) as shards:
        first = build()
        dying = Worker(shards, 0, first, slim(first), overlap=False)
        dying.attach()
        steps(12)(dying)
        kept = dying.job.half
        assert kept is not None
        saved = {name: tensor.clone() for name, tensor in kept.state_dict().items()}
        assert eventually(lambda: recorded(dying) == 12), "a checkpoint is due at clock 12"
        dying.die()
        second = build()
        follower = Worker(shards, 0, second, slim(second), start=2, overlap=False)

        def act(worker: Worker) -> None:
            for step in range(20):
                worker.optimizer.zero_grad()
                if step < 12 or worker.job.half is None:
                    worker.optimizer.step()
                    continue
                if step == 12:
                    restored = worker.job.half.state_dict()
                    assert restored.keys() == saved.keys() and all(torch.equal(restored[name], saved[name]) for name in saved)
                loss_of(worker.model, batch(step, 0)).backward()
                worker.optimizer.step()

        all_well([follower], act)
    assert same(second, alone)


def recorded(worker: Worker) -> int:
    """The clock of the last record that a worker has handed in, after it stood between two steps once more."""
    worker.edge()
    last = worker.session.machine.last_record
    assert last is not None
    return last[0]


def test_what_two_keep_for_the_record_is_counted_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either would fit: a codec's left-out numbers, and the momentum."""
    needs = sum(p.nbytes for p in build().parameters())
    for module in (session, compression):
        monkeypatch.setattr(module, "LIMIT", needs + 100)
    with serving(tmp_path, workers=1, compression=CompressionConfig("int8"), **SLIM) as shards:
        model = build()
        with pytest.raises(Refused, match=r"at most 100 fit beside the state of training.updateRule; take bf16"):
            Worker(shards, 0, model, slim(model), overlap=False)
    with serving(tmp_path, workers=1, run="run-2", compression=CompressionConfig("bf16"), **SLIM) as shards:
        model = build()
        all_well([Worker(shards, 0, model, slim(model), overlap=False)], steps(2))


def test_a_record_that_cannot_be_kept_or_put_back_ends_the_script_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path, workers=1) as shards:
        model = build()
        worker = Worker(shards, 0, model, torch.optim.SGD(model.parameters(), lr=0.1), overlap=False)
        worker.attach()
        steps(1)(worker)
        worker.job.restored = record.unpack(worker.job.records.make(None))
        worker.job.restored.stateful["dana-slim (worker side)"] = {}
        with pytest.raises(SystemExit) as end:
            worker.job.put_back()
        said = (tmp_path / "last-words").read_text()
        assert end.value.code == 77 and "attach was given 'dana-slim (worker side)' only when the record was taken" in said
        model = build()
        worker = Worker(shards, 0, model, torch.optim.SGD(model.parameters(), lr=0.1), start=2, overlap=False)
        worker.attach()
        monkeypatch.setattr(record, "MAX_BYTES", 100)
        with pytest.raises(SystemExit) as end:
            steps(3)(worker)
        assert end.value.code == 77 and "keep less in buffers and in what attach is given" in (tmp_path / "last-words").read_text()


def test_many_workers_train_together(tmp_path: Path) -> None:
    with serving(tmp_path, workers=4, shards=2, **SLIM) as shards:
        workers = []
        for rank in range(4):
            model = build()
            workers.append(Worker(shards, rank, model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9), overlap=False))
        before = whole_loss(build())
        all_well(workers, learn)
    assert all(whole_loss(worker.model) < 0.5 * before for worker in workers)
