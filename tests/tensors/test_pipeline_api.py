"""`ps.pipeline` outside a job is plain torch for any cuts; inside one it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import psjob as ps
from psjob import contract
from psjob.api import attachable
from tests.support.runkeys import key_file
from tests.tensors.pipeline_models import NET_CUTS, ROW_CUTS, Net, net_loss, row, tokens

torch.set_num_threads(1)
LOSS = nn.functional.cross_entropy


def without_chance(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def trained(model: nn.Module, loss_fn: Any, cuts: Any, microbatches: int, batches: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    pipe = ps.pipeline(model, loss_fn, cuts=cuts, microbatches=microbatches, seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = pipe.step(x, y)
        assert loss.dim() == 0 and not loss.requires_grad
        losses.append(float(loss))
        optimizer.step()
    return losses, model.state_dict()


def same(one: Any, other: Any) -> bool:
    return one[0] == other[0] and all(torch.equal(one[1][name], other[1][name]) for name in one[1])


def test_one_stage_and_one_micro_batch_is_plain_torch() -> None:
    model, plain = without_chance(row()), without_chance(row())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x, y in tokens(3):
        optimizer.zero_grad()
        loss = LOSS(plain(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    assert same(trained(model, LOSS, (), 1, tokens(3)), (losses, plain.state_dict()))


def test_many_stages_and_micro_batches_add_up_to_the_batch() -> None:
    model, plain = without_chance(row()), without_chance(row())
    for one in (model, plain):
        one[4] = nn.Identity()  # type: ignore[operator] # statistics of BatchNorm are a micro-batch's own
    pipe = ps.pipeline(model, LOSS, cuts=ROW_CUTS[4], microbatches=5)
    x, y = tokens(1)[0]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    loss = pipe.step(x, y)
    expected = LOSS(plain(x), y)
    expected.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss, expected.detach())
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        torch.testing.assert_close(p.grad - 1, q.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("microbatches", [1, 3, 4])
def test_bits_are_the_same_for_any_cuts(microbatches: int) -> None:
    """Dropout, BatchNorm, an operation in place, a tied weight; and a batch of another size."""
    batches = [*tokens(2), *tokens(1, samples=9, seed=9)]
    one, *others = (trained(row(), LOSS, cuts, microbatches, batches) for cuts in ROW_CUTS.values())
    assert all(same(one, other) for other in others)


def test_bits_of_a_weight_that_stages_use_unevenly() -> None:
    """Floating-point sums depend on their order: four uses, in one stage, in two and in four."""
    found = []
    for cuts in ((), (3,), (2,), (1, 2, 3)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 12), *(nn.Sequential(nn.Tanh(), nn.Linear(12, 12)) for _ in range(3)))
        for block in model[1:]:
            block[1].weight = model[0].weight  # type: ignore[index]
        found.append(
            trained(model, LOSS, cuts, 3, [(torch.rand(32, 12, generator=torch.Generator().manual_seed(1)), torch.arange(32) % 12)] * 4)
        )
    assert all(same(found[0], other) for other in found[1:])


def test_bits_of_an_exported_model_with_several_inputs_of_changing_length() -> None:
    ids = [torch.randint(12, (8, length), generator=torch.Generator().manual_seed(length)) for length in (5, 5, 9)]
    batches = [({"ids": one, "mask": torch.ones(8, 8) * 0.5}, torch.arange(8)) for one in ids]
    found = []
    for cuts in (NET_CUTS[1], NET_CUTS[2]):
        model = Net()
        model.layers[2].linear.weight.requires_grad_(False)
        found.append(trained(model, net_loss, cuts, 2, batches))
    assert same(*found)
    assert torch.equal(found[0][1]["layers.2.linear.weight"], Net().layers[2].linear.weight)


def test_tuples_are_arguments_and_structures_may_be_nested() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, given: tuple[torch.Tensor, dict[str, torch.Tensor]]) -> Any:
            return {"both": [self.linear(given[0]), given[1]["x"]]}

    class Sum(nn.Module):
        def forward(self, given: Any) -> Any:
            return (sum(pytree.tree_leaves(given)), given["both"][0])

    found = []
    for cuts in ((), (1,)):
        torch.manual_seed(0)
        model = nn.Sequential(Pair(), Sum())
        pipe = ps.pipeline(model, lambda output, y: (output[0] - y["to"]).square().mean() + output[1].mean(), cuts=cuts, microbatches=2)
        x = (torch.ones(4, 2), {"x": torch.ones(4, 2)})
        loss = pipe.step((x,), {"to": torch.zeros(4, 2)})
        with pytest.raises(ValueError, match=r"an nn\.Sequential takes one argument without a name, and was given 2; give it a tensor"):
            pipe.step(x, {"to": torch.zeros(4, 2)})
        assert pipe.evaluate((x,))[1].shape == (4, 2)
        found.append((float(loss), model[0].linear.weight.grad))
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])


def test_evaluate_runs_without_gradients_and_puts_modes_back() -> None:
    model = row()
    model[6].eval()
    pipe = ps.pipeline(model, LOSS, cuts=[5])
    output = pipe.evaluate(tokens(1)[0][0])
    assert not output.requires_grad and model.training and not model[6].training and model[2].training
    assert torch.equal(output, pipe.evaluate((tokens(1)[0][0],))) and int(model[4].num_batches_tracked) == 0


def test_random_bits_go_on_where_the_state_says() -> None:
    def losses(skip: int) -> list[float]:
        pipe = ps.pipeline(row(), LOSS, cuts=[5], seed=1)
        pipe.load_state_dict({"steps": skip})
        found = [float(pipe.step(*tokens(1)[0])) for _ in range(3)]
        assert pipe.state_dict() == {"steps": skip + 3}
        return found

    first = losses(0)
    assert losses(0) == first and losses(1)[:1] != first[:1] and len(set(first)) == 3
    torch.manual_seed(77)
    state = torch.get_rng_state()
    losses(0)
    torch.manual_seed(77)  # `row` seeds torch
    assert torch.equal(torch.get_rng_state(), state)


def test_an_error_in_a_step_leaves_nothing_open() -> None:
    model = row()
    pipe = ps.pipeline(model, LOSS, cuts=[5], microbatches=2)
    x, y = tokens(1)[0]
    with pytest.raises(IndexError):
        pipe.step(x, y + 100)
    pipe.step(x, y)
    assert model[3].weight.grad is not None


def test_weights_and_modules_may_move_and_change_between_steps() -> None:
    model = row()
    pipe = ps.pipeline(model, LOSS, cuts=[5])
    x, y = tokens(1)[0]
    pipe.step(x, y)
    model.double()
    pipe.step(x, y)
    assert model[3].weight.grad is not None and model[3].weight.grad.dtype == torch.float64
    assert int(model[4].num_batches_tracked) == 2 and model[4].running_mean.dtype == torch.float64
    model[3].weight.requires_grad_(False)
    model.zero_grad()
    pipe.step(x, y)
    assert model[3].weight.grad is None and model[7].weight.grad is not None


def test_gradients_under_autocast_are_torchs() -> None:
    model, plain = (nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    x, y = torch.randn(4, 6), torch.arange(4) % 3
    with torch.autocast("cpu"):
        ps.pipeline(model, LOSS, cuts=[1]).step(x, y)
        loss = LOSS(plain(x), y)
    loss.backward()  # type: ignore[no-untyped-call]
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)


def test_sparse_gradients_are_added_as_torch_adds_them() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 4, sparse=True), nn.Linear(4, 12))
    pipe = ps.pipeline(model, LOSS, cuts=[1], microbatches=4)
    x = torch.arange(8)
    pipe.step(x, x)
    grad = model[0].weight.grad
    assert grad is not None and grad.is_sparse
    model[0].sparse = False
    model[0].weight.grad = None
    pipe.step(x, x)
    torch.testing.assert_close(grad.to_dense(), model[0].weight.grad)


@pytest.mark.parametrize(
    ("loss_fn", "says"),
    [
        (lambda output, y: output.sum(1) - y, r"loss_fn returned shape \(16,\), must be the mean loss as a tensor without dimensions"),
        (lambda output, y: 1.0, "loss_fn returned float, must be the mean loss"),
        (lambda output, y: output.detach().sum(), "the loss has no gradient: no parameter of the model that needs one leads to it"),
    ],
)
def test_losses_that_are_no_mean_are_refused(loss_fn: Any, says: str) -> None:
    pipe = ps.pipeline(row(), loss_fn, cuts=[5])
    with pytest.raises(ValueError, match=says):
        pipe.step(*tokens(1)[0])


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: ps.pipeline(row(), LOSS, cuts=["layer"]), "ps.pipeline: cut 'layer' is no module of Sequential; near are"),
        (lambda: ps.pipeline(row(), LOSS, microbatches=0), "ps.pipeline: microbatches is 0, must be 1 or more"),
        (lambda: ps.pipeline(print, LOSS), "ps.pipeline takes a torch Module, got builtin_function_or_method"),  # type: ignore[arg-type]
        (lambda: ps.pipeline(row(), Temperature()), "ps.pipeline: loss_fn has the parameter scale, which no stage would train"),
        (lambda: ps.pipeline(nn.Sequential(ps.Embedding(8, 2)), LOSS), "ps.pipeline: 0 keeps its rows on the shards"),
    ],
)
def test_what_cannot_be_a_pipeline_ends_with_a_sentence(call: Any, says: str) -> None:
    with pytest.raises(ps.Refused) as end:
        call()
    assert str(end.value).startswith(says)


def test_a_lazy_model_is_the_same_for_any_cuts() -> None:
    found = []
    for cuts in ROW_CUTS.values():
        with ps.lazy():
            model = row()
        assert model[3].weight.is_meta
        found.append(trained(model, LOSS, cuts, 2, tokens(2)))
    assert same(found[0], found[1]) and same(found[0], found[2])


def test_the_lines_beside_attach() -> None:
    """Three lines of a script change; `attach` takes what the pipeline has to remember."""
    attachable.forget()
    try:
        with ps.lazy():
            model = row()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        pipe = ps.pipeline(model, LOSS, cuts=[5], microbatches=3, seed=0)
        model, optimizer = ps.attach(model, optimizer, pipe=pipe)
        before = model[3].weight.detach().clone()
        for x, y in tokens(3):
            pipe.step(x, y)
            optimizer.step()
            optimizer.zero_grad()
        assert not torch.equal(before, model[3].weight) and pipe.state_dict() == {"steps": 3}
    finally:
        attachable.forget()


def test_a_job_without_stages_refuses_a_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A worker of a job says so before it asks anything of the job."""
    checkpoint = {"intervalSeconds": 30, "everySteps": None, "keep": 3, "disabled": False, "resumeFrom": None}
    config = {
        "format": contract.CONFIG_FORMAT, "job": "job", "run": "r", "specHash": "0", "mode": "async", "seed": 0, "updateAt": None,
        "workers": 2, "shards": [{"host": "127.0.0.1", "port": 1, "statusPort": 1}], "checkpoint": checkpoint,
        "successPolicy": "AllWorkers", "shardTimeoutSeconds": 10, "connectSeconds": 5,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    place = {
        contract.ENV_ROLE: "worker", contract.ENV_INDEX: "0", contract.ENV_RUN: "r", contract.ENV_START: "1",
        contract.ENV_CONFIG: str(tmp_path / "config.json"), contract.ENV_TERMINATION_LOG: str(tmp_path / "end"),
        contract.ENV_KEYS: key_file(tmp_path, "worker", 0),
    }  # fmt: skip
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end:
        ps.pipeline(row(), LOSS, cuts=[5])
    says = "ps.pipeline in a job without stages: give the manifest spec.stages, or call only ps.attach"
    assert end.value.code == contract.EXIT_REFUSED and f"psjob: {says} (test_pipeline_api.py:" in capsys.readouterr().err
    assert json.loads((tmp_path / "end").read_text())["error"].startswith(says)
