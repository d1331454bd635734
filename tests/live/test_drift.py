"""Workers that come apart are told of within one checkpoint: each way, with real shards and the tensor and cause that are named.

- A script that writes into its parameters between two steps, over both transports.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from psjob import contract
from psjob.process.config import LocalConfig
from psjob.protocol.coordinator.consistency import Drift
from tests.live.live_shards import NEVER, Shards, Worker, all_well, serving
from tests.support.soaking import rotating

pytestmark = pytest.mark.usefixtures("last_words")

STEPS = 48
Act = Callable[[Worker, int], None]


class Net(torch.nn.Module):
    """Trained, frozen, and with buffers: statistics of its batches, and a codebook that forward writes."""

    def __init__(self, frozen: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.body, self.norm = torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4)
            torch.manual_seed(2 + frozen)
            self.stem = torch.nn.Linear(4, 4).requires_grad_(False)
        self.codebook: torch.Tensor
        self.register_buffer("codebook", torch.zeros(4))
        self.ema = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.stem(self.norm(self.body(x)))
        if self.ema:
            self.codebook.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return y


def nothing(worker: Worker, step: int) -> None:
    """The script does nothing beside its steps."""


def odd(act: Callable[[Worker, int], None], at: int = 5) -> Act:
    """Worker 1 alone does it, after step `at`."""

    def done(worker: Worker, step: int) -> None:
        if worker.rank == 1 and step == at:
            act(worker, step)

    return done


def write(worker: Worker, _step: int) -> None:
    with torch.no_grad():
        worker.model.body.weight[0, 0] += 0.5  # type: ignore[union-attr, index]


def load(worker: Worker, _step: int) -> None:
    worker.model.load_state_dict(Net(7).state_dict() | {"body.bias": torch.ones(4)})


def drop(worker: Worker, _step: int) -> None:
    """DropConnect by hand, by each worker's own random numbers."""
    mask = torch.rand(4, 6, generator=torch.Generator().manual_seed(_step * 10 + worker.rank)) > 0.1
    worker.model.body.weight.data.mul_(mask)  # type: ignore[union-attr, operator]


def decay(worker: Worker, _step: int) -> None:
    for p in worker.model.body.parameters():  # type: ignore[union-attr]
        p.data.mul_(1 - 0.01 * (1 + worker.rank))


def plateau(worker: Worker, step: int) -> None:
    if step == 0:
        worker.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(worker.optimizer, patience=2)  # type: ignore[attr-defined]
    worker.scheduler.step(1.0 - 0.01 * step * (1 - worker.rank))  # type: ignore[attr-defined]


def rate(worker: Worker, _step: int) -> None:
    worker.optimizer.param_groups[0]["lr"] = 0.01


def state(worker: Worker, _step: int) -> None:
    worker.optimizer.state[worker.model.body.weight]["momentum_buffer"].zero_()  # type: ignore[union-attr, index]


def target(worker: Worker, step: int) -> None:
    """Frozen weights that follow the trained ones, by each worker's own batch."""
    worker.model.stem.weight.data.add_(0.01 * (1 + worker.rank))  # type: ignore[union-attr, operator]


def codebook(worker: Worker, _step: int) -> None:
    worker.model.ema = True  # type: ignore[assignment]


def apart(worker: Worker, step: int) -> None:
    """A loss with weights of its own, and an optimizer of its own, which nobody has attached."""
    if step == 0:
        worker.loss = torch.nn.Linear(4, 1)  # type: ignore[attr-defined]
        with torch.no_grad():
            worker.loss.weight.fill_(0.5)  # type: ignore[attr-defined]
            worker.loss.bias.fill_(0.5)  # type: ignore[attr-defined]
        worker.second = torch.optim.Adam(worker.loss.parameters())  # type: ignore[attr-defined]
        worker.watch = worker.job.unattached.watch()  # type: ignore[attr-defined]
    worker.loss(batch(worker, step)[:, :4]).sum().backward()  # type: ignore[attr-defined]
    worker.second.step()  # type: ignore[attr-defined]
    if step == STEPS - 1:
        worker.watch.remove()  # type: ignore[attr-defined]


