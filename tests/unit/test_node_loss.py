"""Who went with a node of which nothing is heard: a table over what still speaks.

- When a node is asked for again: seldom while nothing changes, soon after it did or after a pause.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from psjob_operator.cluster import node_loss, pods
from psjob_operator.cluster.cache import Memory
from psjob_operator.cluster.node_loss import NODE_SECONDS, Lookups
from psjob_operator.cluster.pods import PodView
from tests.unit.plan_given import NOW, UID, ended, pod

JOINED = {"coordinator": {"workers": [{"rank": 0, "start": 1, "state": "joined"}, {"rank": 1, "start": 1, "state": "lost"}]}}


class Heard(Lookups):
    """Nodes that are silent and addresses that take a connection, as a test has them."""

    def __init__(self, memory: Memory, silent: set[str], answering: set[str], now: float = NOW) -> None:
        super().__init__(None, "ns", memory, now)  # type: ignore[arg-type]
        self._silent, self._answering = silent, answering

    async def silent(self, node: str) -> bool:
        return node in self._silent

    async def answers(self, address: str) -> bool:
        return address in self._answering


def view(role: str, index: int, node: str, unheard: bool = True, number: int = 1) -> PodView:
    return PodView(process=pod(role, index, number, node=node, ready=not unheard), ip=f"{role}-{index}", unheard=unheard)


def parsed(status: dict[str, Any]) -> PodView:
    """Shard 0's first pod on n1, as the API server has it with that status."""
    labels = {"psjob.dev/role": "shard", "psjob.dev/index": "0", "psjob.dev/number": "1"}
    metadata = {"name": "job-shard-0-a1", "uid": "u", "labels": labels}
    seen = pods.parse_pod({"metadata": metadata, "spec": {"nodeName": "n1", "containers": [{"name": "shard"}]}, "status": status})
    assert seen is not None
    return seen


SHARDS = (view("shard", 0, "n1"), view("shard", 1, "n1"))
WORKERS = (view("worker", 0, "n1"), view("worker", 1, "n2", unheard=False))


def lost(
    views: tuple[PodView, ...], memory: Memory, silent: set[str], answering: set[str], now: float = NOW, asked: bool = True
) -> set[str]:
    lookups = Heard(memory, silent, answering, now)
    found = asyncio.run(node_loss.pods_of_lost_nodes(lookups, views, memory, UID))
    assert lookups.again_at is None if not (silent and asked) else lookups.again_at == now + node_loss.AGAIN_SECONDS
    return {seen.process.name for seen in views if seen.process.uid in found}


def test_a_node_that_took_all_with_it() -> None:
    assert lost((*SHARDS, *WORKERS), Memory(UID), {"n1"}, set()) == {"job-shard-0-a1", "job-shard-1-a1", "job-worker-0-r1"}


def test_pods_that_are_not_marked_yet_go_with_those_that_are() -> None:
    views = (view("shard", 0, "n1"), view("shard", 1, "n1", unheard=False), view("shard", 2, "n2", unheard=False))
    assert lost(views, Memory(UID), {"n1"}, {"shard-2"}) == {"job-shard-0-a1", "job-shard-1-a1"}


def test_a_pod_whose_process_had_ended_goes_with_its_node() -> None:
    """For Kubernetes it runs: its kubelet is not there to say that it has ended."""
    over = replace(view("shard", 1, "n1"), process=pod("shard", 1, 1, node="n1", **ended(1)), unheard=False)
    successor, first = view("shard", 1, "n1", unheard=False, number=2), view("shard", 0, "n1")
    seen = (first, replace(over, holds=True), successor)
    assert lost(seen, Memory(UID), {"n1"}, set()) == {"job-shard-0-a1", "job-shard-1-a1", "job-shard-1-a2"}
    assert lost((first, over, successor), Memory(UID), {"n1"}, set()) == {"job-shard-0-a1", "job-shard-1-a2"}
    assert not lost((first, replace(over, holds=True), successor), Memory(UID), set(), set())


def test_a_pod_that_its_node_never_began_is_lost_once_the_others_have_gone() -> None:
    """Its kubelet said that it is not ready yet, so that the node controller marks nothing."""
    memory, waits = Memory(UID), view("worker", 1, "n1", unheard=False, number=2)
    assert lost((view("shard", 0, "n1"), waits), memory, {"n1"}, set()) == {"job-shard-0-a1", "job-worker-1-r2"}
    moved = view("shard", 0, "n2", unheard=False, number=2)
    assert not lost((moved, waits), memory, {"n1"}, {"shard-0"}), "the new shard 0 was not asked yet"
    memory.progress, memory.progress_at = JOINED, NOW + 1
    assert lost((moved, waits), memory, {"n1"}, {"shard-0"}, NOW + 2) == {"job-worker-1-r2"}
    assert not lost((moved, waits), memory, set(), {"shard-0"}, NOW + 3) and not memory.silent


