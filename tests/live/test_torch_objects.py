"""Ordinary torch objects in a job: what is taken trains as in one process, and what is not is refused by its name.

- A model that is attached again with another optimizer.
"""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import psjob as ps
from psjob import contract
from psjob.api import advice, attach
from psjob.api.attachable import Pair, joined_pairs
from psjob.api.recording import PlainState
from psjob.layout import packing
from psjob.process.config import CompressionConfig
from psjob.process.errors import Refused
from tests.live.live_shards import Worker, all_well, serving

pytestmark = pytest.mark.usefixtures("last_words")


def sgd(model: nn.Module, **words: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, **words)


def refused(model: nn.Module) -> str:
    with pytest.raises(ps.Refused) as caught:
        ps.attach(model, sgd(model))
    return str(caught.value)


class Held(nn.Module):
    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.weight = nn.Parameter(values)


@pytest.mark.timeout(60)
def test_tensors_without_values_of_their_own_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(contract.ENV_ROLE, raising=False)
    assert "parameter 0.weight has no shape yet: LazyLinear takes it from its first batch" in refused(nn.Sequential(nn.LazyLinear(2)))
    buffers = nn.Sequential(nn.Linear(1, 1), nn.LazyBatchNorm1d(affine=False))
    assert "buffer 1.running_mean has no shape yet: LazyBatchNorm1d" in refused(buffers)
    assert "parameter inner.weight is on the meta device" in refused(Held(torch.empty(2, device="meta")))
    assert "parameter inner.weight is an expanded view" in refused(Held(torch.ones(1).expand(3)))
    assert "a Parameter of layout sparse_coo" in refused(Held(torch.eye(2).to_sparse()))
    for odd, word in {
        torch.eye(2).to_sparse(): "self.adjacency = adjacency",
        torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8): "dtype qint8",
        torch.ones(2, dtype=torch.complex128): "torch.view_as_complex in forward",
        torch.empty(2, device="meta"): "Give it some before attach",
    }.items():
        (model := nn.Linear(1, 1)).register_buffer("odd", odd)
        assert "buffer odd " in (said := refused(model)) and word in said
    negative = torch.complex(torch.zeros(2), torch.ones(2)).conj().imag
    assert negative.is_neg() and "negative bit" in refused(Held(negative))


@pytest.mark.timeout(60)
def test_overlap_does_not_see_into_scripted_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(contract.ENV_ROLE, raising=False)
    model = nn.Sequential(scripted(), nn.Linear(3, 1))
    with pytest.raises(ps.Refused, match=r"does not go with modules of torch\.jit"):
        ps.attach(model, sgd(model), overlap=True)


@pytest.mark.timeout(60)
def test_a_frozen_parameter_may_be_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(contract.ENV_ROLE, raising=False)
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta").requires_grad_(False))
    ps.attach(model, torch.optim.SGD(model[0].parameters(), lr=0.1))


class Phase(nn.Module):
    """One angle a batch element; its gradient comes back from complex numbers, with torch's lazy negative bit."""

    def __init__(self) -> None:
        super().__init__()
        self.angles = nn.Parameter(torch.tensor([0.7, -0.4, 0.2]))
        self.register_buffer("turned", torch.polar(torch.ones(3), torch.arange(3.0)).conj())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.complex(torch.zeros_like(self.angles), self.angles)
        return (x * z.conj()).imag


class Renamed(nn.Module):
    """Its state_dict takes no arguments of torch's, and has names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.embed(x)).tanh()

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return OrderedDict((f"net.{name}", value) for name, value in super().state_dict().items())


class OwnWords(nn.Module):
    """What it says of itself is not what torch's Module says."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).tanh()  # type: ignore[no-any-return]

    def parameters(self) -> Any:  # type: ignore[override]
        return [{"params": [self.inner.weight], "lr": 0.2}, {"params": [self.inner.bias]}]

    def named_parameters(self, prefix: str = "") -> Any:  # type: ignore[override]
        return self.inner.named_parameters(prefix)


