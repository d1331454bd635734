"""Async checkpoints hold every worker's pushes for a moment: only when all can take part, and never for long.

- A run begins with one whole checkpoint of step 0, whatever goes wrong on the way there.
- The coordinator's sum of how late pushes were on every shard: it counts each once, whatever begins anew, and nobody can break it.
- How late pushes were, as it is told: the summary of a run.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psjob.layout.blocks import TensorSpec
from psjob.protocol import messages
from psjob.protocol.coordinator import events as e
from psjob.shard.deduplication import Verdict
from psjob.shard.push_metrics import GAPS, STALENESS_EDGES, Histogram, StalenessHistogram, StalenessMetrics, _Seen
from psjob.wire.frame import Header, Kind
from psjob_client.local.status import lateness, staleness_line
from tests.tensors.desk import NEVER, Desk, in_the_way, mark
from tests.unit.coordinator_world import World


def due(desk: Desk, later: float = 2.0) -> None:
    """The interval is over, and once more."""
    desk.tick(later=1.0 + NEVER.interval_seconds)
    desk.settle()
    desk.tick(later=later - 1.0)
    desk.settle()


def test_nobody_holds_for_a_checkpoint_while_a_worker_is_away(tmp_path: Path) -> None:
    """It would be void for want of the missing one's mark, after ten seconds of everybody's time."""
    desk = Desk(tmp_path, mode="async")
    here = desk.hello(0)
    desk.give(here)
    desk.settle()
    desk.push(here, 0)
    due(desk)
    assert desk.c.progress.checkpoint_problem is None, "it may only have to dial again"
    due(desk, later=20.0)
    assert Kind.MARK not in here.heard and "[1]" in str(desk.c.progress.checkpoint_problem)
    came = desk.hello(1)
    desk.settle()
    due(desk)
    assert here.heard.count(Kind.MARK) == came.heard.count(Kind.MARK) == 1
    mark(desk, here, 1)
    mark(desk, came, 0)
    desk.settle()
    assert desk.c.snapshots.current is None and desk.c.progress.checkpoint_problem is None
    assert {rank: entry["clock"] for rank, entry in desk.manifests()[-1].workers.items()} == {"0": 1, "1": 0}
    came.gone()
    due(desk)
    assert here.heard.count(Kind.MARK) == 1


def test_who_has_left_is_not_missed(tmp_path: Path) -> None:
    desk = Desk(tmp_path, mode="async")
    clerks = desk.begun()
    desk.push(clerks[0], 0)
    desk.leave(clerks[1], 0)
    clerks[1].gone()
    desk.hear()
    due(desk)
    assert clerks[0].heard.count(Kind.MARK) == 1
    mark(desk, clerks[0], 1)
    desk.settle()
    assert desk.manifests()[-1].workers["1"]["leftAt"] == 0


def test_a_push_that_a_checkpoint_holds_in_part_counts_once_on_other_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker dies in the middle of a push, and its successor marks a snapshot before it makes that step. The run has one shard."""
    monkeypatch.setattr("tests.tensors.desk.TABLE", (TensorSpec("w", (1 << 16,), "float32", 0),))
    desk = Desk(tmp_path, mode="async")
    clerks = desk.begun()
    for clerk in clerks:
        desk.push(clerk, 0)
    store = desk.servers[0].store
    first = min(store.cells.values(), key=lambda cell: cell.position)
    assert len(store.cells) > 1 and store.admission.admit(0, (1, 0), 1, first.position) is Verdict.ADMIT
    clerks[0].gone()
    desk.hear()
    again = desk.hello(0, start=2)
    desk.settle()
    desk.begin_snapshot()
    desk.settle()
    for clerk in (again, clerks[1]):
        mark(desk, clerk, 1)
    desk.settle()
    (made,) = desk.manifests()[-1:]
    assert made.step > 0
    back = Desk(tmp_path, shards=1, number=2, mode="async")
    (server,) = back.servers
    row = server.store.admission.rows[0]
    assert back.c.open and row.complete == 1 and server.store.admission.rows[1].open == set()
    assert {index for index, cell in server.store.cells.items() if cell.position in row.open} == {first.index}
    before = {index: cell.n for index, cell in server.store.cells.items()}
    clerk = back.hello(0, start=2, rewinds=1)
    back.settle()
    back.push(clerk, 1)
    assert {index for index, cell in server.store.cells.items() if cell.n == before[index]} == {first.index}, "there it would count twice"
    assert row.complete == 2


