"""Workers that return, leave early or have odd groups: every step counts once, and the last weights are the job's."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from psjob.worker.exits import SessionEnd
from tests.live import live_shards
from tests.live.counting import counting, final, numbers, step
from tests.live.live_shards import NEVER, SECONDS, Shards, Worker, all_well, aside, eventually, serving, severed

EVERY_2 = replace(NEVER, every_steps=2, keep=100)


@pytest.fixture(autouse=True, params=[False, True], ids=["plain", "overlap"])
def both_ways(last_words: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(live_shards, "OVERLAP", request.param)


def large(shards: Shards, start: int = 1) -> Worker:
    """A counting worker whose record is too large to be handed in at each step."""
    model = nn.Linear(40, 40)
    model.register_buffer("statistics", torch.zeros(40_000))
    for p in model.parameters():
        nn.init.zeros_(p)
    return Worker(shards, 0, model, torch.optim.SGD(model.parameters(), lr=1.0), start=start)


def rounds(worker: Worker, begin: int, end: int) -> None:
    """What `ps.shard` and the script do, a batch a step."""
    for turn in range(begin, end):
        worker.edge(turn)
        step(worker)


def test_an_async_worker_without_a_record_makes_its_steps_again_without_effect(tmp_path: Path) -> None:
    with serving(tmp_path, workers=1, shards=2, mode="async") as shards:
        first = large(shards)
        first.attach()
        rounds(first, 0, 5)
        first.job.wait()
        first.die()
        again = large(shards, start=2)
        again.attach()
        assert (again.session.clock, again.job.made) == (5, 0)
        rounds(again, 0, 8)
        assert again.leave() == 0 and final(shards) == {8.0, 0.0}, "the buffer is zeros"


def test_an_async_worker_makes_only_the_steps_after_its_record_again(tmp_path: Path) -> None:
    """Its record is of clock 3: it was killed at the next step's edge, before it could hand in another."""
    with serving(tmp_path, workers=1, shards=2, mode="async") as shards:
        first = counting(shards, 0)
        first.attach()
        rounds(first, 0, 4)
        first.job.wait()
        assert eventually(lambda: 3 in shards.servers[0].coordinator.machine.state.members[0].records)  # type: ignore[union-attr]
        first.die()
        again = counting(shards, 0, start=2)
        again.attach()
        assert (again.session.clock, again.job.made) == (4, 3)
        rounds(again, 3, 8)
        assert again.leave() == 0 and final(shards) == {8.0}


def test_an_async_push_that_one_shard_has_is_made_again_for_the_other(tmp_path: Path) -> None:
    with serving(tmp_path, workers=1, shards=2, mode="async") as shards:
        first = counting(shards, 0)
        first.attach()
        with severed(first.session.links[1]):
            pushing = aside(lambda: step(first))
            assert eventually(lambda: shards.servers[0].store.clocks()[0] == 1)
            first.session._end(SessionEnd("lost"))
            pushing.join(SECONDS)
            first.die()
        again = counting(shards, 0, start=2)
        again.attach()
        assert again.session.clock == 0
        step(again, 3)
        assert again.leave() == 0 and final(shards) == {3.0}
        assert shards.servers[0].store.counters.duplicates > 0
        assert all(server.store.counters.lost == 0 for server in shards.servers)


def test_where_workers_step_whoever_goes_on_gives_the_weights(tmp_path: Path) -> None:
    """Rank 0 is through after 2 steps: checkpoints continue, and the job's weights are the last worker's."""
    with serving(tmp_path, workers=2, shards=2, update_at="worker", checkpoint=EVERY_2) as shards:

        def beyond() -> bool:
            return any(int(path.stem[-12:]) > 2 for path in shards.folder.glob("manifest-*.json"))

        def act(worker: Worker) -> None:
            rounds(worker, 0, 2)
            deadline = time.monotonic() + SECONDS / 2
            while worker.rank == 1 and time.monotonic() < deadline and not beyond():
                rounds(worker, worker.session.clock, worker.session.clock + 1)

        workers = [counting(shards, rank) for rank in range(2)]
        all_well(workers, act)
        assert beyond(), "no checkpoint without rank 0"
        assert final(shards) == numbers(workers[1].model) == {float(workers[1].session.clock)}


def test_a_last_group_without_parameters_is_nothing_special(tmp_path: Path) -> None:
    with serving(tmp_path, workers=1, shards=2) as shards:
        model = nn.Linear(40, 40)
        for p in model.parameters():
            nn.init.zeros_(p)
        groups = [{"params": list(model.parameters())}, {"params": [], "weight_decay": 0.0}]
        worker = Worker(shards, 0, model, torch.optim.SGD(groups, lr=1.0))
        all_well([worker], lambda worker: step(worker, 2))
        assert final(shards) == {2.0}
