"""Where a step's time goes: the arithmetic by tables, and on real shards the parts against the steps' own time.

Each case makes one part dominate by what it does: a script that sleeps, a worker that others wait for, a link that a bucket slows, an
update that a rule makes long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from psjob import rules
from psjob.contract import STEP_PARTS
from psjob.rules.base import Rule
from psjob.shard.status_server import status
from psjob.worker import step_parts
from psjob.worker.step_parts import COPY_OUT, OWN, WIRE, LandedAnswer, StepParts, split_wait, with_device
from tests.live.live_shards import Worker, all_well, eventually, serving
from tests.live.training import train_step

pytestmark = pytest.mark.usefixtures("last_words")

WAITS: dict[str, tuple[tuple[float, float], list[LandedAnswer], tuple[float, float, float]]] = {
    "no answer: all of it is the wire": ((0.0, 1.0), [], (0.0, 0.0, 0.0)),
    "the push waited for others, then for its update": ((0.0, 1.0), [LandedAnswer(0.9, 0.9, 0.0, 0.5, 0.3)], (0.5, 0.3, 0.0)),
    "bytes come for half of the time": ((0.0, 1.0), [LandedAnswer(0.5, 1.0, 0.0, 9.0, 0.2)], (0.3, 0.2, 0.0)),
    "a copy after the bytes": ((0.0, 1.0), [LandedAnswer(0.5, 1.0, 0.25, 0.0, 9.0)], (0.0, 0.5, 0.25)),
    "what was before the wait is not waited for": ((10.0, 11.0), [LandedAnswer(11.0, 11.0, 0.0, 60.0, 0.25)], (0.75, 0.25, 0.0)),
    "an answer of before the wait": ((10.0, 11.0), [LandedAnswer(9.0, 9.5, 0.0, 5.0, 5.0)], (0.0, 0.0, 0.0)),
    "two blocks wait together for the same worker": (
        (0.0, 1.0), [LandedAnswer(0.5, 0.5, 0.0, 0.4, 0.1), LandedAnswer(0.6, 0.6, 0.0, 0.4, 0.1)], (0.4, 0.2, 0.0),
    ),
    "an answer that lands as the wait ends": ((0.0, 1.0), [LandedAnswer(1.5, 2.0, 0.0, 0.25, 0.25)], (0.25, 0.25, 0.0)),
}  # fmt: skip


@pytest.mark.parametrize("case", WAITS)
def test_a_wait_is_for_what_the_answers_tell(case: str) -> None:
    (began, ended), answers, parts = WAITS[case]
    assert split_wait(began, ended, answers) == pytest.approx(parts), case


@given(st.lists(st.tuples(*[st.floats(0, 5)] * 5), max_size=8), st.floats(0, 5), st.floats(0, 5))
def test_no_part_is_negative_and_together_they_are_no_more_than_the_wait(rows: list[tuple[float, ...]], began: float, span: float) -> None:
    answers = [LandedAnswer(min(a, b), max(a, b), *rest) for a, b, *rest in rows]
    parts = split_wait(began, began + span, answers)
    assert min(parts) >= 0 and sum(parts) <= span + 1e-9


@pytest.mark.parametrize(
    ("seconds", "device", "found"),
    [
        ([0.1, 0.5, 0.2, 0, 0, 0, 0.2], 0.05, [0.1, 0.5, 0.2, 0, 0, 0, 0.2]),
        ([0.1, 0.5, 0.2, 0, 0, 0, 0.2], 0.4, [0.4, 0.2, 0.2, 0, 0, 0, 0.2]),
        ([0.1, 0.5, 0.2, 0, 0, 0, 0.2], 0.7, [0.7, 0.0, 0.2, 0, 0, 0, 0.1]),
        ([0.1, 0.5, 0.2, 0, 0, 0, 0.2], 9.0, [1.0, 0.0, 0.0, 0, 0, 0, 0.0]),
    ],
)
def test_a_device_computes_while_the_host_waits(seconds: list[float], device: float, found: list[float]) -> None:
    assert with_device(seconds, device) == pytest.approx(found)


def test_each_moment_is_in_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    now, told = [100.0], []
    monkeypatch.setattr(step_parts, "monotonic", lambda: now[0])
    parts = StepParts()
    parts.tell = told.append

    def spend(seconds: float) -> None:
        now[0] += seconds

    def step(clock: int) -> None:
        before = parts.enter()
        spend(0.25)
        inside = parts.to(COPY_OUT)
        spend(0.5)
        wait = parts.wait()
        spend(2.0)
        parts.answers.append(LandedAnswer(now[0], now[0], 0.0, 1.0, 0.5))
        parts.waited(wait)
        parts.to(inside)
        parts.step_boundary(clock)
        parts.to(before)
        spend(1.0)

    parts.step_boundary(0)
    step(1)
    assert not told, "the first step waits for imports"
    step(2)
    assert told == [{"parts": [1.0, 0.5, 0.5, 1.0, 0.5, 0.0, 0.25], "steps": 1}]
    parts.step_boundary(2)
    assert len(told) == 1, "no step was made"
    step(4)
    assert told[1]["steps"] == 2 and sum(told[1]["parts"]) == pytest.approx(3.75)


def test_other_threads_time_is_no_part_of_the_step() -> None:
    parts = StepParts()
    before = parts.enter()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend([parts.to(WIRE), parts.wait(), parts.waited(parts.wait())]))
    thread.start()
    thread.join()
    assert found[0] == step_parts.NOBODY and parts.to(before) == OWN and parts.seconds[WIRE] == 0


STEPS = 20
"""That are looked at, after a few others."""


class Slow(nn.Module):
    """Computes for that long."""

    def __init__(self, seconds: float, size: int = 64) -> None:
        super().__init__()
        self.inner, self.seconds = nn.Linear(size, 3), seconds
        self.size = size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.inner(nn.functional.pad(x, (0, self.size - x.shape[1])))


def trained(
    folder: Path, late: Callable[[Worker, int], float] = lambda _worker, _step: 0.0, size: int = 64, overlap: bool = False, **options: Any,
) -> tuple[list[dict[str, float]], dict[str, Any]]:  # fmt: skip
    """By rank the seconds of each part and under `whole` of the same steps by the script's clock; and what the coordinator tells."""
    found: list[dict[str, float]] = [{} for _ in range(2)]
    said: dict[str, Any] = {}
    with serving(folder, workers=2, **options) as live:
        models = [Slow(0.01, size) for _ in range(2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
        group = [Worker(live, rank, models[rank], optimizers[rank], overlap=overlap) for rank in range(2)]

        def act(worker: Worker) -> None:
            parts = worker.session.parts
            for step in range(3):
                train_step(worker, step)
            before, began = list(parts.seconds), time.monotonic()
            parts._every = 1e9
            for step in range(3, 3 + STEPS):
                time.sleep(late(worker, step))
                train_step(worker, step)
            parts.to(parts._at)
            ended = time.monotonic()
            rows = zip(STEP_PARTS, parts.seconds, before, strict=True)
            found[worker.rank] = {name: after - at_first for name, after, at_first in rows} | {"whole": ended - began}
            parts._every = 0.0
            for step in range(3 + STEPS, 6 + STEPS):
                train_step(worker, step)
            if worker.rank == 0:
                eventually(lambda: status(live.servers[0])["coordinator"]["stepParts"] is not None)
                said.update(status(live.servers[0])["coordinator"])

        all_well(group, act)
    return found, said


ROADS: dict[str, dict[str, Any]] = {
    "tcp": {"transport": "tcp"},
    "shared": {},
    "overlap": {"transport": "tcp", "overlap": True},
    "async": {"transport": "tcp", "mode": "async"},
    "two shards": {"transport": "tcp", "shards": 2},
}


@pytest.mark.parametrize("road", ROADS)
def test_the_parts_of_a_step_are_its_time(tmp_path: Path, road: str) -> None:
    found, said = trained(tmp_path, **ROADS[road])
    for parts in found:
        whole = parts.pop("whole")
        assert abs(sum(parts.values()) - whole) <= 0.05 * whole
        assert parts["compute"] >= STEPS * 0.01, "the script slept so long"
        assert min(parts.values()) >= -1e-9
    assert set(said["stepParts"]) == set(STEP_PARTS) and said["stepParts"]["compute"] >= 0.01


def test_who_is_late_computes_and_the_other_waits_for_it(tmp_path: Path) -> None:
    (first, second), _ = trained(tmp_path, lambda worker, _: 0.05 * worker.rank, transport="tcp")
    assert second["compute"] >= STEPS * 0.06 and first["others"] >= 0.5 * STEPS * 0.05


def test_a_long_update_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = type(rules.named("sgd"))
    apply = rule.apply

    def slowly(self: Rule, *given: Any) -> None:
        time.sleep(0.02)
        apply(self, *given)

    monkeypatch.setattr(rule, "apply", slowly)
    for parts in trained(tmp_path, transport="tcp")[0]:
        assert parts["update"] >= 0.5 * STEPS * 0.02
