"""Accelerate's own numbers in a job: those that `accelerate launch` gives, of the same script under gloo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.runs import WORKERS, Run, assert_equal, resumed, with_ddp
from tests.support.quick import rest_rotates

pytestmark = pytest.mark.timeout(600)
SCRIPT = "notrainer.py"
SCHEDULES = {
    "linear with warm-up": ["schedule=linear", "warmup=3"],
    "cosine": ["schedule=cosine", "warmup=2"],
    "constant": ["schedule=constant_with_warmup", "warmup=4"],
}
LENGTHS = {"by epochs": ["epochs=3"], "by max_train_steps": ["most=14"]}
"""22 batches: 11 for each of two workers, and 6 updates an epoch."""
RATES = {f"{schedule}, {length}": [*SCHEDULES[schedule], *LENGTHS[length]] for schedule in SCHEDULES for length in LENGTHS}


def told(folder: Path) -> list[dict[str, Any]]:
    """What the script has written, by process."""
    return [json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(WORKERS)]


def assert_told(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """All that a script was told is the same; metrics of the data and gathered losses but for rounding."""
    for name in ("scores", "means"):
        assert [pytest.approx(row, abs=1e-5) for row in theirs.pop(name)] == ours.pop(name), name
    assert ours == theirs


@pytest.mark.parametrize("case", rest_rotates(RATES, {"linear with warm-up, by max_train_steps"}))
def test_the_rate_of_every_step_is_that_of_ddp(tmp_path: Path, case: str) -> None:
    words = [SCRIPT, *RATES[case]]
    run = Run(tmp_path / "job", words)
    found = run.weights()
    wanted, _ = with_ddp(tmp_path / "ddp", words)
    assert_equal(found, wanted)
    for ours, theirs in zip(told(tmp_path / "job"), told(tmp_path / "ddp"), strict=True):
        assert ours.pop("local") is (ours["process"] == 0), "workers of one machine"
        del theirs["local"]  # each process of the reference is a node of its own
        assert_told(ours, theirs)
        assert len(set(ours["rates"])) > 2


@pytest.mark.rotating
def test_the_last_workers_trigger_ends_all_at_the_step_of_ddp(tmp_path: Path) -> None:
    words = [SCRIPT, "schedule=cosine", "stop=8"]
    found = Run(tmp_path / "job", words).weights()
    wanted, _ = with_ddp(tmp_path / "ddp", words)
    assert_equal(found, wanted)
    for ours, theirs in zip(told(tmp_path / "job"), told(tmp_path / "ddp"), strict=True):
        assert ours["steps"] == 8
        del ours["local"], theirs["local"]
        assert_told(ours, theirs)


COUNTED = {
    "seedable sampler": ["order=random", "seedable=yes"],
    "split batches": ["split=yes"],
    "uneven data": ["count=45", "accumulate=1"],
}


@pytest.mark.rotating
@pytest.mark.parametrize("case", COUNTED)
def test_steps_and_rates_are_those_of_ddp_for_other_loaders(tmp_path: Path, case: str) -> None:
    words = [SCRIPT, "schedule=cosine", *COUNTED[case]]
    run = Run(tmp_path / "job", words)
    found = run.weights()
    wanted, _ = with_ddp(tmp_path / "ddp", words)
    for name in ("rates", "steps", "updates", "batches"):
        assert [each[name] for each in told(tmp_path / "job")] == [each[name] for each in told(tmp_path / "ddp")], name
    if case == "split batches":
        assert_equal(found, wanted)


@pytest.mark.rotating
def test_rates_and_counts_go_on_after_a_kill(tmp_path: Path) -> None:
    words = [SCRIPT, "schedule=cosine", "warmup=2", "order=random"]
    whole, _ = resumed(tmp_path, words, "kill:worker-1@step=8", 3)
    assert whole.summary["steps"] == 18
    assert told(tmp_path / "killed")[0] == told(tmp_path / "whole")[0]


@pytest.mark.rotating
def test_what_is_split_between_processes_is_whole_on_every_worker(tmp_path: Path) -> None:
    run = Run(tmp_path / "job", ["split_between.py"])
    assert run.code == 0, run.output[-4000:]
    assert run.output.count("split_between_processes gives every worker all inputs") == 1, run.output[-4000:]
    assert [text.count("part abc") for text in run.workers()] == [2] * WORKERS
