"""Rules that answer each worker in its own way, in a job: real shards, real sockets, checkpoints, and workers that come and go.

- Rules that have a half in the worker, in a job: real shards, real sockets, and what a worker that returns has kept.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from psjob.checkpoint import manifest
from psjob.checkpoint.states import read_states
from psjob.process.config import CheckpointConfig, CompressionConfig
from psjob.process.errors import Refused
from psjob.resume import record
from psjob.rules.base import of_worker
from psjob.shard.block import ParameterBlock
from psjob.worker import compression, local_updates
from tests.live.live_shards import NEVER, Shards, Worker, all_well, eventually, serving, together
from tests.live.training import batch, build, learn, loss_of, steps, train_step, whole_loss
from tests.support.quick import rest_rotates
from tests.support.soaking import rotating

pytestmark = pytest.mark.usefixtures("last_words")


def heavy(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def workers_of(shards: Shards, lr: float = 0.02, overlap: bool = False, start: int = 1) -> list[Worker]:
    made = []
    for rank in range(shards.config.workers):
        model = build()
        made.append(Worker(shards, rank, model, heavy(model, lr), start=start, overlap=overlap))
    return made


def cells(shards: Shards) -> list[ParameterBlock]:
    """Of all shards, in the order of their blocks."""
    found = {index: cell for server in shards.servers for index, cell in server.store.cells.items()}
    return [found[index] for index in sorted(found)]


def lost(shards: Shards) -> list[int]:
    return [server.store.counters.lost for server in shards.servers]


WAYS: dict[str, tuple[dict[str, Any], bool]] = {
    "shared": ({}, False),
    "tcp": ({"transport": "tcp"}, False),
    "overlap": ({}, True),
    "streams": ({"streams": 3, "transport": "tcp"}, False),
    "bf16": ({"compression": CompressionConfig("bf16", "none")}, False),
}
"""How blocks come and go: settings of the job, and overlap."""


@pytest.mark.parametrize(
    ("rule", "way"),
    [
        ("dana-dc", "shared"),
        ("dc-asgd", "overlap"),
        ("gap-aware", "streams"),
        ("gap-aware-dana", "bf16"),
        ("dana-dc", "tcp"),
        *(rotating("dana-dc", way) for way in ("overlap", "streams", "bf16")),
        *(rotating(rule, "tcp") for rule in ("dc-asgd", "gap-aware", "gap-aware-dana")),
    ],
)
def test_what_is_noted_is_what_each_worker_has(tmp_path: Path, rule: str, way: str) -> None:
    """Also after streams have broken, when an answer was lost and another one made."""
    settings, overlap = WAYS[way]
    with serving(tmp_path, workers=3, shards=2, mode="async", update_rule=rule, **settings) as shards:

        def act(worker: Worker) -> None:
            chance = random.Random(worker.rank)
            for step in range(15):
                if chance.random() < 0.2:
                    worker.session.links[chance.randrange(2)].close()
                train_step(worker, step)
            worker.job.wait()
            packs, parameters = worker.session.exchange.make_packs(), list(worker.model.parameters())
            for cell in cells(shards):
                with cell.lock:
                    assert cell.state is not None
                    noted = cell.state.slots[of_worker("sent", worker.rank)].clone()
                assert torch.equal(noted, packs[cell.index].gather(parameters)), cell.name

        all_well(workers_of(shards, overlap=overlap), act)
        assert lost(shards) == [0, 0]


def forget_base(worker: Worker) -> None:
    """As after the loss of a shard: the weights that the worker has are of an attempt that is gone."""
    for block in worker.session.exchange.versions:
        worker.session.exchange.versions[block] = (99, 3)


@pytest.mark.parametrize(("rule", "gone"), [("gap-aware", True), ("lr-over-lag", True), ("dana-zero", False)])
def test_a_push_without_a_known_base_is_lost_where_the_rule_needs_it(tmp_path: Path, rule: str, gone: bool) -> None:
    with serving(tmp_path, workers=1, shards=2, mode="async", update_rule=rule) as shards:
        (worker,) = workers_of(shards)
        worker.attach()
        steps(3)(worker)
        before = [cell.state.weights.clone() for cell in cells(shards) if cell.state is not None]
        forget_base(worker)
        steps(1)(worker)
        after = [cell.state.weights.clone() for cell in cells(shards) if cell.state is not None]
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True)) is gone
        assert lost(shards) == ([1, 1] if gone else [0, 0])
        steps(2)(worker)
        assert [server.store.counters.applied for server in shards.servers] == ([5, 5] if gone else [6, 6])
        assert lost(shards) == ([1, 1] if gone else [0, 0]), "the answer to the lost push is a base again"
        assert worker.leave() == 0


def test_a_worker_that_has_left_is_out_of_the_sum(tmp_path: Path) -> None:
    with serving(tmp_path, workers=3, shards=2, mode="async", update_rule="dana-zero") as shards:

        def act(worker: Worker) -> None:
            steps(4 + worker.rank)(worker)
            if worker.rank == 2:
                assert eventually(lambda: len(shards.servers[0].store.admission.live()) == 1)
                steps(3)(worker)
                for cell in cells(shards):
                    with cell.lock:
                        assert cell.state is not None and sorted(cell.state.slots) == ["sum", "v@2"]
                        torch.testing.assert_close(cell.state.slots["sum"], cell.state.slots["v@2"], rtol=0, atol=1e-5)

        all_well(workers_of(shards), act)


@pytest.mark.parametrize("shards_then", [rotating(1), 3])
def test_what_belongs_to_a_worker_comes_back_on_other_shards(tmp_path: Path, shards_then: int) -> None:
    """Two runs that continue from one checkpoint on other shards; the workers' momenta and notes are there before they push."""
    with serving(tmp_path, workers=2, shards=2, mode="async", update_rule="dana-dc", checkpoint=replace(NEVER, every_steps=4)) as shards:

        def act(worker: Worker) -> None:
            for turn in range(200):
                worker.edge(turn)
                steps(1)(worker)
                if any(int(path.stem[-12:]) >= 4 for path in shards.folder.glob("manifest-*.json")):
                    break
            worker.die()
            raise InterruptedError

        assert all(isinstance(error, InterruptedError) for error in together(workers_of(shards), act))
    made, _ = manifest.newest_manifest(shards.folder, None)
    assert made is not None and made.step >= 4
    saved = read_states(shards.folder, made, range(len(made.layout.blocks)))
    expected = {"sum", "v@0", "v@1", "sent@0", "sent@1"}
    assert all(set(state.slots) == expected and state.slots["v@1"].any() for state, _ in saved.values())
    again = replace(NEVER, resume_from=str(shards.folder))
    with serving(tmp_path, workers=2, shards=shards_then, mode="async", update_rule="dana-dc", checkpoint=again, run="run-2") as later:
        first, second = workers_of(later)
        first.attach()
        for cell in cells(later):
            assert cell.state is not None and set(cell.state.slots) == expected
            for name in expected - {"sent@0"}:
                assert torch.equal(cell.state.slots[name], saved[cell.index][0].slots[name])
        for p, ahead in zip(first.model.parameters(), reply_of(saved, made), strict=True):
            assert torch.equal(p, ahead)
        first.die()
        second.die()