def test_a_failed_checkpoint_of_step_0_is_tried_again(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    first, second = desk.hello(0), desk.hello(1)
    in_the_way(desk, 1)
    desk.give(first)
    desk.settle()
    assert desk.c.snapshots.current is None and "c065537-shard000" in str(desk.c.progress.checkpoint_problem)
    desk.tick()
    assert desk.c.snapshots.current is None, "not at once"
    desk.tick(later=6.0)
    desk.settle()
    assert [made.step for made in desk.manifests()] == [0]
    assert first.heard[-2:] == second.heard[-2:] == [Kind.WELCOME, Kind.RECORD]


def test_a_first_record_that_is_none_is_told_and_ends_no_shard(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    first = desk.hello(0)
    desk.hello(1)
    for server in desk.servers:
        for block, cell in server.store.cells.items():
            if server.store.initialise(block, torch.zeros(cell.block.length)):
                server.initialised()
    desk.say(first, Header(Kind.RECORD, clock=-1), {}, b"rubbish, longer than a record's first bytes")
    desk.settle()
    assert not desk.manifests() and "a resume record is not in shape" in str(desk.c.progress.checkpoint_problem)
    again = desk.hello(0, start=2)
    desk.give(again)
    desk.tick(later=6.0)
    desk.settle()
    assert [made.step for made in desk.manifests()] == [0]


def test_a_rank_0_that_begins_anew_voids_the_checkpoint_of_what_it_gave_before(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.give(desk.hello(0), value=1.0)
    desk.hear()
    assert desk.c.snapshots.current is not None
    again = desk.hello(0, start=2)
    desk.settle()
    assert desk.c.initialising and not desk.manifests()
    desk.give(again, value=2.0)
    desk.settle()
    (made,) = desk.manifests()
    assert desk.weights(made) == {2.0} and made.workers["0"]["start"] == 2
    assert again.heard[-2:] == [Kind.WELCOME, Kind.RECORD]


def test_a_shard_that_has_first_values_of_an_earlier_try_is_still_waited_for(tmp_path: Path) -> None:
    """Rank 0 came anew while shard 1 said that it had all of them: that is no word on what it was told since."""
    desk = Desk(tmp_path)
    desk.give(desk.hello(0), value=1.0)
    again = desk.hello(0, start=2)
    desk.give(again, value=2.0, shards=[0])
    desk.hear()
    assert desk.c.snapshots.current is None
    desk.give(again, value=2.0, shards=[1])
    desk.settle()
    desk.tick(later=1.0)  # the shards may still have been at the file of the snapshot that is void
    desk.settle()
    (made,) = desk.manifests()
    assert desk.weights(made) == {2.0} and again.heard[-2:] == [Kind.WELCOME, Kind.RECORD]


class Asking(World):
    """Shards are asked for first values, and answer when a test says so."""

    def __init__(self, term: int) -> None:
        super().__init__(term=term)
        self.setup = -1
        self.post(e.Started())
        self.shard(1, term=term)
        self.stream = self.hello(0)

    def order(self, shard: int, body: Mapping[str, Any]) -> None:
        if body["do"] == "setup":
            self.setup = body["setup"]
        else:
            super().order(shard, body)


def test_values_for_an_earlier_coordinator_are_no_answer_to_this_one() -> None:
    """Shard 1 has all that rank 0 gave to the coordinator before, and is yet to hear that this one asks for it anew."""
    before, world = Asking(1), Asking(2)
    world.post(e.RecordCame(world.stream, -1, b"initial"), messages.Initialised(0, world.setup), messages.Initialised(1, before.setup))
    assert world.c.initialising and not world.sent["snapshot"]
    world.post(messages.Initialised(1, world.setup))
    assert world.c.open


def test_a_failed_restore_that_is_over_sends_nobody_back(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    clerks = desk.begun()
    for clerk in clerks:
        desk.push(clerk, 0)
    desk.coordination.answer(1, {"did": "unrestored", "restore_id": desk.c.restore_id - 1, "why": "of an earlier try"})
    desk.settle()
    assert desk.c.open and desk.versions() == {1} and clerks[0].heard[-1] is Kind.RECORD


def word(attempt: int, began: float, values: list[int]) -> dict[str, Any]:
    """As `StalenessMetrics.word` writes it."""
    staleness = Histogram(STALENESS_EDGES)
    for value in values:
        staleness.see(value)
    return {"did": "staleness", "attempt": attempt, "began": began, "staleness": staleness.told(), "gap": Histogram(GAPS).told()}


def counts(lateness: StalenessHistogram) -> tuple[int, float, float]:
    staleness = lateness.told()["staleness"]
    return staleness["count"], staleness["sum"], staleness["max"]


def test_until_a_shard_has_told_nothing_is_known() -> None:
    assert StalenessHistogram().told() == {"staleness": None, "gap": None}


def test_shards_add_up_and_what_one_of_them_had_seen_stays() -> None:
    lateness = StalenessHistogram()
    for shard in range(3):
        lateness.heard(shard, word(1, 5.0, []))
    lateness.heard(0, word(1, 5.0, [1, 1]))
    lateness.heard(1, word(1, 5.0, [7]))
    assert counts(lateness) == (3, 9.0, 7.0)
    lateness.heard(0, word(1, 5.0, [1, 1, 2]))
    lateness.heard(1, word(2, 0.5, [3]))
    assert counts(lateness) == (5, 14.0, 7.0), "shard 1 is another process, of a clock of its own"
    lateness.heard(1, word(1, 5.0, [7, 7]))
    assert counts(lateness) == (5, 14.0, 7.0), "the lost one's word came late"
    lateness.heard(1, word(2, 9.0, [4]))
    assert counts(lateness) == (6, 18.0, 7.0), "it was restored where it was"
    told = lateness.told()["staleness"]
    assert [count for edge, count in told["buckets"] if edge in (0, 1, 2, 3, 4, 8)] == [0, 2, 3, 4, 5, 6]


def test_a_new_coordinator_counts_from_0() -> None:
    """Or a series that fell by shard 0's part would seem to have grown by all of the others'."""
    lateness = StalenessHistogram()
    lateness.heard(1, word(1, 5.0, [2] * 100))
    assert counts(lateness)[0] == 0
    lateness.heard(1, word(1, 5.0, [2] * 101))
    assert counts(lateness)[:2] == (1, 2.0)


def test_a_shard_says_what_it_has_seen() -> None:
    staleness = StalenessMetrics(1, None)
    lateness = StalenessHistogram()
    lateness.heard(1, staleness.word(1))
    staleness.add(0, 0, _Seen(4), {})
    lateness.heard(1, staleness.word(1))
    assert counts(lateness) == (1, 4.0, 4.0)


@given(st.integers(0, 10_000))
def test_each_push_is_counted_once_whatever_begins_anew(seed: int) -> None:
    chance, lateness = random.Random(seed), StalenessHistogram()
    attempts, seen, told, whole = [1, 1, 1], [[], [], []], [0, 0, 0], 0  # type: ignore[var-annotated]
    for shard in range(3):
        lateness.heard(shard, word(1, 0.0, []))
    for _ in range(40):
        shard = chance.randrange(3)
        act = chance.choice(["push", "push", "tell", "again"])
        if act == "push":
            seen[shard].append(chance.randrange(2000))
        elif act == "tell":
            lateness.heard(shard, word(attempts[shard], 0.0, seen[shard]))
            whole, told[shard] = whole + len(seen[shard]) - told[shard], len(seen[shard])
        else:
            attempts[shard], seen[shard], told[shard] = attempts[shard] + 1, [], 0
        assert lateness.told()["staleness"]["count"] == whole


GOOD = word(1, 5.0, [1, 2, 3])


@pytest.mark.parametrize("change", [
    {"attempt": "x"},
    {"began": None},
    {"staleness": None},
    {"staleness": {}},
    {"staleness": GOOD["staleness"] | {"buckets": []}},
    {"staleness": GOOD["staleness"] | {"buckets": [[edge * 2, count] for edge, count in GOOD["staleness"]["buckets"]]}},
    {"staleness": GOOD["staleness"] | {"buckets": [[edge, -1] for edge in STALENESS_EDGES]}},
    {"staleness": GOOD["staleness"] | {"buckets": [[edge, "?"] for edge in STALENESS_EDGES]}},
    {"staleness": GOOD["staleness"] | {"count": 2}},
    {"staleness": GOOD["staleness"] | {"sum": float("nan")}},
    {"gap": GOOD["gap"] | {"max": float("inf")}},
], ids=str)  # fmt: skip
def test_what_is_no_such_word_is_refused_and_changes_nothing(change: dict[str, Any]) -> None:
    lateness = StalenessHistogram()
    lateness.heard(1, word(1, 5.0, []))
    lateness.heard(1, GOOD)
    before = lateness.told()
    with pytest.raises((ValueError, KeyError, TypeError)):
        lateness.heard(1, GOOD | change)
    assert lateness.told() == before and before["staleness"]["count"] == 3


def told(values: list[float], gaps: list[float] = []) -> dict[str, Any]:  # noqa: B006
    """As a shard's status port says it."""
    staleness, gap = Histogram(STALENESS_EDGES), Histogram(GAPS)
    for value in values:
        staleness.see(value)
    for value in gaps:
        gap.see(value)
    found: dict[str, Any] = json.loads(json.dumps({"staleness": staleness.told(), "gap": gap.told()}))
    return found


def test_shards_are_summed_and_a_quantile_is_the_edge_of_its_bucket() -> None:
    late = lateness([told([0, 1, 1], [0.5]), told([2, 5], [1.5, 1.0]), {"staleness": None, "gap": None}, {}])
    assert late == {"staleness": {"median": 1, "p95": 5, "max": 5, "mean": 1.8}, "gap": {"mean": 1.0, "max": 1.5}}
    assert staleness_line(late) == "staleness of pushes: 1 updates (median), 5 (95 %), 5 (largest); the mean gap was 1"
    assert lateness([told([7] * 20)]) is not None and lateness([told([7] * 20 + [20])])["staleness"]["p95"] == 8  # type: ignore[index]


@pytest.mark.parametrize("statuses", [[], [{}], [{"staleness": None}], [{"staleness": "x", "gap": 3}], [told([])]])
def test_a_run_without_late_pushes_has_nothing_to_tell(statuses: list[dict[str, Any]]) -> None:
    assert lateness(statuses) is None


def test_staleness_beyond_every_bucket_is_told_by_the_largest() -> None:
    late = lateness([told([5000])])
    assert late is not None and late["staleness"]["p95"] == late["staleness"]["median"] == 5000