def unfrozen(worker: Worker, step: int) -> None:
    """A second phase: layers that were frozen, by an optimizer of their own."""
    if step == 0:
        worker.second = torch.optim.SGD(worker.model.stem.requires_grad_().parameters(), lr=0.1)  # type: ignore[attr-defined, union-attr]
        worker.watch = worker.job.unattached.watch()  # type: ignore[attr-defined]
    elif worker.model.stem.weight.grad is not None:  # type: ignore[union-attr]
        worker.second.step()  # type: ignore[attr-defined]
        worker.second.zero_grad()  # type: ignore[attr-defined]
    if step == STEPS - 1:
        worker.watch.remove()  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Way:
    """`act` runs after each step; `said` is part of what is told of weights, or of buffers."""

    said: str
    act: Act = nothing
    update_at: str | None = "worker"
    frozen: tuple[int, int] = (0, 0)
    buffers: bool = False
    mode: str = "sync"


WAYS = {
    "own rate": Way("learning rate is 0.01 on worker 1 and 0.1 on worker 0", odd(rate)),
    "own rate, the shards step": Way("different steps after step 16: learning rate is 0.01 on worker 1 and 0.1", odd(rate), update_at=None),
    "plateau on its own loss": Way("learning rate is ", plateau),
    "own weight decay": Way("parameter body.weight and 1 more of worker 1 is not that of worker 0", decay),
    "dropout of weights": Way("parameter body.weight", drop),
    "written by hand": Way("parameter body.weight of worker 1 is not that of worker 0", odd(write, STEPS - 1)),
    "other weights loaded": Way("and 3 more of worker 1", odd(load)),
    "optimizer state": Way("worker 1 is not that of worker 0; the script of one of them", odd(state)),
    "frozen with other seeds": Way("weights differ at the beginning: frozen parameter stem.weight", frozen=(0, 1)),
    "frozen with other seeds, async": Way("at the beginning: frozen parameter stem.weight", update_at=None, frozen=(0, 1), mode="async"),
    "frozen with other seeds, local": Way("at the beginning: frozen parameter stem.weight", update_at=None, frozen=(0, 1), mode="local"),
    "frozen, written": Way("frozen parameter stem.weight of worker 1", target, update_at=None),
    "not attached": Way("of Adam of worker 1 is not that of worker 0; an optimizer that was not attached steps it (Adam)", apart),
    "a second phase": Way("an optimizer that was not attached steps it (SGD)", unfrozen, update_at=None),
    "codebook": Way("buffer codebook of worker 1 and of worker 0", codebook, buffers=True),
}
COMMON = {"own rate", "frozen with other seeds", "not attached", "codebook"}
"""Run each time."""


def batch(worker: Worker, step: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * worker.rank + step))


def train(folder: Path, way: Way, checkpoint: int | None = None) -> Drift:
    """What shard 0 found."""
    options: dict[str, Any] = {"mode": way.mode, "update_at": way.update_at}
    if way.mode == "local":
        options["local"] = LocalConfig(inner_steps=4)
    with serving(folder, checkpoint=replace(NEVER, every_steps=checkpoint), **options) as shards:
        nets = [Net(number) for number in way.frozen]
        workers = [
            Worker(
                shards, rank, net, torch.optim.SGD([*net.body.parameters(), *net.norm.parameters()], lr=0.1, momentum=0.9), overlap=False
            )
            for rank, net in enumerate(nets)
        ]

        def script(worker: Worker) -> None:
            for step in range(STEPS):
                worker.optimizer.zero_grad()
                worker.model(batch(worker, step)).pow(2).mean().backward()
                worker.optimizer.step()
                way.act(worker, step)

        all_well(workers, script)
        return found(shards)


def found(shards: Shards) -> Drift:
    coordinator = shards.servers[0].coordinator
    assert coordinator is not None
    return coordinator.machine.state.progress.drift


@pytest.mark.timeout(60)
@pytest.mark.parametrize("way", [pytest.param(way, id=name) if name in COMMON else rotating(way, id=name) for name, way in WAYS.items()])
def test_each_way_of_coming_apart_is_told(tmp_path: Path, way: Way) -> None:
    drift = train(tmp_path, way)
    said, other = (drift.buffers, drift.weights) if way.buffers else (drift.weights, drift.buffers)
    assert said is not None and way.said in said, (drift.weights, drift.buffers)
    assert other is None


