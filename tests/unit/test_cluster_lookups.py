"""When a node is asked for again: seldom while nothing changes, soon after it did or after a pause."""

from __future__ import annotations

import asyncio

from psjob_operator.cluster.cache import Memory
from psjob_operator.cluster.node_loss import NODE_SECONDS, Lookups
from tests.unit.plan_given import NOW, UID


class Nodes(Lookups):
    """What the API server says of every node, as a test has it."""

    def __init__(self, memory: Memory, now: float, silent: bool) -> None:
        super().__init__(None, "ns", memory, now)  # type: ignore[arg-type]
        self._says = silent
        self.asked = 0

    async def _read_node(self, node: str, fallback: bool) -> tuple[bool, bool]:
        self.asked += 1
        return self._says, self._says


def waited(memory: Memory, now: float, silent: bool) -> float:
    """Seconds until the node is asked for again, having been asked for now."""
    lookups = Nodes(memory, now, silent)
    assert asyncio.run(lookups.silent("n1")) == silent and lookups.asked == 1
    assert lookups.again_at is not None
    return lookups.again_at - now


def test_a_node_is_asked_for_less_and_less_until_it_changes() -> None:
    memory, now, waits = Memory(UID), NOW, []
    for _ in range(8):
        waits.append(waited(memory, now, silent=False))
        now += waits[-1]
    assert waits == [2, 4, 8, 16, 32, 60, 60, 60]
    assert waited(memory, now, silent=True) == NODE_SECONDS
    assert waited(memory, now + NODE_SECONDS, silent=True) == 2 * NODE_SECONDS


def test_a_node_that_nobody_asked_for_since_is_asked_for_soon_again() -> None:
    memory = Memory(UID)
    assert [waited(memory, NOW, False), waited(memory, NOW + 2, False), waited(memory, NOW + 6, False)] == [2, 4, 8]
    assert waited(memory, NOW + 600, silent=False) == NODE_SECONDS


def test_what_is_known_is_not_asked_for() -> None:
    memory = Memory(UID)
    waited(memory, NOW, silent=True)
    lookups = Nodes(memory, NOW + 1, silent=False)
    assert asyncio.run(lookups.silent("n1")) and lookups.asked == 0 and lookups.again_at == NOW + 2
