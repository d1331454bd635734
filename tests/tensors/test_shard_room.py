"""What a shard may hold of all workers' gradients: shares that keep to it, and a job that is refused where they cannot.

- Early data of a worker's streams together: one gradient a block, within its share, and the newest counts.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

from psjob.modes import Backup, LocalAsync, Quorum, ServedMode, Softsync, Sync, Threshold
from psjob.shard.pending import Gradient
from psjob.shard.progress import room_problem
from psjob.shard.worker_stream import EarlyPushes
from psjob.wire.frame import Header, Kind, WireError
from psjob.worker.exchange import CREDIT, credits
from tests.tensors.desk import Desk

MIB = 1 << 20


@pytest.mark.parametrize("workers", [1, 2, 64, 128, 1000, 4000])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [16, 4096, 16000, 65536])
def test_all_shares_together_are_within_the_budget(tmp_path: Path, workers: int, overlap: bool, budget: int) -> None:
    config = replace(Desk(tmp_path).servers[0].place.config, workers=workers, gradients=budget * MIB)
    pushes, early = credits(config, overlap)
    assert workers * (pushes + early) <= budget * MIB
    assert pushes <= CREDIT and (overlap or not early)
    assert pushes == CREDIT or pushes == budget * MIB // workers // (1 + overlap), "what is there is used"


@pytest.mark.parametrize(
    ("mode", "pushes"), [(Backup(1), 1), (Threshold(3), 1), (Quorum(5, 2), 1), (LocalAsync(5), 1), (Softsync(2), 2)], ids=lambda x: str(x)
)
def test_whole_pushes_need_room(mode: ServedMode, pushes: int) -> None:
    assert room_problem(8, mode, 800 * MIB, 800 * pushes * MIB) is None
    said = room_problem(8, mode, 800 * MIB, 800 * pushes * MIB - 1)
    assert said is not None and f"set training.gradientMebibytes to {800 * pushes}, or take more shards" in said


def test_other_modes_hold_what_is_on_its_way() -> None:
    assert room_problem(4000, Sync(), 1 << 50, 0) is None


def test_a_norm_of_the_whole_gradient_needs_room() -> None:
    assert room_problem(8, Sync(), 800 * MIB, 800 * MIB, clips=True) is None
    said = room_problem(8, Sync(), 800 * MIB, 800 * MIB - 1, clips=True)
    assert said is not None and said.startswith(
        "to clip by the norm of the whole gradient, a shard holds a whole push of each of 8 workers"
    )


def test_a_job_without_room_is_refused_when_it_begins(tmp_path: Path) -> None:
    desk = Desk(tmp_path, mode="softsync")
    said: list[str] = []
    for server in desk.servers:
        server.store.on_problem = said.append
        server.store.budget = 1
    desk.begun()
    assert len(said) == len(desk.servers) and "set training.gradientMebibytes to 1" in said[0]


class Given:
    """A gradient of `size` bytes."""

    def __init__(self, size: int = 4) -> None:
        self.flat = torch.zeros(size, dtype=torch.uint8)
        self.freed = 0

    def free(self) -> None:
        self.freed += 1


def keep(held: EarlyPushes, given: Given, block: int = 0, clock: int = 0, number: int = 1) -> None:
    held.keep(Header(Kind.EARLY, block=block, clock=clock, request=number), cast(Gradient, given))


def take(held: EarlyPushes, block: int = 0, clock: int = 0, number: int = 1) -> object:
    return held.take(Header(Kind.PUSH, block=block, clock=clock, part=number))


def test_the_newest_of_a_block_is_held_whatever_stream_it_came_by() -> None:
    held = EarlyPushes(100)
    first, second, late = Given(), Given(), Given()
    keep(held, first, number=1)
    keep(held, second, number=3)
    keep(held, late, number=2)
    assert (first.freed, second.freed, late.freed, held.nbytes()) == (1, 0, 1, 4)
    assert take(held, number=3) is second and held.nbytes() == 0
    with pytest.raises(WireError, match="not held here"):
        take(held, number=3)


def test_no_more_is_held_than_the_share_of_the_worker() -> None:
    held = EarlyPushes(10)
    given = [Given() for _ in range(5)]
    for block, one in enumerate(given):
        keep(held, one, block=block)
    assert held.nbytes() == 8 and [one.freed for one in given] == [0, 0, 1, 1, 1]
    held.drop(0, 0)
    keep(held, again := Given(), block=4)
    assert held.nbytes() == 8 and again.freed == 0 and given[0].freed == 1


def test_a_push_drops_what_is_not_newer() -> None:
    held = EarlyPushes(10)
    keep(held, one := Given(), clock=5)
    held.drop(0, 4)
    assert one.freed == 0
    held.drop(0, 5)
    held.clear()
    assert one.freed == 1 and held.nbytes() == 0
