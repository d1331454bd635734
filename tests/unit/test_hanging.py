"""Which workers hang: nobody who is only slow, only for who is waited for, told once, named a moment later."""

from __future__ import annotations

from typing import Any

import pytest

from psjob.modes import Sync
from psjob.protocol.coordinator import membership
from psjob.protocol.coordinator.actions import Tell
from psjob.protocol.coordinator.events import JobFacts, Stream
from psjob.protocol.coordinator.membership import HUNG_SECONDS, REPORT_SECONDS
from psjob.protocol.coordinator.schedule import Snapshot
from psjob.protocol.coordinator.state import CoordinatorState
from psjob.protocol.messages import WorkersAwaited
from psjob.wire.frame import Kind

LIMIT = 5.0


class Job(CoordinatorState):
    """Three workers that were all let in, and a limit."""

    def __init__(self, limit: float | None = LIMIT) -> None:
        super().__init__(JobFacts("run", "/run", Sync(), 3, 1, 1, 1, step_timeout=limit), 100.0)
        for rank in range(3):
            self.members.came(Stream(rank + 1, rank, (1, 0), True, "sync"))
            self.members[rank].welcomed = True

    @property
    def told(self) -> list[tuple[int, Kind]]:
        """Who was told what."""
        return [(action.stream - 1, action.kind) for action in self.out if isinstance(action, Tell)]

    def hung(self) -> list[dict[str, Any]]:
        """Who is named in the status."""
        return membership.hung(self, self.now)

    def after(self, seconds: float, waits: dict[int, float] | None = None, clocks: dict[int, int] | None = None, shard: int = 0) -> None:
        """So much later a shard tells, and the time is looked at."""
        self.now += seconds
        if waits is not None:
            membership.awaited(self, WorkersAwaited(shard, waits, clocks or {}))
        membership.tick(self)


def test_who_keeps_others_waiting_for_too_long_is_told_once_and_then_named() -> None:
    job = Job()
    job.after(0.0, {1: 0.5})
    job.after(4.0, {1: 4.5})
    assert job.told == []
    job.after(0.6, {1: 5.1})
    assert job.told == [(1, Kind.HUNG)] and job.hung() == []
    job.after(HUNG_SECONDS, {1: 5.1 + HUNG_SECONDS})
    assert job.told == [(1, Kind.HUNG)]
    assert [(entry["rank"], entry["start"]) for entry in job.hung()] == [(1, 1)]


def test_without_a_limit_nobody_is_told() -> None:
    job = Job(None)
    for _ in range(10):
        job.after(10.0, {1: 1000.0})
    assert job.told == [] and job.hung() == []


def test_a_step_begins_the_time_anew() -> None:
    job = Job()
    job.after(0.0, {1: 4.0}, {1: 7})
    job.after(2.0, {1: 6.0}, {1: 8})
    job.after(4.0, {1: 10.0}, {1: 8})
    assert job.told == []
    job.after(1.5, {1: 11.5}, {1: 8})
    assert job.told == [(1, Kind.HUNG)]


def test_a_step_that_pushes_nothing_counts_too() -> None:
    job = Job()
    for _ in range(8):
        membership.heartbeat(job, 1)
        job.after(1.0, {1: 100.0})
    assert job.told == []


def test_who_is_not_waited_for_is_left_alone_however_long_it_takes() -> None:
    job = Job()
    for _ in range(20):
        job.after(1.0, {}, {0: 3, 1: 3, 2: 3})
    assert job.told == []


def test_a_shard_that_has_told_nothing_lately_tells_nothing() -> None:
    job = Job()
    job.after(0.0, {1: 4.0})
    job.after(REPORT_SECONDS + 0.1)
    assert job.told == []


def test_each_shard_tells_for_itself() -> None:
    """A worker may hang between the pushes of one step: only one shard waits then."""
    job = Job()
    job.after(0.0, {}, shard=0)
    job.after(1.0, {2: 5.2}, shard=1)
    assert job.told == [(2, Kind.HUNG)]
    job.after(1.0, {}, shard=0)
    assert job.hung()


@pytest.mark.parametrize("event", ["came", "left"])
def test_a_new_process_and_one_that_is_through_are_not_named(event: str) -> None:
    job = Job()
    job.after(0.0, {1: 6.0})
    job.after(HUNG_SECONDS, {1: 7.0})
    assert job.hung()
    if event == "came":
        job.members.came(Stream(9, 1, (2, 0), True, "sync"))
    else:
        job.members.left(1, 5)
    assert job.hung() == []


def test_who_does_not_mark_while_others_hold_for_a_snapshot_is_told() -> None:
    job = Job()
    snapshot = Snapshot(1, None, True, job.now, pins={0: 4, 2: 4}, asked=job.now)
    job.snapshots.current = snapshot
    job.after(4.8, {})
    assert job.told == []
    job.after(0.3, {})
    assert job.told == [(1, Kind.HUNG)]


def test_who_keeps_one_that_is_through_waiting_is_told_unless_it_steps() -> None:
    job = Job()
    job.members.left(0, 9)
    job.after(0.0, {}, {1: 9, 2: 9})
    job.after(3.0, {}, {1: 9, 2: 10})
    job.after(3.0, {}, {1: 9, 2: 11})
    assert job.told == [(1, Kind.HUNG)]