@pytest.mark.timeout(60)
def test_a_model_that_one_worker_gives_other_weights_at_its_end_is_no_drift(tmp_path: Path) -> None:
    """The best or the mean ones, to evaluate them: the job's weights lie on the shards."""
    drift = train(tmp_path, Way("", odd(load, STEPS - 1), update_at=None))
    assert (drift.weights, drift.buffers) == (None, None)


def same_write(worker: Worker, step: int) -> None:
    """What all do alike is no difference, nor are the statistics of each worker's own batches."""
    if worker.job.steps_alone:
        worker.model.body.weight.data.mul_(0.99)  # type: ignore[union-attr, operator]
    worker.model.stem.weight.data.lerp_(worker.model.body.weight[:, :4].detach(), 0.01)  # type: ignore[union-attr, index, arg-type]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("mode", "update_at"),
    [("sync", "worker"), rotating("sync", None), rotating("local", None), rotating("async", None), rotating("softsync", None)],
)
def test_what_all_do_alike_is_no_drift(tmp_path: Path, mode: str, update_at: str | None) -> None:
    way = Way("", same_write if mode == "sync" else nothing, update_at, mode=mode)
    drift = train(tmp_path, way, checkpoint=8)
    assert (drift.weights, drift.buffers) == (None, None)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 1))


def started(shards: Shards, model: nn.Module) -> Worker:
    return Worker(shards, 0, model, torch.optim.SGD(model.parameters(), lr=0.1), overlap=False)


def step(worker: Worker) -> None:
    worker.optimizer.zero_grad()
    worker.model(torch.ones(4, 64) * torch.arange(4.0)[:, None]).sum().backward()
    worker.optimizer.step()


@pytest.mark.parametrize("transport", ["tcp", "auto"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_it_is_refused_by_name(tmp_path: Path, transport: str, mode: str, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(tmp_path, workers=1, mode=mode, transport=transport) as shards:
        worker = started(shards, build())

        worker.attach()
        step(worker)
        step(worker)
        worker.model.get_parameter("2.weight").data.clamp_(-0.001, 0.001)
        with pytest.raises(SystemExit) as ended:
            step(worker)
        assert ended.value.code == contract.EXIT_REFUSED
        worker.die()
        said = capfd.readouterr().err
        assert "parameter 2.weight was changed by hand after step 2 (a value was" in said
        assert "put them back before a step, or set training.updateAt: worker" in said


@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_what_is_put_back_is_no_change(tmp_path: Path, transport: str) -> None:
    with serving(tmp_path, workers=1, transport=transport) as shards:
        model, plain = build(), build()
        worker = started(shards, model)

        def act(worker: Worker) -> None:
            average = copy.deepcopy(model)
            for number in range(4):
                step(worker)
                pairs = list(zip(model.parameters(), average.parameters(), strict=True))
                if number % 2:
                    for p, kept in pairs:
                        p.data, kept.data = kept.data, p.data
                    model(torch.ones(2, 64))
                    for p, kept in pairs:
                        p.data, kept.data = kept.data, p.data
                else:
                    there = copy.deepcopy(model.state_dict())
                    model.load_state_dict(average.state_dict())
                    model.load_state_dict(there)

        all_well([worker], act)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(4):
        reference.zero_grad()
        plain(torch.ones(4, 64) * torch.arange(4.0)[:, None]).sum().backward()
        reference.step()
    for p, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(p, wanted, atol=1e-6)


def test_a_step_that_was_interrupted_is_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path, workers=1) as shards:
        worker = started(shards, build())

        def act(worker: Worker) -> None:
            step(worker)
            push = type(worker.session.exchange).push

            def interrupted(*given: object, **named: object) -> None:
                push(*given, **named)  # type: ignore[arg-type]
                raise KeyboardInterrupt

            with monkeypatch.context() as patch:
                patch.setattr(type(worker.session.exchange), "push", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    step(worker)
            step(worker)

        all_well([worker], act)


def test_after_the_last_step_it_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(tmp_path, workers=1) as shards:
        worker = started(shards, build())

        def act(worker: Worker) -> None:
            step(worker)
            worker.model.get_parameter("0.weight").data.zero_()

        all_well([worker], act)
    assert "parameter 0.weight was changed by hand after the last step (a value was" in capfd.readouterr().err
