"""What attach refuses, with which words; outside a job it changes nothing."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps
from psjob import contract, rules
from psjob.api import attach as attaching
from psjob.api import data
from psjob.api.attachable import Pair
from psjob.api.rule_choice import as_it_runs, chosen_rule
from psjob.api.training_job import TrainingJob
from psjob.process.config import Config, ProcessContext
from psjob.protocol.worker import events as e
from psjob.worker import connection
from tests.live.live_shards import NEVER, Worker, all_well, serving
from tests.support.runkeys import key_file


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def sgd(of: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(of.parameters(), lr=0.1)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Attach as worker 0 of a job whose shards nobody has started; the sentence it ends with."""

    def attach(
        what: nn.Module, optimizer: Any, config: dict[str, Any] | None = None, env: dict[str, str] | None = None, **stateful: Any
    ) -> str:
        checkpoint = {"intervalSeconds": 30, "everySteps": None, "keep": 3, "disabled": False, "resumeFrom": None}
        whole = {
            "format": contract.CONFIG_FORMAT, "job": "job", "run": "r", "specHash": "0", "mode": "sync", "seed": 0, "updateAt": None,
            "workers": 2, "shards": [{"host": "127.0.0.1", "port": 1, "statusPort": 1}], "checkpoint": checkpoint,
            "successPolicy": "AllWorkers", "shardTimeoutSeconds": 10, "connectSeconds": 5,
        } | (config or {})  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(whole))
        place = {
            contract.ENV_ROLE: "worker", contract.ENV_INDEX: "0", contract.ENV_RUN: "r", contract.ENV_START: "1",
            contract.ENV_CONFIG: str(tmp_path / "config.json"), contract.ENV_TERMINATION_LOG: str(tmp_path / "end"),
            contract.ENV_KEYS: key_file(tmp_path, "worker", 0),
        } | (env or {})  # fmt: skip
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            ps.attach(what, optimizer, **stateful)
        assert ended.value.code == contract.EXIT_REFUSED
        sentence: str = json.loads((tmp_path / "end").read_text())["error"]
        return sentence

    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py"])
    monkeypatch.setattr(attaching, "current", None)
    monkeypatch.setattr(attaching, "_pending", [])
    monkeypatch.setattr(attaching, "_wanted", {})
    return attach


def test_outside_a_job_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(contract.ENV_ROLE, raising=False)
    monkeypatch.setattr(data, "_begun", 0)  # this process may have made passes for other tests
    mine = model()
    optimizer = sgd(mine)
    kind = type(optimizer)
    assert ps.attach(mine, optimizer) == (mine, optimizer) and type(optimizer) is kind
    assert (ps.step(), ps.epoch()) == (0, 0)
    loader = DataLoader(TensorDataset(torch.arange(3)))
    assert [int(x) for (x,) in ps.shard(loader)] == [0, 1, 2]
    ps.report(loss=1.0)
    ps.checkpoint()
    ps.wait()


@pytest.mark.parametrize("words", [{"overlap": True}, {"name": "generator"}])
def test_outside_a_job_nothing_hangs_on_a_model(monkeypatch: pytest.MonkeyPatch, words: dict[str, Any]) -> None:
    monkeypatch.delenv(contract.ENV_ROLE, raising=False)
    mine = model()
    optimizer = sgd(mine)
    assert ps.attach(mine, optimizer, **words) == (mine, optimizer)
    assert not mine._forward_pre_hooks and not mine._forward_hooks and not optimizer._optimizer_step_pre_hooks


def refused_alone(*given: Any, **words: Any) -> str:
    """What attach raises outside a job."""
    with pytest.raises(ps.Refused) as refused:
        ps.attach(*given, **words)
    return str(refused.value)


