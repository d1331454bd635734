"""Early data of a worker's streams together: one gradient a block, within its share, and the newest counts."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from psjob.shard.lane import EarlyPushes
from psjob.shard.pending import Gradient
from psjob.wire.frame import Header, Kind, WireError


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
