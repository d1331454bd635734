"""What is simulated is what jobs run: the same schedule, by real shards over real sockets, ends with the same bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from psjob import contract, modes, rules
from psjob.modes import Async, Bounded, LocalAsync, LocalSGD, Mode, Push, Softsync, Threshold
from psjob.process.config import LocalConfig, ProcessContext
from psjob.rules.base import Hyperparameters, check_hyperparameters
from psjob.simulate import digits64
from psjob.simulate.engine import SimulationOutcome, Trace, WorkerSpeeds, simulate
from psjob.simulate.replay import ServedRun, WorkRecording, mode_settings, open_sealed, play_again, replay_events, seal
from psjob.simulate.training import Digits, Inner, SimulatedTraining
from tests.live.live_shards import Shards, serving
from tests.support.simulated import asked
from tests.support.soaking import rotating

pytestmark = pytest.mark.usefixtures("last_words")
WORKERS, PUSHES = 4, 60
UNEVEN = WorkerSpeeds(spread=0.6)
MODES: dict[str, Mode] = {
    **{name: made() for name, made in modes.MODES.items()},
    "bounded": Bounded(2), "softsync": Softsync(2), "threshold": Threshold(3), "local": LocalSGD(3), "local-async": LocalAsync(3),
}  # fmt: skip
"""Numbers with which the few pushes of a test are stale, wait and are dropped; any other mode has those that it begins with."""
INNER = dict.fromkeys(("local", "local-async"), Inner(rules.named("adam"), {**rules.named("adam").hyperparameters, "lr": 0.002}, 3))
"""What workers do by themselves."""
OPTIMIZERS = ("sgd", "adam", "adamw", "adagrad")
ROWS = [
    *(("async", rule) for rule in (*OPTIMIZERS, *contract.UPDATE_RULES)),
    *((mode, rule) for mode in MODES if mode not in ("async", *INNER) for rule in OPTIMIZERS),
    ("local", "outer-nesterov"),
    ("local-async", "delayed-nesterov"),
]
"""Every pair of a mode and a rule that a job can have."""
QUICK = {
    ("async", "sgd"), ("async", "dana-dc"), ("async", "gap-aware-dana"), ("async", "ftrl"), ("async", "adam-async"), ("sync", "adam"),
    ("backup", "adamw"), ("bounded", "adagrad"), ("softsync", "sgd"), ("threshold", "adam"), ("local", "outer-nesterov"),
    ("local-async", "delayed-nesterov"),
}  # fmt: skip
"""Each mode, each optimizer, and rules that differ in what they keep of a worker."""


class Live:
    """The shards of a test as a replay sees them."""

    workers = WORKERS

    def __init__(self, shards: Shards) -> None:
        self.shards = shards

    def place(self, rank: int) -> ProcessContext:
        return self.shards.place(rank)

    def taken(self, pushes: int) -> bool:
        stores = [server.store for server in self.shards.servers]
        return all(store.counters.pushes >= pushes * len(store.cells) for store in stores)

    def final(self) -> torch.Tensor:
        cells = {index: cell for server in self.shards.servers for index, cell in server.store.cells.items()}
        return torch.cat([state.weights for index in sorted(cells) if (state := cells[index].state) is not None])


def hyperparameters_of(rule: str) -> Hyperparameters:
    given = {"workers": WORKERS} if rule == "adam-async" else {"momentum": 0.9, "nesterov": True} if rule == "sgd" else {}
    hyperparameters = {**digits64.protocol_hyperparameters(rules.named(rule), given), "lr": 0.002 if rule.startswith("adam") else 0.02}
    return check_hyperparameters(rules.named(rule), hyperparameters)


def fields(mode: Mode, rule: str) -> dict[str, Any]:
    """The mode as a shard that reads `mode_settings` has it."""
    words = mode_settings(mode, hyperparameters_of(rule))
    if "local" in words:
        local = words["local"]
        words["local"] = LocalConfig(local["innerSteps"], lr=local["lr"], momentum=local["momentum"])
        words["rule_options"] = words.pop("ruleOptions")
    if "updateRule" in words:
        words["update_rule"] = words.pop("updateRule")
    if "backupWorkers" in words:
        words["backup_workers"] = words.pop("backupWorkers")
    return words


def trained(rule: str, mode: Mode, path: Path) -> tuple[torch.Tensor, SimulationOutcome]:
    """By the simulator, with pushes that are all decided on, and a trace at `path`."""
    pushes = PUSHES
    while True:
        work = SimulatedTraining(Digits(1), rules.named(rule), lambda batches: hyperparameters_of(rule), "torch", INNER.get(mode.name))
        written = Trace(path)
        outcome = simulate(mode, WORKERS, UNEVEN, pushes, 7, WorkRecording(work, written), written)
        undecided = outcome.pushes - outcome.kept - outcome.dropped
        if not undecided:
            return work.state.weights, outcome
        pushes -= undecided


@pytest.mark.parametrize(("mode", "rule"), [pytest.param(*row) if row in QUICK else rotating(*row) for row in ROWS])
def test_served_and_simulated_weights_are_the_same_bits(tmp_path: Path, mode: str, rule: str) -> None:
    path = tmp_path / "trace.csv"
    expected, outcome = trained(rule, MODES[mode], path)
    assert mode not in ("async", "local-async") or max(outcome.staleness) > 3
    assert mode not in ("backup", "threshold") or outcome.dropped > 2
    with (
        serving(tmp_path, workers=WORKERS, shards=2, **fields(MODES[mode], rule)) as shards,
        ServedRun(Live(shards), Digits(1), rule, hyperparameters_of(rule), INNER.get(mode)) as twin,
    ):
        play_again(replay_events(path), twin)
        assert all(server.store.cells for server in shards.servers)
        final = twin.end()
    assert expected.numpy().tobytes() == final.numpy().tobytes()
    assert not torch.equal(final, torch.from_numpy(Digits(1).begin()))


def test_every_mode_of_a_job_is_played() -> None:
    assert set(MODES) == {*contract.MODES, "backup", "local-async"} == {mode for mode, _ in QUICK}
    assert set(ROWS) >= QUICK and {*OPTIMIZERS} <= {rule for _, rule in QUICK}


def test_other_numbers_come_to_other_weights(tmp_path: Path) -> None:
    expected, _ = trained("dana-dc", Async(), tmp_path / "trace.jsonl")
    other = {**hyperparameters_of("dana-dc"), "lam": 1.9}
    with serving(tmp_path, workers=WORKERS, shards=2, mode="async") as shards, ServedRun(Live(shards), Digits(1), "dana-dc", other) as twin:
        play_again(replay_events(tmp_path / "trace.jsonl"), twin)
        assert not torch.equal(expected, twin.end())


def test_a_schedule_that_the_shards_do_not_follow_is_told(tmp_path: Path) -> None:
    """The simulation says that two updates were made before this worker took its weights; there was none."""
    with (
        serving(tmp_path, workers=WORKERS, shards=2, mode="async") as shards,
        ServedRun(Live(shards), Digits(1), "nag", hyperparameters_of("nag")) as twin,
    ):
        twin.begin(1)
        with pytest.raises(ValueError, match=r"worker 1 has weights of version \[0\], in the simulation it has 2"):
            twin.push(Push(1, 0, 2))
        twin.push(Push(1, 0, 0))


def written(path: Path, *options: str) -> int:
    """`psjob simulate train`, small."""
    return asked(["train", "--workers", "2", "--pushes", "8", "--rule", "dana-zero", "--replayable", "--trace", str(path), *options])


@pytest.mark.rotating
@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_the_command_plays_a_file_by_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str) -> None:
    path = tmp_path / f"trace{suffix}"
    assert written(path, "-o", "json") == 0
    told = json.loads(capsys.readouterr().out)
    assert asked(["trace", str(path), "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["sha256"] == told["sha256"], "what is beside the records is not of their digest"
    assert asked(["replay", str(path), "--shards", "2"]) == 0
    words = capsys.readouterr().out.split()
    assert words[:2] == ["same:", "simulated"] and words[2] == words[4] + "," and len(words[4]) == 64


@pytest.mark.rotating
def test_a_file_of_other_weights_is_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.csv"
    assert written(path) == 0
    facts = open_sealed(path)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    seal(path, facts | {"numbers": facts["numbers"] | {"lr": 0.02}})
    capsys.readouterr()
    assert asked(["replay", str(path), "--shards", "1"]) == 1
    assert capsys.readouterr().out.startswith("DIFFERENT: simulated ")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace("1", "2", 1), "was changed after it was written (its SHA-256 is another); write it again"),
        (lambda text: text.replace('"seed": 0', '"seed": 1'), "was changed after it was written"),
        (lambda text: text[:-200], "has no last line to replay by: it is cut short, or no --replayable trace; write it again"),
        (lambda text: "".join(text.splitlines(keepends=True)[:-3]), "has no last line to replay by"),
        (lambda text: "", "has no last line to replay by"),
        (lambda text: "[[" * 50_000, "has no last line to replay by"),
    ],
)
def test_a_file_that_is_not_what_was_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable[[str], str], said: str
) -> None:
    path = tmp_path / "trace.csv"
    assert written(path) == 0
    path.write_bytes(change(path.read_bytes().decode()).encode())
    assert asked(["replay", str(path)]) == 2
    assert f"{path}: {said}" in capsys.readouterr().err


def test_a_file_of_another_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("t\n")
    seal(path, {"mode": "async"})
    assert asked(["replay", str(path)]) == 2
    assert f"{path}: is of another version of psjob (KeyError('rule')); write it again" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--mode", "softsync:1,by_staleness=false"], "--mode softsync:1,by_staleness=false: no job can have it; leave its options"),
        (["--mode", "sync", "--rule", "nag", "--pushes", "5"], "--pushes 5: 1 of them are not decided on at the end; take 4"),
        (["--mode", "local:4,quorum=2"], "--mode local:4,quorum=2: no job can have it; leave its options out"),
        (["--crash", "1@500"], "--crash: the workers of a replay all stay; leave it out"),
        (["--interrupt"], "--interrupt: a job's workers finish each step; leave it out"),
        (["--workers", "65"], "--workers 65: a replay has 64 at most"),
        (["--mode", "sync", "--mode", "async"], "--mode: is given more than once"),
    ],
)
def test_what_cannot_be_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str) -> None:
    assert written(tmp_path / "trace.csv", *options) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["train", "--replayable"], "--replayable: is for a --trace FILE; name one"),
        (["replay", "trace.csv", "--shards", "0"], "--shards 0: must be 1 to 16"),
        (["replay", "no-such-file"], "no-such-file: No such file or directory"),
    ],
)
def test_what_a_replay_needs(capsys: pytest.CaptureFixture[str], argv: list[str], said: str) -> None:
    assert asked(argv) == 2
    assert said in capsys.readouterr().err
