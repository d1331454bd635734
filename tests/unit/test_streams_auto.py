"""How many streams a pair has, by cores and by what exchanges took."""

from __future__ import annotations

from pathlib import Path

import pytest

from psjob.process import system
from psjob.protocol.streams import MOST_STREAMS, SETTLED, TURN, TURNS, PairFacts, StreamTrial, most_streams, offered_streams

MODEL = 100 << 20
STEPS = SETTLED + 2 * TURN * TURNS


@pytest.mark.parametrize(
    ("facts", "streams"),
    [
        (PairFacts(1, 1, 2, 2, MODEL, True, True), 2),
        (PairFacts(1, 1, 2, 2, MODEL, True, False), 1),
        (PairFacts(2, 1, 2, 2, MODEL, True, True), 1),
        (PairFacts(1, 4, 16, 16, MODEL, True, True), 4),
        (PairFacts(2, 4, 16, 16, MODEL, True, True), 2),
        (PairFacts(1, 1, 64, 64, MODEL, True, True), 8),
        (PairFacts(1, 1, 64, 64, 3 << 20, True, True), 3),
        (PairFacts(1, 1, 64, 64, 1000, True, True), 1),
        (PairFacts(8, 4, 16, 64, MODEL, False, False), 2),
        (PairFacts(16, 4, 16, 8, MODEL, False, False), 1),
        (PairFacts(4, 4, 1, 64, MODEL, False, False), 1),
    ],
)
def test_streams_of_a_pair(facts: PairFacts, streams: int) -> None:
    """A shard of many workers has few for each, and small blocks need none beside the first."""
    assert offered_streams(facts) == streams <= max(1, min(MOST_STREAMS, most_streams(facts.workers, facts.shard_cores)))


def tried(one: float, all_of_them: float) -> tuple[StreamTrial, list[bool]]:
    trial, seen = StreamTrial(), []
    for _ in range(STEPS):
        seen.append(trial.one)
        trial.took(one if trial.one else all_of_them)
    return trial, seen


@pytest.mark.parametrize(("one", "all_of_them", "keeps"), [(1.0, 2.0, True), (2.0, 1.0, False), (0.98, 1.0, False), (1.0, 1.0, False)])
def test_a_worker_keeps_what_is_faster(one: float, all_of_them: float, keeps: bool) -> None:
    trial, seen = tried(one, all_of_them)
    assert trial.over and trial.one is keeps
    assert seen == [False] * SETTLED + ([False] * TURN + [True] * TURN) * TURNS
    trial.took(1000.0)
    assert trial.one is keeps, "it is over"


def test_a_slow_step_decides_nothing() -> None:
    trial = StreamTrial()
    for step in range(STEPS):
        trial.took(100.0 if step in (SETTLED, SETTLED + 1) else 1.0 if trial.one else 0.5)
    assert not trial.one


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({"cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu.max": "garbage"}, None),
        ({}, None),
    ],
)
def test_cores_are_those_of_the_container(tmp_path: Path, files: dict[str, str], most: int | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    own = system.cores(tmp_path / "none")
    assert system.cores(tmp_path) == (own if most is None else min(own, most))
