"""Training on the schedule: modes against what they are equal to, rules with their workers' halves, digits, the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from psjob import rules
from psjob.modes import Async, Backup, Batch, Bounded, LocalSGD, Mode, Push, Softsync, Sync, format_mode
from psjob.rules.base import BlockState, Hyperparameters
from psjob.simulate import digits64
from psjob.simulate.engine import Outage, WorkerSpeeds, simulate
from psjob.simulate.training import BATCH, SIZE, Digits, Fixed, Floats, Inner, Library, Quadratic, SimulatedTraining
from psjob.simulate.words import label, mode_of
from tests.support.simulated import asked

ARGV = ["-m", "psjob_client.cli.main", "simulate"]


UNEVEN = WorkerSpeeds(spread=0.6)


def trained(mode: Mode, rule: str = "plain", pushes: int = 200, library: Library = "numpy", **hyperparameters: float) -> SimulatedTraining:
    one = rules.named(rule)
    given: Hyperparameters = {**one.hyperparameters, "lr": 0.05, **hyperparameters}
    work = SimulatedTraining(Digits(3), one, lambda batches: given, library)
    simulate(mode, 5, UNEVEN, pushes, 1, work)
    return work


def test_no_staleness_is_sync_bit_for_bit() -> None:
    assert trained(Bounded(0), "nag").weights.tobytes() == trained(Sync(), "nag").weights.tobytes()


class Written(SimulatedTraining):
    """Writes down the gradients of each update."""

    updates: list[list[Floats]]

    def decide(self, batch: Batch, version: int) -> list[tuple[float, float]]:
        if batch.kept:
            self.updates.append([self._sent[push.worker, push.clock].grad for push in batch.kept])
        return super().decide(batch, version)


@pytest.mark.parametrize("mode", [Sync(), Backup(2), Softsync(2, by_staleness=False)], ids=repr)
def test_an_update_is_one_of_the_kept_gradients_alone(mode: Mode) -> None:
    """So backup workers and softsync are a run with batches of N over what was kept."""
    rule = rules.named("nag")
    hyperparameters: Hyperparameters = {**rule.hyperparameters, "lr": 0.05}
    work = Written(Digits(3), rule, lambda batches: hyperparameters)
    work.updates = []
    outcome = simulate(mode, 5, UNEVEN, 200, 1, work)
    state = rule.init(Digits(3).begin())
    for grads in work.updates:
        total = grads[0] + grads[1] if len(grads) > 1 else grads[0].copy()
        for grad in grads[2:]:
            total = total + grad
        rule.apply(state, total * np.float32(1 / len(grads)), hyperparameters)
    assert state.weights.tobytes() == work.weights.tobytes()
    assert outcome.updates == len(work.updates) > 30


def delayed(mode: Mode, speeds: WorkerSpeeds) -> SimulatedTraining:
    rule = rules.named("nag")
    given: Hyperparameters = {**rule.hyperparameters, "lr": 0.05}
    work = SimulatedTraining(Quadratic(3, 1.5), rule, lambda batches: given, delay=mode.delay)
    simulate(mode, 4, speeds, 4 * 30, 1, work)
    return work


def test_sync_with_a_delay_is_one_process_with_gradients_one_update_late() -> None:
    """At any speeds, and if workers come back: step c is of the weights after c - 1 updates. (A mean of four equal gradients is exact.)"""
    rule, problem = rules.named("nag"), Quadratic(3, 1.5)
    state, seen = rule.init(problem.begin()), [problem.begin()] * 2
    for _ in range(30):
        rule.apply(state, problem.gradient(seen[-2])[0], {**rule.hyperparameters, "lr": 0.05})
        seen.append(state.weights.copy())  # type: ignore[arg-type]
    for speeds in (WorkerSpeeds(), WorkerSpeeds(spread=0.9, up=40, down=300), WorkerSpeeds(up=9, outages=(Outage(1, 500, 900),))):
        assert delayed(Sync(1), speeds).weights.tobytes() == seen[-1].tobytes()
    assert delayed(Sync(), WorkerSpeeds()).weights.tobytes() != seen[-1].tobytes()


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_the_edge_of_stability_with_a_delay(momentum: float) -> None:
    """The roots of z² - (1 + μ) z + μ + lr · a are within 1 while lr · a < 1 - μ. Without a delay that is 2 (1 + μ)."""
    rule, edge, norms = rules.named("heavy-ball"), 1 - momentum, list[float]()
    for factor in (0.97, 1.03):
        given: Hyperparameters = {**rule.hyperparameters, "lr": factor * edge, "momentum": momentum, "weight_decay": 0.0}
        work = SimulatedTraining(Quadratic(1), rule, lambda batches, given=given: given, delay=1)
        simulate(Sync(1), 2, WorkerSpeeds(up=9), 2 * 3000, 0, work)
        norms.append(work.score())
    assert norms[0] < 0.2 and norms[1] > 5


def test_a_training_that_was_not_told_of_the_delay_says_so() -> None:
    work = SimulatedTraining(Quadratic(3), rules.named("plain"), lambda batches: {"lr": 0.1, "weight_decay": 0.0})
    with pytest.raises(ValueError, match=r"push 1 of worker 1 was computed on version 0, and versions .1. are held; delay is 0 here"):
        simulate(Sync(1), 2, WorkerSpeeds(), 20, work=work)


@pytest.mark.parametrize(("mode", "workers"), [("sync:delay=1", 4), ("async:delay=2", 4)])
def test_a_delay_costs_digits_little(mode: str, workers: int) -> None:
    """Momentum 0.9 in sync, none in async, which has several times the staleness."""
    rule, accuracy = rules.named("nag" if mode.startswith("sync") else "plain"), dict[str, float]()
    for word in (mode.partition(":")[0], mode):
        one = mode_of(word)
        given = digits64.rate_schedule(digits64.protocol_hyperparameters(rule, {}), workers)
        work = SimulatedTraining(Digits(0), rule, given, delay=one.delay)
        simulate(one, workers, WorkerSpeeds(up=50, down=50), digits64.PUSHES, 1000, work)
        accuracy[word] = work.score()
    assert accuracy[mode] == pytest.approx(accuracy[mode.partition(":")[0]], abs=0.01) and accuracy[mode] > 0.95


def test_softsync_divides_by_the_staleness() -> None:
    work = SimulatedTraining(Fixed(4, 1), rules.named("plain"), lambda batches: {"lr": 1.0, "weight_decay": 0.0})
    gradient = work.problem.gradient(work.weights)[0]
    for worker in (0, 1):
        work.begin(worker)
        work.push(Push(worker, 0, 0))
    work.decide(Softsync(2).takes([Push(0, 0, 0), Push(1, 0, 0)], frozenset(range(4)), 4) or Batch(), 4)
    np.testing.assert_allclose(work.weights, -gradient / 4, rtol=1e-6)


@pytest.mark.parametrize("rule", ["plain", "nag", "dana-zero"])
def test_numpy_and_torch_come_to_the_same(rule: str) -> None:
    one, other = (trained(Async(), rule, pushes=60, library=library) for library in ("numpy", "torch"))
    np.testing.assert_allclose(one.weights, other.weights, atol=2e-5)


def test_who_leaves_is_forgotten() -> None:
    rule = rules.named("dana-zero")
    work = SimulatedTraining(Quadratic(3), rule, lambda batches: {**rule.hyperparameters, "lr": 0.01})
    simulate(Async(), 3, WorkerSpeeds(outages=(Outage(1, 2000),)), 120, work=work)
    own = [slot for name, slot in work.state.slots.items() if name.startswith("v@")]
    assert len(own) == 2
    np.testing.assert_allclose(work.state.slot("sum"), sum(own), rtol=1e-12)


def test_local_steps_are_the_worker_s_own() -> None:
    """One worker, an outer rule that takes the difference as it is: the same as those steps at once."""
    inner, hyperparameters = rules.named("heavy-ball"), {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.0}
    work = SimulatedTraining(
        Digits(3), rules.named("plain"), lambda batches: {"lr": 1.0, "weight_decay": 0.0}, inner=Inner(inner, hyperparameters, 6)
    )
    simulate(LocalSGD(6), 1, WorkerSpeeds(), 5, work=work)
    problem = Digits(3)
    state = BlockState(problem.begin())
    for _ in range(30):
        inner.apply(state, problem.gradient(state.weights)[0], hyperparameters)
    np.testing.assert_allclose(work.weights, state.weights, atol=1e-5)


def test_gradients_of_digits_are_those_of_torch() -> None:
    import torch

    problem, again = Digits(1), Digits(1)
    flat = problem.begin()
    gradient, loss = problem.gradient(flat)
    batch = again._rng.permutation(len(again._labels))[:BATCH]
    weights = torch.from_numpy(again.begin()).requires_grad_()
    w1, b1, w2, b2 = torch.split(weights, [64 * 64, 64, 640, 10])
    hidden = (torch.from_numpy(again._images[batch]) @ w1.view(64, 64) + b1).relu()
    found = torch.nn.functional.cross_entropy(hidden @ w2.view(64, 10) + b2, torch.from_numpy(again._labels[batch]))
    found.backward()
    assert weights.grad is not None and len(flat) == SIZE
    assert loss == pytest.approx(found.item(), rel=1e-5)
    np.testing.assert_allclose(gradient, weights.grad.numpy(), atol=1e-6)


@pytest.mark.rotating
def test_the_small_table_passes_its_gate(capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(["digits-64", "--quick", "--seeds", "1", "--processes", "1", "-o", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["table"]) == 12
    assert list(told["gate"].values()) == [True] * 5


def test_the_gate_can_fail() -> None:
    good, bad = (digits64.TrainingResult(accuracy, 1.0, 1.0, "") for accuracy in (0.98, 0.5))
    table = {
        ("nag-asgd", 32): [good],
        ("dana-zero", 32): [bad],
        ("dana-zero", 16): [bad],
        ("dana-zero", 1): [good],
        ("multi-asgd", 32): [good],
    }
    assert list(digits64.gate(table).values()) == [False] * 5
    assert list(digits64.gate({}).values())[:2] == [None, None]


def test_the_schedule_of_lr() -> None:
    given = digits64.rate_schedule(digits64.protocol_hyperparameters(rules.named("nag"), {}), 10)
    rates = [given(44 * epoch)["lr"] for epoch in (0, 1, 29, 30, 45, 59)]
    assert rates == pytest.approx([0.005, 0.05, 0.05, 0.005, 0.0005, 0.0005])
    assert given(22)["lr"] == pytest.approx(0.0275)
    assert (given(0)["momentum"], given(0)["weight_decay"]) == (0.9, 1e-4)
    assert digits64.protocol_hyperparameters(rules.named("lr-over-lag"), {"lr": 1.0})["momentum"] == 0
    assert digits64.protocol_hyperparameters(rules.named("nag"), {"momentum": 0.5})["momentum"] == 0.5


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("sync", Sync()), ("backup", Backup(1)), ("backup:4", Backup(4)), ("bounded:staleness=2", Bounded(2)),
        ("sync:delay=1", Sync(1)), ("bounded:5:delay=2", Bounded(5, 2)), ("bounded:5,delay=2", Bounded(5, 2)), ("async:delay=4", Async(4)),
        ("bounded:delay=2", Bounded(3, 2)),
        ("softsync:8,by_staleness=false", Softsync(8, by_staleness=False)), ("local:20,quorum=6,grace=2.5", LocalSGD(20, 6, 2.5)),
    ],
)  # fmt: skip
def test_modes_as_they_are_written(text: str, mode: Mode) -> None:
    assert mode_of(text) == mode
    assert mode_of(label(mode)) == mode
    assert not mode.delay or label(mode) == format_mode(mode)  # type: ignore[arg-type]


@pytest.mark.parametrize(("argv", "sentence"), [
    (["schedule", "--mode", "turbo"], "there is no mode 'turbo'; there are sync[:delay=N], backup:BACKUP_WORKERS"),
    (["schedule", "--mode", "backup:x"], "backup_workers is 'x', must be a whole number"),
    (["schedule", "--mode", "sync:1"], "'1' is not a number of sync; write sync"),
    (["schedule", "--mode", "sync:delay=2"], "delay is 2, must be 0 or 1"),
    (["schedule", "--mode", "async:4"], "'4' is not a number of async; write async[:delay=N]"),
    (["schedule", "--mode", "async:delay=9"], "delay is 9, must be 0 to 8"),
    (["schedule", "--mode", "bounded:delay=3"], "must be below the staleness of 3, which counts it"),
    (["schedule", "--mode", "softsync:2:delay=1"], "'delay=1' is not a number of softsync"),
    (["train", "--mode", "sync:delay=1", "--replayable", "--trace", "t.csv"],
     "the workers of a replay wait for each push; leave delay=1 out"),
    (["schedule", "--mode", "bounded:-1"], "staleness is -1, must be 0 or more"),
    (["schedule", "--mode", "softsync:2,by_staleness=no"], "by_staleness is 'no', must be true or false"),
    (["schedule", "--workers", "0"], "--workers 0: must be 1 to 10000"),
    (["schedule", "--workers", "-3"], "--workers -3: must be 1 to 10000"),
    (["schedule", "--pushes", "0"], "--pushes 0: must be 1 to"),
    (["schedule", "--pushes", "-1"], "--pushes -1: must be 1 to"),
    (["schedule", "--time-seed", "-1"], "--time-seed -1: must be 0 to"),
    (["schedule", "--stall", "2x5"], "stall has chance 2.0"),
    (["schedule", "--crash", "0@-1"], "crash of worker 0 begins at -1.0"),
    (["schedule", "--trace", "no-such-folder/t.csv", "--mode", "sync"], "no-such-folder/t.csv: No such file or directory; name another"),
    (["schedule", "--slow", "4"], "write WORKER=FACTOR"),
    (["schedule", "--slow", "9=2"], "worker 9 is not one of the 8 workers"),
    (["schedule", "--stall", "0.1"], "write CHANCExFACTOR"),
    (["schedule", "--crash", "1"], "write WORKER@TIME"),
    (["schedule", "--speeds", "no-such-file"], "there is no such file of step times"),
    (["schedule", "--trace", "t.csv"], "is of one mode"),
    (["train", "--rule", "magic"], "there is no rule 'magic'"),
    (["train", "--set", "lr"], "write NAME=VALUE"),
    (["train", "--set", "speed=1"], "has no hyperparameter 'speed'"),
    (["train", "--problem", "go"], "there are digits, fixed:PARAMETERS"),
    (["train", "--mode", "sync", "--mode", "async"], "a training has one"),
    (["train", "--inner-set", "lr=1"], "workers make no steps of their own"),
    (["train", "--inner", "adamw"], "--inner adamw: is for --mode local:…"),
    (["train", "--mode", "local:5", "--inner-set", "lr"], "--inner-set lr: write NAME=VALUE"),
    (["train", "--mode", "local:5", "--inner", "adamw"], "--inner adamw: is a kernel of torch's; add --library torch"),
    (["train", "--rule", "adam", "--pushes", "9"], "--rule adam: is a kernel of torch's; add --library torch"),
    (["train", "--rule", "reduce", "--pushes", "9"], "--rule reduce: changes no weights"),
    (["train", "--problem", "fixed:1000000000000"], "must have 1 to 100000000 parameters"),
    (["train", "--seed", "-1"], "--seed -1: must be 0 to"),
    (["digits-64", "--seeds", "-1"], "--seeds -1: must be 1 to"),
    (["digits-64", "--processes", "0"], "--processes 0: must be 1 to"),
    (["digits-64", "--lr", "nan"], "--lr nan: must be a finite number"),
    (["digits-64", "--lr=-1"], "--lr -1.0: must be a finite number of 0 or more"),
    (["train", "--rule", "nag", "--set", "lr=-1"], "rule nag: lr is 0 or more, got -1"),
    (["schedule", "--workers", "4", "--mode", "backup:4"], "--mode backup:4: needs 5 workers or more, there are 4"),
    (["train", "--workers", "4", "--mode", "local:2,quorum=5"], "--mode local:2,quorum=5: needs 5 workers or more, there are 4"),
    (["digits-64", "--only", "sgd"], "there are asgd, nag-asgd"),
    (["digits-64", "--workers", "1,x"], "must be whole numbers"),
    (["trace", "no-such-file"], "no-such-file"),
])  # fmt: skip
def test_what_cannot_be_is_said_in_a_sentence(argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(argv) == 2
    told = capsys.readouterr().err
    assert told.startswith("psjob simulate: ") and sentence in told


@pytest.mark.parametrize(("name", "content"), [("t.csv", b"a" * 200_000), ("t.csv", b"\xff\xfe"), ("t.jsonl", b"\xff\xfe")])
def test_what_is_no_trace(name: str, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).write_bytes(content)
    assert asked(["trace", str(tmp_path / name)]) == 2
    assert f"{tmp_path / name}: is no trace after record 0" in capsys.readouterr().err


def test_step_times_that_are_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "times").write_bytes(b"\xff\xfe")
    assert asked(["schedule", "--speeds", str(tmp_path / "times")]) == 2
    assert "times: is not text in UTF-8" in capsys.readouterr().err


def test_a_wrong_word_is_named() -> None:
    done = subprocess.run([sys.executable, *ARGV, "schedule", "--workers", "1.5"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "Invalid value for '--workers'" in done.stderr and "Traceback" not in done.stderr


def test_a_reader_that_has_gone_is_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    argv = [sys.executable, *ARGV, "schedule", "--workers", "2", "--mode", "sync"]
    done = subprocess.run(argv, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_modes_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = tmp_path / "times.txt"
    times.write_text("# seconds\n0.1 0.11 0.12\n0.1, 0.12\n0.4 0.41\n")
    argv = ["schedule", "--workers", "3", "--speeds", str(times), "--pushes", "300", "-o", "json"]
    assert asked(argv) == 0
    found = {one["mode"]: one for one in json.loads(capsys.readouterr().out)}
    ours = [mode for mode, one in found.items() if one["jobs"]]
    assert ours == ["sync", "backup:1", "bounded:1", "bounded:3", "softsync:1", "async", "threshold:6"]
    assert found["async"]["useful"] > found["backup:1"]["useful"] > 1.4 * found["sync"]["useful"]
    assert asked(argv[:-2]) == 0
    assert "Without staleness: backup:1" in capsys.readouterr().out
    rounds = ["local:4", "local-async:4", "softsync:1,by_staleness=false"]
    assert asked([*argv[:3], "--pushes", "60", *(word for mode in rounds for word in ("--mode", mode)), "-o", "json"]) == 0
    assert [one["mode"] for one in json.loads(capsys.readouterr().out) if one["jobs"]] == rounds[:2]


def test_a_training_and_its_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.csv"
    train = ["train", "--problem", "fixed:10", "--workers", "4", "--pushes", "100", "--rule", "dana-zero", "--set", "lr=0.01", "-o", "json"]
    assert asked([*train, "--trace", str(path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert asked(["trace", str(path), "-o", "json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert (read["sha256"], read["pushes"], sum(read["staleness_histogram"].values())) == (told["sha256"], 100, 100)
    assert asked([*train, "--seed", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["sha256"] != told["sha256"], "gaps are another problem's"