def lbfgs(of: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(of.parameters())


ALONE: dict[str, tuple[Callable[[], tuple[Any, ...]], dict[str, Any]]] = {
    "torch Module": (lambda: (3, None), {}),
    "in no group of the optimizer": (lambda: ((mine := model()), sgd(mine[0])), {}),
    "not in the model given to attach": (lambda: ((mine := model())[0], sgd(mine)), {}),
    "LBFGS evaluates the loss several times": (lambda: ((mine := model()), lbfgs(mine)), {}),
    "has max_norm 1": (lambda: ((mine := nn.Embedding(4, 2, max_norm=1.0)), sgd(mine)), {}),
    "view_as_real": (lambda: ((mine := nn.Linear(2, 2, dtype=torch.complex64)), sgd(mine)), {}),
    "must be a word of letters": (lambda: ((mine := model()), sgd(mine)), {"name": "the generator"}),
    "has no state_dict and load_state_dict": (lambda: ((mine := model()), sgd(mine)), {"scheduler": 3}),
    "later=…) takes a list": (lambda: ((mine := model()), sgd(mine)), {"later": 3}),
}


@pytest.mark.parametrize("words", ALONE)
def test_outside_a_job_it_refuses_the_same(words: str, job: Callable[..., str]) -> None:
    make, stateful = ALONE[words]
    assert words in refused_alone(*make(), **stateful)
    assert words in job(*make(), **stateful)


def test_outside_a_job_a_second_attach_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other, third = model(), model(), model()
    ps.attach(mine, sgd(mine))
    assert "attach was called twice; give each model a name" in refused_alone(other, sgd(other))
    assert "attach was called twice" in refused_alone(other, sgd(other), name="other")
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    ps.attach(mine, sgd(mine))
    ps.attach(mine, sgd(mine), name="a")
    monkeypatch.delattr(sys, "ps1")
    assert "name='a') was called twice" in refused_alone(other, sgd(other), name="a")
    ps.attach(other, torch.optim.Adam(other.parameters()), name="b")
    mine(torch.ones(1, 3)).sum().backward()
    assert "attach after a, b were in use" in refused_alone(third, sgd(third), name="c")


@pytest.mark.parametrize("words", [["python"], ["python", "-"], ["python", "-i"]])
def test_a_script_that_could_not_be_started_again(job: Callable[..., str], monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.setattr(sys, "orig_argv", words)
    mine = model()
    assert "save it to a file and run `python train.py`" in job(mine, sgd(mine))


@pytest.mark.parametrize("words", [["python", "train.py"], ["python", "-m", "pkg.train"], ["python", "-u", "train.py", "--lr", "1"]])
def test_scripts_and_modules_can_be_started_again(job: Callable[..., str], monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    """Told by the next refusal that comes."""
    monkeypatch.setattr(sys, "orig_argv", words)
    assert "torch Module" in job(3, None)  # type: ignore[arg-type]


def test_attach_twice(job: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    mine = model()
    monkeypatch.setattr(attaching, "_pending", [Pair("", mine, sgd(mine))])
    assert "attach was called twice" in job(mine, sgd(mine))


def test_models_and_optimizers_that_do_not_fit(job: Callable[..., str]) -> None:
    mine, other = model(), model()
    assert "in no group of the optimizer" in job(mine, torch.optim.SGD(mine[0].parameters(), lr=0.1))
    assert "parameter 1.weight" in job(mine, torch.optim.SGD(mine[0].parameters(), lr=0.1))
    assert "not in the model given to attach" in job(mine, torch.optim.SGD([*mine.parameters(), *other.parameters()], lr=0.1))
    used = torch.optim.Adam(mine.parameters())
    for p in mine.parameters():
        p.grad = torch.zeros_like(p)
    used.step()
    assert "holds state from steps before attach" in job(mine, used)


def test_groups_that_come_later_are_told_of_at_attach(job: Callable[..., str]) -> None:
    mine = model()
    head = torch.optim.SGD(mine[1].parameters(), lr=0.1)
    assert "takes a list" in job(mine, head, later=mine[0])
    assert "entry 0 is int" in job(mine, head, later=[3])
    assert "entry 0 has a parameter of shape (2, 4) that is in a group already" in job(mine, head, later=[mine[1]])
    assert "entry 1 has a parameter of shape (4, 3)" in job(mine, head, later=[mine[0], mine[0].parameters()])
    assert "leave overlap out" in job(mine, head, later=[mine[0]], overlap=True)


def test_only_the_group_that_comes_next_is_added(tmp_path: Path) -> None:
    with serving(tmp_path, workers=1, shards=1) as shards:
        mine = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
        mine[:2].requires_grad_(False)
        worker = Worker(shards, 0, mine, torch.optim.SGD(mine[2].parameters(), lr=0.1), later=[mine[0], mine[1].parameters()])

        def act(worker: Worker) -> None:
            before = [p.clone() for p in mine.parameters()]
            mine.requires_grad_(True)
            for added, group in enumerate((None, mine[0], mine[1])):
                if group is not None:
                    worker.optimizer.add_param_group({"params": group.parameters(), "lr": 0.2})
                worker.optimizer.zero_grad()
                mine(torch.ones(1, 3)).sum().backward()
                worker.optimizer.step()
                moved = [not torch.equal(was, p) for was, p in zip(before, mine.parameters(), strict=True)]
                assert moved == [added > 0] * 2 + [added > 1] * 2 + [True] * 2
            assert [group["lr"] for group in worker.optimizer.param_groups] == [0.1, 0.2, 0.2]

        all_well([worker], act)


def test_a_frozen_parameter_needs_no_group(tmp_path: Path) -> None:
    """It is no parameter of the job; the others are trained."""
    with serving(tmp_path, workers=1, shards=1) as shards:
        mine = model()
        for p in mine[0].parameters():
            p.requires_grad_(False)
        before = mine[0].weight.clone()
        worker = Worker(shards, 0, mine, torch.optim.SGD(mine[1].parameters(), lr=0.1))

        def act(worker: Worker) -> None:
            worker.model(torch.ones(2, 3)).sum().backward()
            worker.optimizer.step()

        all_well([worker], act)
        assert [spec.name for spec in worker.session.layout.table] == ["1.weight", "1.bias"]
        assert torch.equal(mine[0].weight, before)


class Odd:
    """Its state cannot be written."""

    def state_dict(self) -> dict[str, Any]:
        return {"thing": object()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def test_what_could_not_be_put_back_is_named(job: Callable[..., str]) -> None:
    mine = model()
    assert "no state_dict and load_state_dict" in job(mine, sgd(mine), clock=3)
    assert "odd" in job(mine, sgd(mine), odd=Odd())


def test_optimizers_that_need_a_rule(job: Callable[..., str]) -> None:
    mine = model()
    sentence = job(mine, torch.optim.RMSprop(mine.parameters()), config={"mode": "async"})
    assert "RMSprop has no rule on the shards" in sentence and "use SGD, Adam, AdamW, NAdam or Adagrad" in sentence
    assert "training.updateAt is shard, but RMSprop" in job(mine, torch.optim.RMSprop(mine.parameters()), config={"updateAt": "server"})
    assert "training.mode async" in job(mine, sgd(mine), config={"mode": "async", "updateAt": "worker"})
    sentence = job(mine, torch.optim.RMSprop(mine.parameters()), config={"delay": 1})
    assert "RMSprop has no rule on the shards, and training.delay 1 needs one; use SGD, Adam," in sentence
    assert "NAdam or Adagrad, or leave delay out" in sentence
    sentence = job(mine, torch.optim.RMSprop(mine.parameters()), config={"mode": "async", "delay": 1})
    assert "training.mode async needs one" in sentence, "without its delay too"


@pytest.mark.parametrize(("start", "rewinds", "runs"), [(1, 0, "async"), (2, 0, "sync"), (1, 1, "sync")])
def test_who_comes_back_to_a_job_whose_workers_step(start: int, rewinds: int, runs: str) -> None:
    """The config asked for another mode after the job had begun: it stays sync, and nobody who comes back is refused."""
    config = Config("j", "r", "0", "async", 0, None, 4, (), NEVER, "AllWorkers", 10.0, 60.0)
    here = ProcessContext("worker", 0, "r", start, 1, rewinds, "worker-0", config, None, None, 0)
    mine = model()
    assert as_it_runs(here, torch.optim.RMSprop(mine.parameters())).config == replace(config, mode=runs)
    assert as_it_runs(here, sgd(mine)) == here


def test_what_a_rule_of_the_manifest_goes_with(job: Callable[..., str]) -> None:
    mine = model()
    named = {"mode": "async", "updateRule": "dana-slim"}
    heavy = torch.optim.SGD(mine.parameters(), lr=0.1, momentum=0.9)
    for other in (sgd(mine), torch.optim.Adam(mine.parameters()), torch.optim.SGD(mine.parameters(), momentum=0.9, dampening=0.1)):
        sentence = job(mine, other, config=named)
        assert "updateRule dana-slim takes lr, momentum and weight_decay from torch.optim.SGD with a momentum" in sentence
        assert f"the script has {type(other).__name__}" in sentence
    assert "the script has SGD with momentum 0.9, dampening 0.1, maximize 0" in sentence
    assert "updateRule 'nog'; it is one of plain, heavy-ball, nag" in job(mine, heavy, config={**named, "updateRule": "nog"})
    still = torch.optim.SGD(mine.parameters(), lr=0.0)
    assert "rule ftrl: lr is above 0, since it divides, got 0" in job(mine, still, config={**named, "updateRule": "ftrl"})
    large = nn.Linear(8000, 8000, bias=False)
    sentence = job(large, torch.optim.SGD(large.parameters(), lr=0.1, momentum=0.9), config=named)
    assert "updateRule dana-slim keeps 256000000 bytes that go with each worker's resume record, at most 234881024 fit" in sentence
    assert "the rule changes them before; leave overlap out" in job(mine, heavy, config=named, overlap=True)


ADAM, NESTEROV = torch.optim.Adam, partial(torch.optim.SGD, momentum=0.9, nesterov=True)
PLAIN, HEAVY = partial(torch.optim.SGD, lr=0.1), partial(torch.optim.SGD, momentum=0.9)


@pytest.mark.parametrize(
    ("rule", "optimizer", "said"),
    [
        (
            "plain",
            HEAVY,
            "takes lr and weight_decay from torch.optim.SGD without momentum and maximize; the script has SGD with momentum 0.9",
        ),
        (
            "nag",
            PLAIN,
            "takes lr, momentum and weight_decay from torch.optim.SGD with a momentum, without dampening and maximize; the script",
        ),
        ("dana-dc", ADAM, "takes lr, momentum and weight_decay from torch.optim.SGD with a momentum, without dampening and maximize; the"),
        ("dc-asgd", NESTEROV, "torch.optim.SGD without nesterov, dampening and maximize; the script has SGD with nesterov 1, dampening 0"),
        ("lr-over-lag", NESTEROV, "torch.optim.SGD without nesterov, dampening and maximize"),
        ("ftrl", HEAVY, "takes lr from torch.optim.SGD without momentum, weight_decay and maximize; the script has SGD with momentum 0.9"),
        ("adam-async", PLAIN, "beta1, beta2, eps, weight_decay, amsgrad and maximize from torch.optim.Adam; the script has SGD"),
        ("adam-async", torch.optim.AdamW, "from torch.optim.Adam; the script has AdamW"),
    ],
)
def test_which_optimizer_goes_with_a_rule(job: Callable[..., str], rule: str, optimizer: Any, said: str) -> None:
    mine = model()
    assert f"training.updateRule {rule} " in (sentence := job(mine, optimizer(mine.parameters()), {"mode": "async", "updateRule": rule}))
    assert said in sentence


@pytest.mark.parametrize(
    ("rule", "options", "said"),
    [
        ("dana-dc", {"lamda": 1.0}, "ruleOptions has lamda, which updateRule dana-dc does not take; it takes lam, decay and adaptive"),
        (
            "dana-dc",
            {"lr": 1.0},
            "ruleOptions has lr, which updateRule dana-dc does not take; that is the script's optimizer's; it takes lam",
        ),
        ("dana-zero", {"lam": 1.0}, "ruleOptions has lam, which updateRule dana-zero does not take; it takes none"),
        ("dc-asgd", {"adaptive": 0.5}, "ruleOptions: adaptive of updateRule dc-asgd is 0 or 1, got 0.5"),
        ("gap-aware", {"max_lr": float("inf")}, "ruleOptions: rule gap-aware: max_lr is a finite number, got inf"),
        ("gap-aware", {"average": 1.0}, "ruleOptions: rule gap-aware: average is 0 or more and below 1, got 1"),
    ],
)
def test_options_that_a_rule_does_not_take(job: Callable[..., str], rule: str, options: dict[str, float], said: str) -> None:
    mine = model()
    assert said in job(mine, HEAVY(mine.parameters()), {"mode": "async", "updateRule": rule, "ruleOptions": options})


def test_more_state_than_a_checkpoint_can_list_is_refused(job: Callable[..., str]) -> None:
    mine = nn.ParameterList([torch.zeros(4) for _ in range(20)])
    groups = [{"params": [p], "lr": 0.1} for p in mine]
    sentence = job(mine, HEAVY(groups), {"mode": "async", "updateRule": "dana-dc", "workers": 4000})
    assert "keeps 240000 tensors for 4000 workers and 20 blocks on the shards, at most 200000 can be listed in a checkpoint" in sentence


def test_where_the_numbers_of_a_rule_come_from() -> None:
    """From the script's optimizer, as it is at that moment; then from ruleOptions; then they are the rule's."""
    config = Config("j", "r", "0", "async", 0, None, 4, (), NEVER, "AllWorkers", 10.0, 60.0, update_rule="dc-asgd",
                    rule_options={"lam": 0.5, "adaptive": 0.0})  # fmt: skip
    mine = model()
    optimizer = torch.optim.SGD([{"params": mine[0].parameters(), "lr": 0.2}, {"params": mine[1].parameters()}], lr=0.1, weight_decay=0.01)
    choice = chosen_rule(optimizer, config)
    optimizer.param_groups[1]["lr"] = 0.05
    common = {"momentum": 0.0, "weight_decay": 0.01, "lam": 0.5, "adaptive": False, "decay": 0.95}
    assert choice.hyperparameters(optimizer) == [{"lr": 0.2, **common}, {"lr": 0.05, **common}]
    adam = torch.optim.Adam(mine.parameters())
    assert chosen_rule(adam, replace(config, update_rule="adam-async", rule_options={})).hyperparameters(adam)[0]["workers"] == 4


def test_every_number_of_a_rule_comes_from_somewhere() -> None:
    """The optimizer that goes with it has all that its options have not, but for the number of workers."""
    assert set(contract.UPDATE_RULES) <= set(rules.RULES)
    for name, options in contract.UPDATE_RULES.items():
        like = "adam" if name == "adam-async" else "sgd"
        rest = set(rules.named(name).hyperparameters) - set(rules.named(like).hyperparameters) - {"workers"}
        assert rest == set(options), name


def test_a_place_that_is_wrong_is_refused_whole(job: Callable[..., str]) -> None:
    mine = model()
    sentence = job(mine, sgd(mine), env={contract.ENV_INDEX: "7", contract.ENV_START: "x"})
    assert "PSJOB_INDEX is 7, this job has 2 workers" in sentence and "PSJOB_START is 'x'" in sentence
    assert "is of run" in job(mine, sgd(mine), config={"run": "other"})
    assert "format" in job(mine, sgd(mine), config={"format": 99})


@pytest.mark.parametrize("what", ["load_state_dict", "add_param_group"])
def test_what_cannot_be_done_after_attach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setenv(contract.ENV_TERMINATION_LOG, str(tmp_path / "end"))
    with serving(tmp_path, workers=1, shards=1) as shards:
        mine = model()
        worker = Worker(shards, 0, mine, sgd(mine))
        worker.attach()
        with pytest.raises(SystemExit) as ended:
            if what == "load_state_dict":
                worker.optimizer.load_state_dict({})
            else:
                worker.optimizer.add_param_group({"params": []})
    assert ended.value.code == contract.EXIT_REFUSED
    assert what in (tmp_path / "end").read_text()


def test_schedulers_and_clipping_work_on_the_attached_optimizer(tmp_path: Path) -> None:
    """The very object that the scheduler holds; its rate goes to the shards with each step."""
    with serving(tmp_path, workers=1, shards=2) as shards:
        mine = model()
        plain = model()
        plain.load_state_dict(mine.state_dict())
        pairs = []
        for each in (mine, plain):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.4)
            pairs.append((each, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)))
        worker = Worker(shards, 0, mine, pairs[0][1], schedule=pairs[0][2])

        def run(each: nn.Module, optimizer: Any, schedule: Any) -> None:
            for step in range(6):
                optimizer.zero_grad()
                each(torch.full((2, 3), float(step))).square().sum().backward()
                nn.utils.clip_grad_norm_(each.parameters(), 0.3)
                optimizer.step()
                schedule.step()

        all_well([worker], lambda worker: run(*pairs[0]))
        run(*pairs[1])
    assert pairs[0][1].param_groups[0]["lr"] == pairs[1][1].param_groups[0]["lr"] == 0.05
    for ours, theirs in zip(mine.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_a_link_has_one_thread_however_soon_its_first_dial_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two would displace each other's stream forever: a shard keeps one of each worker."""
    make, named = connection.supervise.thread, []

    def slow(target: Callable[..., None], name: str, *args: Any) -> threading.Thread:
        thread = make(target, name, *args)
        start = thread.start

        def begin() -> None:
            start()
            time.sleep(0.5)  # the dialler has failed, and been told to dial again, before its caller continues

        if name.startswith("link-"):
            named.append(name)
            monkeypatch.setattr(thread, "start", begin)
        return thread

    with serving(tmp_path, workers=1, shards=1) as shards:
        place = shards.place(0, 1)
        nobody = replace(place.config.shards[0], port=1)
        away = replace(place, config=replace(place.config, shards=(nobody,)))
        net = model()
        session = TrainingJob(away, (Pair("", net, sgd(net)),), {}, False).session
        monkeypatch.setattr(connection.supervise, "thread", slow)
        session.handle(e.JoinAsked())
        session.close(5.0)
    assert named == ["link-0"] and not any(each.alive for each in session.links)
