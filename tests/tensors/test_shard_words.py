"""What a worker says of its clocks is held against what its shard knows: a wrong number is refused with a sentence, and changes nothing.

- What a worker with a key says beside its pushes: names, aliases and clocks that cannot be are not taken.
- What workers of stages and the coordinator say to each other: keys of links, steps that were lost, what a job of stages refuses.
- What a worker believes of the ids that a shard names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from psjob.api import stage_cuts
from psjob.api.stage_cuts import StageCuts
from psjob.contract import keys
from psjob.layout.blocks import MAX_NAME, RESERVED, TensorSpec, check_aliases, check_table
from psjob.modes.stages import Stages
from psjob.pipeline.cuts import split_model
from psjob.process.config import Config
from psjob.process.errors import Refused
from psjob.protocol.coordinator.events import StepLost
from psjob.protocol.messages import Malformed
from psjob.shard.checks import MOST_AHEAD, check_leave
from psjob.shard.coordinator_driver import numbers_of
from psjob.shard.session import Session
from psjob.tables import Partition, TableSpec
from psjob.wire.auth import Peer
from psjob.wire.frame import Header, Kind, WireError
from psjob.worker.rows import check_page
from psjob_operator.cluster.observe import parse_status
from tests.live.live_shards import NEVER
from tests.support.runkeys import RUN
from tests.tensors.desk import Clerk, Desk
from tests.tensors.whole_shard import HELLO, RECORD, WholeShard, frame


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


def test_reported_numbers_have_printable_names() -> None:
    body: Mapping[str, Any] = {"\x1b[2Jloss\n": 1.0, "a\u202eb": 1, "\ud800": 2.0, "x\ny": "nan", "loss": 2, "Güte 1": 0.5}
    assert numbers_of(body) == {"loss": 2, "Güte 1": 0.5}


def test_the_operator_keeps_no_escapes_in_names() -> None:
    told = parse_status(b'{"coordinator": {"metrics": {"\\u001b[2Jloss\\n": 1.0}}}')
    assert told is not None and told["coordinator"]["metrics"] == {r"\x1b[2Jloss\n": 1.0}


@pytest.mark.parametrize("clock", [1 << 62, (1 << 63) - 1, MOST_AHEAD + 1])
@pytest.mark.parametrize("kind", [Kind.RECORD, Kind.MARK])
def test_a_clock_that_nobody_has_come_to_ends_the_stream(tmp_path: Path, clock: int, kind: Kind) -> None:
    shard = WholeShard(tmp_path)
    try:
        shard.begin()

        def say(base: Header) -> Sequence[tuple[bytes, bytes]]:
            hello = frame(Kind.HELLO, HELLO, base)
            near = frame(Kind.RECORD, RECORD, base, clock=1)
            far = frame(kind, RECORD if kind is Kind.RECORD else b"", base, clock=clock)
            return [hello, near, far, frame(Kind.RECORD, RECORD, base, clock=2)]

        heard = shard.converse(Peer("worker", 0, 1), say)
        assert f"worker 0 names step {clock}; this shard has 0 complete steps".encode() in heard
        member = shard.coordinator.machine.state.members[0]
        assert member.clock == 1 and 1 in member.records
    finally:
        shard.close()


ODD_ALIASES: list[tuple[dict[Any, Any], str]] = [
    ({RESERVED: "w0"}, "files of tensors keep the name '__metadata__'"),
    ({"w1": "w0"}, "'w1' is a further name of a tensor, and the name of another one"),
    ({"w0": "w0"}, "'w0' is a further name"),
    ({"": "w0"}, "printable characters"),
    ({"a\n": "w0"}, "printable characters"),
    ({"\ud800": "w0"}, "printable characters"),
    ({"a" * (MAX_NAME + 1): "w0"}, "printable characters"),
    ({"a": "x"}, "'a' is a further name of 'x', which is no tensor"),
    ({"a": 1}, "which is no tensor"),
    ({"a": ["w0"]}, "which is no tensor"),
]


@pytest.mark.parametrize(("aliases", "why"), ODD_ALIASES)
def test_aliases_that_no_file_can_hold_are_refused_in_a_hello(tmp_path: Path, aliases: dict[Any, Any], why: str) -> None:
    shard = WholeShard(tmp_path)
    try:
        heard = shard.converse(Peer("worker", 0, 1), lambda base: [frame(Kind.HELLO, HELLO | {"aliases": aliases}, base)])
        assert why.encode() in heard and b"refused" in heard
        assert shard.coordinator.machine.state.aliases == ()
    finally:
        shard.close()


def test_an_alias_of_a_tensor_is_taken_and_a_reserved_name_is_no_tensor(tmp_path: Path) -> None:
    check_aliases({"head.weight": "w"}, (TensorSpec("w", (2,), "float32", 0),))
    with pytest.raises(ValueError, match="keep the name '__metadata__'"):
        check_table((TensorSpec(RESERVED, (2,), "float32", 0),))
    shard = WholeShard(tmp_path)
    try:
        shard.converse(Peer("worker", 0, 1), lambda base: [frame(Kind.HELLO, HELLO | {"aliases": {"tied": "w1"}}, base)])
        assert shard.coordinator.machine.state.aliases == (("tied", "w1"),)
    finally:
        shard.close()


JOB = Config("job", "run", "0", "sync", 0, None, 2, (), NEVER, "AllWorkers", 10.0, 10.0, stages=Stages((1, 1)))


def test_a_stage_has_parameters_and_buffers_of_its_own() -> None:
    rows = [TensorSpec("a", (1,), "float32", 0, (0,)), TensorSpec("b", (1,), "float32", 0, (0,))]
    with pytest.raises(Refused, match="stage 1 has no parameter that the optimizer trains"):
        stage_cuts.check_stage_table(JOB, rows)
    stage_cuts.check_stage_table(JOB, [*rows, TensorSpec("c", (1,), "float32", 0, (0, 1))])
    norm = nn.BatchNorm1d(4)
    with pytest.raises(Refused, match=r"buffer 1\.running_mean is in stages 0 and 1"):
        stage_cuts.stage_cuts_of(split_model(nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), norm), [2]), 0)


def test_two_workers_have_one_key_and_each_reads_it_with_its_own() -> None:
    ends = {3: 1, 4: 2}
    link = keys.link_key(RUN["workers"], ends)
    assert keys.link_key(RUN["workers"], {4: 2, 3: 1}) == link
    for rank, start in ends.items():
        own = keys.worker_key(RUN["workers"], rank, start)
        masked = keys.masked(own, link, ends)
        assert masked != link and keys.masked(own, masked, ends) == link
    others = [{3: 1, 4: 1}, {3: 2, 4: 2}, {3: 1, 5: 2}, {2: 1, 4: 2}]
    assert len({keys.link_key(RUN["workers"], other) for other in [ends, *others]}) == 5


@pytest.mark.parametrize(
    "body", [{}, {"rank": 2, "step": 1}, {"rank": -1, "step": 1}, {"rank": 0, "step": -1}, {"rank": 0}, {"rank": "0", "step": 1}]
)
def test_a_step_that_was_lost_names_a_worker_and_a_step(body: dict[str, Any]) -> None:
    assert StepLost.of(7, {"rank": 1, "step": 5}, 2) == StepLost(7, 1, 5)
    with pytest.raises(Malformed):
        StepLost.of(7, body, 2)


def test_a_job_of_stages_trains_one_model_that_was_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_cuts, "_known", [])
    model = nn.Linear(1, 1)
    with pytest.raises(Refused, match=r"cut the model with ps\.pipeline"):
        stage_cuts.known_cuts(model, JOB)
    stage_cuts.remember(model, StageCuts({"weight": (0,)}, frozenset()))
    assert stage_cuts.known_cuts(model, JOB).stages == {"weight": (0,)}
    with pytest.raises(Refused, match="called twice"):
        stage_cuts.remember(nn.Linear(1, 1), StageCuts())
    assert stage_cuts.known_cuts(nn.Linear(1, 1), replace(JOB, stages=Stages())) is stage_cuts.WHOLE


TWO = Partition.even(2)
OPEN, CLOSED = TableSpec("user", 4, "sgd", None), TableSpec("page", 4, "sgd", 50)
HERE = torch.arange(-100, 100)[TWO.shard_of(torch.arange(-100, 100)) == 0]
THERE = torch.arange(50)[TWO.shard_of(torch.arange(50)) == 1]
EDGES = torch.tensor([-(1 << 63), (1 << 63) - 1])


@pytest.mark.parametrize(
    ("spec", "above", "ids", "words"),
    [
        (OPEN, None, HERE[:0], ""),
        (OPEN, None, HERE, ""),
        (OPEN, HERE[3:4], HERE[4:], ""),
        (OPEN, HERE[3:4], HERE[3:], "not in ascending order"),
        (OPEN, HERE[3:4], HERE[:2], "not in ascending order"),
        (OPEN, None, HERE.flip(0), "not in ascending order"),
        (OPEN, None, HERE[[0, 1, 1]], "not in ascending order"),
        (OPEN, None, EDGES.flip(0), "not in ascending order"),
        (OPEN, None, THERE, "shard 0 names rows of other shards"),
        (CLOSED, None, HERE[HERE >= 0][:5], ""),
        (CLOSED, None, HERE[:3], "ids go from -.* and it has 50 rows"),
        (CLOSED, None, HERE[HERE >= 0], "ids go from .* and it has 50 rows"),
    ],
)
def test_ids_ascend_are_rows_and_lie_there(spec: TableSpec, above: torch.Tensor | None, ids: torch.Tensor, words: str) -> None:
    if not words:
        check_page(spec, TWO, 0, above, ids)
        return
    with pytest.raises(WireError, match=f"ROW_IDS of table {spec.name}: .*{words}"):
        check_page(spec, TWO, 0, above, ids)
