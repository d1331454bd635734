"""What a worker says of its clocks is held against what its shard knows: a wrong number is refused with a sentence, and changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from psjob.shard.checks import check_leave
from psjob.shard.session import Session
from psjob.wire.frame import Header, Kind, WireError
from tests.tensors.desk import Clerk, Desk


def trained(tmp_path: Path, mode: str) -> tuple[Desk, list[Clerk]]:
    """Two workers that have made three clocks on two shards."""
    desk = Desk(tmp_path, mode=mode)
    clerks = desk.begun()
    for clock in range(3):
        for clerk in clerks:
            desk.push(clerk, clock, version=clock)
        desk.settle()
    return desk, clerks


@pytest.mark.parametrize("mode", ["sync", "async", "threshold"])
@pytest.mark.parametrize("clock", [-1, 0, 2, 4, 2**62])
def test_nobody_leaves_at_another_clock_than_it_has_come_to(tmp_path: Path, mode: str, clock: int) -> None:
    desk, _ = trained(tmp_path, mode)
    for server in desk.servers:
        with pytest.raises(WireError, match=f"worker 1 leaves at step {clock}; this shard has 3 complete steps of it"):
            check_leave(server.store, Header(Kind.LEAVE, worker=1, clock=clock))
        check_leave(server.store, Header(Kind.LEAVE, worker=1, clock=3))


def hello(desk: Desk, shard: int, acked: int, start: int = 2, **more: object) -> Session:
    """Of a new process of worker 1 to that shard."""
    return Clerk(desk.servers[shard], 1, start, 0, {"fresh": True, "acked": acked, **more})


@pytest.mark.parametrize("mode", ["sync", "async", "bounded", "threshold"])
def test_a_shard_that_lost_nothing_believes_no_more_than_it_has(tmp_path: Path, mode: str) -> None:
    desk, _ = trained(tmp_path, mode)
    with pytest.raises(WireError, match="says that 4 of its steps were acknowledged here; it can have been 3 at most"):
        hello(desk, 1, 4).join()
    store = desk.servers[1].store
    assert store.admission.rows[1].complete == 3 and store.counters.lost == 0
    hello(desk, 1, 3).join()


def test_a_shard_that_comes_back_alone_believes_what_the_coordinators_has_and_one_more(tmp_path: Path) -> None:
    """The lost process may have answered the open clock, which shard 0 has not whole."""
    desk, clerks = trained(tmp_path, "async")
    desk.push(clerks[1], 3, shards=[1], version=3)
    store = desk.servers[1].store
    store.attempt = 2
    desk.relink(1, serving=False)
    desk.settle()
    assert store.clocks() == {0: 0, 1: 0} and store.most == {0: 4, 1: 4}
    known = {"fresh": False, "attempt": 1}
    with pytest.raises(WireError, match="says that 5 of its steps were acknowledged here; it can have been 4 at most"):
        hello(desk, 1, 5, start=1, **known).join()
    assert store.clocks()[1] == 0
    hello(desk, 1, 4, start=1, **known).join()
    assert store.clocks()[1] == 4 and store.counters.lost == 4


def test_what_a_process_that_lived_on_acknowledged_is_believed_once_the_coordinator_has_it(tmp_path: Path) -> None:
    """A node that is cut off keeps its shard alive: it answered two more clocks after the restore began."""
    desk, clerks = trained(tmp_path, "async")
    store = desk.servers[1].store
    store.attempt = 2
    desk.relink(1, serving=False)
    desk.settle()
    known = {"fresh": False, "attempt": 1}
    for clock in (3, 4):
        desk.push(clerks[1], clock, shards=[0], version=clock)
    with pytest.raises(WireError, match="says that 6 of its steps were acknowledged here; it can have been 4 at most"):
        hello(desk, 1, 6, start=1, **known).join()
    desk.settle()
    assert store.most == {0: 4, 1: 6}, "one more than shard 0 has of each now"
    with pytest.raises(WireError, match="says that 7 of its steps were acknowledged here; it can have been 6 at most"):
        hello(desk, 1, 7, start=1, **known).join()
    hello(desk, 1, 6, start=1, **known).join()
    assert store.clocks()[1] == 6


def test_where_shard_0_was_lost_too_its_clocks_bound_nobody(tmp_path: Path) -> None:
    """It may be behind itself."""
    Desk(tmp_path, mode="async").begun()
    after = Desk(tmp_path, number=2, mode="async")
    for rank in range(2):
        after.hello(rank, start=2)
    after.settle()
    after.servers[1].store.attempt = 3
    after.relink(1, serving=False)
    after.settle()
    store = after.servers[1].store
    assert store.most == {}
    hello(after, 1, 9, start=2, fresh=False, attempt=2).join()
    assert store.clocks()[1] == 9