def reply_of(saved: dict[int, Any], made: manifest.Manifest) -> list[torch.Tensor]:
    """What a worker with lr 0.02 and momentum 0.9 is sent: the weights where all momenta will have taken them."""
    tensors = [torch.empty(spec.shape) for spec in made.layout.table]
    for row, tensor in enumerate(tensors):
        for block, piece in made.layout.pieces_of(row):
            state = saved[block.index][0]
            ahead = torch.add(state.weights, state.slots["sum"], alpha=-0.02 * 0.9)
            part = ahead[piece.block_offset : piece.block_offset + piece.length]
            tensor.view(-1)[piece.tensor_offset : piece.tensor_offset + piece.length] = part
    return tensors


RULES: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "plain": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "heavy-ball": lambda m: heavy(m, 0.01),
    "nag": lambda m: heavy(m, 0.01),
    "multi-momentum": lambda m: heavy(m, 0.02),
    "dana-zero": lambda m: heavy(m, 0.02),
    "dana-slim": lambda m: heavy(m, 0.02),
    "dana-dc": lambda m: heavy(m, 0.02),
    "dc-asgd": lambda m: heavy(m, 0.01),
    "gap-aware": lambda m: heavy(m, 0.02),
    "gap-aware-dana": lambda m: heavy(m, 0.02),
    "lr-over-lag": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "adam-async": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    "ftrl": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "delayed-nesterov": lambda m: heavy(m, 0.03),
}


QUICK = ("ftrl", "gap-aware-dana")
"""State of the shard, and of each worker."""


@pytest.mark.parametrize("rule", rest_rotates(RULES, QUICK))
def test_every_rule_learns_in_a_job(tmp_path: Path, rule: str) -> None:
    """With three workers, and `state_dict` holds what the script's optimizer would have of it."""
    before = whole_loss(build())
    with serving(tmp_path, workers=3, shards=2, mode="async", update_rule=rule) as shards:
        workers = []
        for rank in range(3):
            model = build()
            workers.append(Worker(shards, rank, model, RULES[rule](model), overlap=False))
        told: dict[int, dict[str, Any]] = {}

        def act(worker: Worker) -> None:
            learn(worker)
            told[worker.rank] = worker.optimizer.state_dict()

        all_well(workers, act)
    assert all(whole_loss(worker.model) < 0.6 * before for worker in workers)
    shown = {"heavy-ball", "nag", "dc-asgd", "gap-aware", "delayed-nesterov"}
    keys = {"momentum_buffer"} if rule in shown else {"step", "exp_avg", "exp_avg_sq"} if rule == "adam-async" else set()
    assert all(set(entry) == keys for entry in told[0]["state"].values()) and bool(told[0]["state"]) is bool(keys)
    RULES[rule](build()).load_state_dict(told[0])


SLIM = {"mode": "async", "update_rule": "dana-slim"}


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
    for module in (local_updates, compression):
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