class WholeNumbers(nn.Module):
    """Parameters of whole numbers and bools, which are never trained, are in its optimizer too."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 3)
        self.order = nn.Parameter(torch.tensor([2, 0, 1]), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x)[:, self.order] * self.mask  # type: ignore[no-any-return]


def scripted() -> nn.Module:
    made: nn.Module = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    return made


def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(4):
        optimizer.zero_grad()
        model(torch.full((2, 3), 1.0 + step)).square().sum().backward()
        optimizer.step()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("transport", ["tcp", "auto"])
@pytest.mark.parametrize("build", [Phase, Renamed, OwnWords, WholeNumbers, scripted])
def test_it_trains_as_in_one_process(tmp_path: Path, build: Callable[[], nn.Module], transport: str) -> None:
    mine, plain = build(), build()
    with torch.no_grad():
        for ours, theirs in zip(packing.tensors(mine), packing.tensors(plain), strict=True):
            theirs.copy_(ours)
    with serving(tmp_path, workers=1, shards=2, transport=transport) as shards:
        all_well([Worker(shards, 0, mine, sgd(mine))], lambda worker: steps(worker.model, worker.optimizer))
    steps(plain, sgd(plain))
    for (_, ours), (_, theirs) in zip(
        packing.named_parameters(mine), packing.named_parameters(plain), strict=True
    ):  # the compiler of scripts chooses kernels as it likes
        torch.testing.assert_close(ours, theirs, rtol=1e-3 if build is scripted else 0, atol=0)
    for held, built in zip(mine.buffers(), plain.buffers(), strict=True):
        assert torch.equal(held.resolve_conj(), built.resolve_conj())


@pytest.mark.timeout(60)
def test_a_negative_gradient_through_a_codec(tmp_path: Path) -> None:
    mine = Phase()
    with serving(tmp_path, workers=1, shards=1, compression=CompressionConfig("fp16")) as shards:

        def act(worker: Worker) -> None:
            steps(worker.model, worker.optimizer)

        all_well([Worker(shards, 0, mine, sgd(mine))], act)
    plain = Phase()
    steps(plain, sgd(plain))
    torch.testing.assert_close(mine.angles, plain.angles, rtol=0.01, atol=0.01)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.RMSprop])
def test_the_scripts_default_device_is_nobodys_business(tmp_path: Path, optimizer: Any) -> None:
    """As `torch.set_default_device("cuda")`: what is made without a device lies elsewhere than in this host's memory."""
    mine = nn.Linear(3, 3)
    plain = copy.deepcopy(mine)
    with serving(tmp_path, workers=1, shards=1) as shards:
        batches = [torch.full((2, 3), float(number)) for number in range(3)]

        def run(model: nn.Module, made: torch.optim.Optimizer) -> None:
            for batch in batches:
                model(batch).square().sum().backward()
                made.step()
                made.zero_grad()

        def act(worker: Worker) -> None:
            with torch.device("meta" if optimizer is torch.optim.Adam else "cpu"):
                run(worker.model, worker.optimizer)

        all_well([Worker(shards, 0, mine, optimizer(mine.parameters()))], act)
    run(plain, optimizer(plain.parameters()))
    assert torch.equal(mine.weight, plain.weight)


@pytest.mark.timeout(60)
def test_names_may_be_words_of_torchs_modules() -> None:
    names = ["values", "training", "double", "items", "forward"]
    pairs = [Pair(name, model := nn.Linear(1, 1), sgd(model)) for name in names]
    whole, _ = joined_pairs(pairs)
    assert [name for name, _ in whole.named_parameters()] == [f"{name}.{p}" for name in names for p in ("weight", "bias")]
    assert whole.training is True and whole.trains
    assert not any(model.eval().training for model in whole.children()) and not whole.trains


def saved(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("kind", "words"), [(torch.optim.Adam, {}), (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.RMSprop, {})])
def test_whole_objects_are_saved_and_copied_as_torchs_own(tmp_path: Path, kind: Any, words: dict[str, Any]) -> None:
    mine = nn.Linear(3, 3)
    first = copy.deepcopy(mine)
    with serving(tmp_path, workers=1, shards=1) as shards:

        def act(worker: Worker) -> None:
            assert type(saved(worker.model)) is nn.Linear
            steps(worker.model, worker.optimizer)
            for there in (saved(worker.optimizer), copy.deepcopy(worker.optimizer)):
                assert type(there) is kind
                whole = worker.optimizer.state_dict()
                assert there.state_dict()["param_groups"] == whole["param_groups"]
                for row, state in whole["state"].items():
                    assert all(torch.equal(value, there.state_dict()["state"][row][name]) for name, value in state.items())
            loaded = saved({"model": worker.model, "optimizer": worker.optimizer})  # continues by itself
            steps(loaded["model"], loaded["optimizer"])
            steps(worker.model, worker.optimizer)
            torch.testing.assert_close(loaded["model"].weight, worker.model.weight)

        all_well([Worker(shards, 0, mine, kind(mine.parameters(), lr=0.01, **words))], act)
    assert not torch.equal(first.weight, mine.weight)


LOOKS: dict[str, Callable[[torch.optim.Optimizer, torch.Tensor], Any]] = {
    "read": lambda optimizer, p: optimizer.state[p]["exp_avg_sq"],
    "get": lambda optimizer, p: optimizer.state.get(p),  # type: ignore[attr-defined]
    "in": lambda optimizer, p: p in optimizer.state,
    "clear": lambda optimizer, p: optimizer.state.clear(),
    "set": lambda optimizer, p: setattr(optimizer, "state", {}),
    "write": lambda optimizer, p: optimizer.state.__setitem__(p, {}),
}


@pytest.mark.timeout(60)
def test_the_state_of_an_optimizer_on_the_shards_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(contract.ENV_TERMINATION_LOG, str(tmp_path / "end"))
    for look, act in LOOKS.items():
        (folder := tmp_path / look).mkdir()
        with serving(folder, workers=1, shards=1) as shards:
            mine = nn.Linear(3, 3)
            worker = Worker(shards, 0, mine, torch.optim.Adam(mine.parameters()))
            worker.attach()
            steps(mine, worker.optimizer)
            assert not list(worker.optimizer.state.items())
            with pytest.raises(SystemExit) as ended:
                act(worker.optimizer, mine.weight)
        assert ended.value.code == contract.EXIT_REFUSED, look
        assert "optimizer.state" in (said := (tmp_path / "end").read_text()) and "training.updateAt: worker" in said, look


