"""The part of its time in which a worker's script waits for others, from the wait to the status port."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from psjob.shard.status_server import status
from psjob.wire.frame import Header, Kind
from psjob.worker.state import RECENT, Idle, waited_share
from tests.live.live_shards import Worker, all_well, serving
from tests.live.training import batch, build, loss_of
from tests.tensors.desk import Desk

pytestmark = pytest.mark.usefixtures("last_words")


def test_it_counts_from_the_end_of_the_first_step() -> None:
    idle = Idle()
    idle.waited = 5.0
    for clock, now in ((7, 10.0), (7, 11.0)):
        idle.at(clock, now)
    assert idle.told == (0, 0), "no step was made since the worker came"
    idle.at(8, 20.0)
    assert idle.told == (0, 0)
    idle.waited += 1.0
    assert idle.told == (0, 0), "it is told at an edge"
    idle.at(9, 24.0)
    assert idle.told == (4000, 2500)
    idle.waited += 9.0
    idle.at(10, 30.0)
    assert idle.told == (10_000, 10_000)


def test_the_recent_share_is_of_the_last_steps_and_of_a_wait_under_way() -> None:
    idle = Idle()
    idle.at(0, 0.0)
    assert idle.recent(5.0, 5.0) is None, "until the first step has ended workers wait for each other's imports"
    idle.waited = 50.0
    idle.at(1, 60.0)
    assert idle.recent(60.0) is None
    assert idle.recent(70.0, 8.0) == 0.8, "a wait counts before it ends"
    for step in range(2, 2 + RECENT):
        idle.waited += 0.25
        idle.at(step, 59.0 + step)
    assert idle.recent(60.0 + RECENT) == 0.25
    for step in range(2 + RECENT, 2 + 2 * RECENT):
        idle.waited += 0.75
        idle.at(step, 59.0 + step)
    assert idle.recent(60.0 + 2 * RECENT) == 0.75, "what is older does not count"
    assert idle.told[1] == 5000


@pytest.mark.parametrize(("waited", "counted", "part"), [(0, 0, 0), (1, 0, 0), (1, 4, 0.25), (5, 4, 1), (-1, 4, 0)])
def test_a_share_is_between_0_and_1(waited: float, counted: float, part: float) -> None:
    assert waited_share(waited, counted) == part


def test_a_record_tells_it_and_one_that_knows_nothing_leaves_it(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    clerks = desk.begun()

    def told() -> list[object]:
        return [worker["idle"] for worker in desk.c.members.status()]

    assert told() == [None, None]
    desk.say(clerks[1], Header(Kind.RECORD, clock=1, part=4000, request=2500), {}, b"")
    assert told() == [None, 0.25]
    desk.say(clerks[1], Header(Kind.RECORD, clock=1), {}, b"")
    desk.say(clerks[0], Header(Kind.RECORD, clock=1, part=1, request=2**32 - 1), {}, b"")
    assert told() == [1.0, 0.25]


def test_a_worker_whose_stream_has_ended_has_joined_and_is_not_here(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    clerks = desk.begun()

    def told() -> list[tuple[object, object]]:
        return [(worker["state"], worker["here"]) for worker in desk.c.members.status()]

    assert told() == [("joined", True)] * 2
    clerks[1].gone()
    desk.settle()
    assert told() == [("joined", True), ("joined", False)]


def test_in_sync_who_is_quick_waits_for_who_is_slow(tmp_path: Path) -> None:
    with serving(tmp_path, workers=2) as shards:
        models = [build() for _ in range(2)]
        workers = [Worker(shards, rank, model, torch.optim.SGD(model.parameters(), lr=0.1)) for rank, model in enumerate(models)]

        def act(worker: Worker) -> None:
            for step in range(12):
                worker.optimizer.zero_grad()
                loss_of(worker.model, batch(step, worker.rank)).backward()
                time.sleep(0.0 if worker.rank else 0.12)
                worker.optimizer.step()

        all_well(workers, act)
        slow, quick = (worker["idle"] for worker in status(shards.servers[0])["coordinator"]["workers"])
    assert 0 <= slow < 0.5 < quick <= 1