def test_a_pod_that_does_not_begin_has_its_node_asked_for_after_a_while() -> None:
    """An operator that has just started knows nothing of the silence that came before it."""
    late = replace(view("worker", 1, "n1"), unheard=False)
    bound = replace(late, process=pod("worker", 1, 1, node="n1", phase="Pending", scheduled=NOW - node_loss.BEGIN_SECONDS, ready=False))
    assert lost((bound,), Memory(UID), {"n1"}, set()) == {"job-worker-1-r1"}
    assert not lost((replace(bound, process=replace(bound.process, phase="Running")),), Memory(UID), {"n1"}, set(), asked=False)
    lookups = Heard(Memory(UID), {"n1"}, set(), NOW - 1)
    assert not asyncio.run(node_loss.pods_of_lost_nodes(lookups, (bound,), Memory(UID), UID)) and lookups.again_at == NOW


def test_a_node_that_is_heard_of_takes_nobody() -> None:
    assert not lost((*SHARDS, *WORKERS), Memory(UID), set(), set())


def test_a_shard_that_answers_lives_and_so_do_the_workers_that_it_has() -> None:
    memory = Memory(UID)
    assert not lost((*SHARDS, *WORKERS), memory, {"n1"}, {"shard-0", "shard-1"}), "shard 0 was not asked yet"
    assert memory.silent == {"n1": NOW}
    memory.progress, memory.progress_at = JOINED, NOW + 1
    assert not lost((*SHARDS, *WORKERS), memory, {"n1"}, {"shard-0", "shard-1"}, NOW + 2)
    assert lost((*SHARDS, view("worker", 1, "n1")), memory, {"n1"}, {"shard-0", "shard-1"}, NOW + 2) == {"job-worker-1-r1"}
    assert lost((*SHARDS, view("worker", 0, "n1", number=2)), memory, {"n1"}, {"shard-0", "shard-1"}, NOW + 2) == {"job-worker-0-r2"}
    assert lost((*SHARDS, *WORKERS), memory, {"n1"}, {"shard-1"}, NOW + 2) == {"job-shard-0-a1", "job-worker-0-r1"}
    assert not lost((*SHARDS, *WORKERS), memory, set(), set()) and not memory.silent


@pytest.mark.parametrize(("words", "lives"), [({"here": True}, True), ({"here": False}, False), ({"here": 1}, False), ({}, True)])
def test_a_worker_whose_stream_has_ended_is_not_heard(words: dict[str, Any], lives: bool) -> None:
    """A runtime that does not tell of streams says of every worker that has joined that it is there."""
    told = {"coordinator": {"workers": [{"rank": 0, "start": 1, "state": "joined", **words}]}}
    memory = Memory(UID, progress=told, progress_at=NOW + 1, silent={"n2": NOW})
    views = (view("shard", 0, "n1", unheard=False), view("worker", 0, "n2"))
    assert lost(views, memory, {"n2"}, {"shard-0"}, NOW + 2) == (set() if lives else {"job-worker-0-r1"})


@pytest.mark.parametrize("told", [None, {}, {"coordinator": 3}, {"coordinator": {"workers": "all"}}, {"coordinator": {"workers": [7]}}])
def test_what_shard_0_does_not_say_is_not_believed(told: Any) -> None:
    memory = Memory(UID, progress=told, progress_at=NOW + 1, silent={"n2": NOW})
    views = (view("shard", 0, "n1", unheard=False), view("worker", 0, "n2"))
    assert lost(views, memory, {"n2"}, {"shard-0"}, NOW + 2) == {"job-worker-0-r1"}


@pytest.mark.parametrize(
    ("ready", "unheard"),
    [
        ({"status": "True"}, False),
        ({"status": "False", "reason": "ContainersNotReady"}, False),
        ({"status": "False", "reason": "PodCompleted"}, False),
        ({"status": "False"}, True),
    ],
)
def test_a_kubelet_names_a_reason_and_the_node_controller_none(ready: dict[str, str], unheard: bool) -> None:
    assert parsed({"phase": "Running", "conditions": [{"type": "Ready", **ready}]}).unheard == unheard


@pytest.mark.parametrize(("phase", "over", "holds"), [("Running", True, True), ("Failed", True, False), ("Running", False, False)])
def test_a_pod_that_runs_without_its_process_holds_its_volume(phase: str, over: bool, holds: bool) -> None:
    state = {"terminated": {"exitCode": 137}} if over else {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
    assert parsed({"phase": phase, "containerStatuses": [{"name": "shard", "state": state}]}).holds == holds


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