@pytest.mark.timeout(60)
def test_groups_that_a_script_changes_by_itself_are_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes: dict[str, tuple[Callable[[list[dict[str, Any]]], Any], str]] = {
        "one less": (lambda groups: groups.pop(), "2 groups with 2 parameters were attached, and now there are 1 in 1"),
        "others": (lambda groups: groups[0].update(params=[nn.Parameter(torch.ones(3, 3))]), "now there are 2 in 2, some of which"),
    }
    for name, (change, said) in changes.items():
        (folder := tmp_path / name).mkdir()
        monkeypatch.setenv(contract.ENV_TERMINATION_LOG, str(folder / "end"))
        with serving(folder, workers=1, shards=1) as shards:
            mine = nn.Linear(3, 3)
            worker = Worker(shards, 0, mine, torch.optim.SGD([{"params": [p]} for p in mine.parameters()], lr=0.1))
            worker.attach()
            steps(mine, worker.optimizer)
            change(worker.optimizer.param_groups)
            with pytest.raises(SystemExit) as ended:
                steps(mine, worker.optimizer)
        assert ended.value.code == contract.EXIT_REFUSED and said in (folder / "end").read_text(), name


@pytest.mark.timeout(60)
def test_the_state_of_an_optimizer_on_the_worker_is_the_scripts(tmp_path: Path) -> None:
    mine = nn.Linear(3, 3)
    with serving(tmp_path, workers=1, shards=1, update_at="worker") as shards:

        def act(worker: Worker) -> None:
            steps(worker.model, worker.optimizer)
            assert set(worker.optimizer.state[mine.weight]) == {"step", "exp_avg", "exp_avg_sq"}

        all_well([Worker(shards, 0, mine, torch.optim.Adam(mine.parameters()))], act)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.arange(6.0).view(2, 3)).square().sum().backward()
    optimizer.step()


def first_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def second_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop([{"params": model[1].parameters()}, {"params": model[0].parameters(), "lr": 1e-4}], lr=1e-3)  # type: ignore[index]


def test_the_second_optimizer_takes_the_place_of_the_first(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(tmp_path, workers=1, update_at="worker") as shards:
        model, plain = build(), build()
        worker = Worker(shards, 0, model, first_of(model), overlap=False)
        worker.attach()
        for optimizer, alone in ((worker.optimizer, first_of(plain)), (second_of(model), second_of(plain))):
            if optimizer is not worker.optimizer:
                attach.check_phase(worker.job, optimizer, False, ())
                attach.begin_phase(worker.job, optimizer, {})
            for number in range(3):
                worker.edge(number)
                step(model, optimizer)
                step(plain, alone)
        for p, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p, wanted)
        kept = worker.job.records.kept["optimizer (worker side)"]
        assert isinstance(kept, PlainState) and kept.state_dict()["class"] == "RMSprop"
        with pytest.raises(Refused, match="SGD of 4 parameters was attached when the record was taken, and RMSprop of 4 is now"):
            kept.load_state_dict({**first_of(model).state_dict(), "class": "SGD"})
        with pytest.raises(SystemExit) as ended:
            step(model, worker.optimizer)
        assert ended.value.code == contract.EXIT_REFUSED
        worker.die()
        assert "SGD makes a step, and RMSprop was attached in its place; step that one" in capfd.readouterr().err


def test_what_no_phase_can_be_is_refused(tmp_path: Path) -> None:
    for folder in ("worker", "async"):
        (tmp_path / folder).mkdir()
    with serving(tmp_path / "worker", workers=1, update_at="worker") as shards:
        model = build()
        worker = Worker(shards, 0, model, torch.optim.SGD(model[1].parameters(), lr=0.1), overlap=False)  # type: ignore[index]
        with pytest.raises(Refused, match=r"a parameter that the first optimizer does not have: 0\.weight\. Make both optimizers first"):
            attach.check_phase(worker.job, first_of(model), False, ())
        worker.die()
    with serving(tmp_path / "async", workers=1, mode="async") as shards:
        worker = Worker(shards, 0, model, first_of(model), overlap=False)
        with pytest.raises(Refused, match=r"continues with SGD\. Change the numbers of its param_groups"):
            attach.check_phase(worker.job, second_of(model), False, ())
        worker.die()


def test_a_second_optimizer_that_nobody_attached_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(advice, "tell_once", lambda kind, sentence: told.append(sentence))
    with serving(tmp_path, workers=1) as shards:
        model = build()
        worker = Worker(shards, 0, model, first_of(model), overlap=False)
        worker.attach()
        watch = worker.job.unattached.watch()
        worker.edge(0)
        step(model, worker.optimizer)
        assert not told
        step(model, second_of(model))
        watch.remove()
        worker.die()
        assert "RMSprop was not given to attach, and steps parameters that the attached SGD trains (1.weight …)" in told[0]
