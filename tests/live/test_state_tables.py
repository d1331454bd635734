"""Rows that are no parameters: joined by monoids, exactly, on one shard and over real sockets; in a job and out of it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import psjob as ps
from psjob.checkpoint import files
from psjob.contract import EXIT_REFUSED
from psjob.process.errors import Refused
from psjob.rules.reduction import ReductionProblem
from psjob.tables import RowTable, TableSpec
from psjob.tables.rules import COMBINES
from psjob.worker.exits import SessionEnd
from tests.live.live_shards import SECONDS, Worker, all_well, aside, serving, severed
from tests.support.covering import each_value

pytestmark = pytest.mark.usefixtures("last_words")
WIDTH, IDS, STEPS = 3, 12, 10
ORACLES: dict[str, Callable[[Any, Any], Any]] = {
    "sum": np.add, "max": np.maximum, "min": np.minimum, "or": np.logical_or, "and": np.logical_and, "count": np.add,
}  # fmt: skip
KINDS = [(name, dtype) for name in ORACLES for dtype in (torch.int32, torch.float32)]
START = {"sum": 0, "max": None, "min": None, "or": 0, "and": 1, "count": 0}


def spec(name: str, dtype: torch.dtype, rows: int | None = None) -> TableSpec:
    return TableSpec("t", WIDTH, name, rows, str(dtype).removeprefix("torch."), init="identity")


@pytest.mark.parametrize(("name", "dtype"), KINDS)
@given(data=st.data())
@settings(max_examples=15)
def test_rows_are_what_numpy_makes_of_all_pushes_in_any_grouping(name: str, dtype: torch.dtype, data: st.DataObject) -> None:
    """Ids repeat within a push; pushes come in one frame or in several, in any order."""
    element = st.integers(0, 1) if name in ("or", "and", "count") else st.integers(-9, 9)
    row = st.lists(element, min_size=WIDTH, max_size=WIDTH)
    pushes = data.draw(st.lists(st.lists(st.tuples(st.integers(-3, 3), row), min_size=1, max_size=9), max_size=5))
    expected: dict[int, Any] = {}
    for push in pushes:
        for key, values in push:
            expected[key] = ORACLES[name](expected[key], values) if key in expected else np.array(values)
    table, rule = RowTable(spec(name, dtype)), COMBINES[name]
    for clock, push in enumerate(data.draw(st.permutations(pushes))):
        ids, rows = torch.tensor([key for key, _ in push]), torch.tensor([values for _, values in push], dtype=dtype)
        table.push(*rule.distinct(ids, rows), {}, clock)
    found = dict(zip(table.export()["ids"].tolist(), table.export()["weights"], strict=True))
    assert {key: value.tolist() for key, value in found.items()} == {key: value.astype(float).tolist() for key, value in expected.items()}
    nobodys = table.pull(torch.tensor([99]))
    assert nobodys.dtype == dtype and torch.equal(rule.join(nobodys.clone(), rows_like := torch.ones_like(nobodys)), rows_like)


def test_sums_of_int32_are_exact_or_refused() -> None:
    table, one = RowTable(spec("sum", torch.int32)), torch.tensor([5])
    table.push(one, torch.full((1, WIDTH), 2**31 - 2, dtype=torch.int32), {}, 0)
    table.push(one, torch.ones(1, WIDTH, dtype=torch.int32), {}, 1)
    assert table.pull(one).tolist() == [[2**31 - 1] * WIDTH], "no float32 holds this"
    with pytest.raises(ReductionProblem, match="sums reach 2147483648, beyond int32; push smaller numbers, or take dtype float32"):
        table.push(one, torch.ones(1, WIDTH, dtype=torch.int32), {}, 2)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dtype": "int64"}, "dtype is float32 or int32, got 'int64'"),
        ({"dtype": "int32", "rule": "sgd", "init": "zeros"}, "rule sgd does not go with init zeros and dtype int32"),
        ({"rule": "sgd"}, "rule sgd does not go with init identity"),
        ({"init": "zeros"}, "rule sum does not go with init zeros"),
        ({"rule": "logsumexp", "dtype": "int32"}, "rule logsumexp does not go with init identity and dtype int32"),
    ],
)
def test_tables_that_cannot_be(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TableSpec(**{"name": "t", "dim": 2, "rule": "sum", "init": "identity"} | fields)


class Counts(nn.Module):
    """Counts and extremes, of ids of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.count = ps.Table(None, WIDTH, dtype=torch.int32)
        self.high = ps.Table(IDS, WIDTH, combine="max")


def drawn(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids that repeat, and whole numbers."""
    chance = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, IDS, (2, 20), generator=chance), torch.randint(-99, 99, (2, 20, WIDTH), generator=chance, dtype=torch.int32)


def pushing(breaks: bool = False) -> Callable[[Any], None]:
    def act(worker: Any) -> None:
        chance = random.Random(worker.rank)
        for step in range(STEPS):
            ids, values = drawn(step, worker.rank)
            for half in range(2):
                worker.model.count.push(ids[half] * 7919 - 5, values[half])
                worker.model.high.push(ids[half], values[half].float())
            if breaks and step % 3 == 1:
                with severed(worker.session.links[chance.randrange(2)]):
                    pass
            worker.optimizer.step()

    return act


def expected(workers: int) -> tuple[Any, Any]:
    """What numpy makes of all pushes."""
    count, high = np.zeros((IDS, WIDTH), dtype=np.int64), np.full((IDS, WIDTH), -np.inf, dtype=np.float32)
    for step in range(STEPS):
        for rank in range(workers):
            ids, values = (part.reshape(40, *part.shape[2:]).numpy() for part in drawn(step, rank))
            np.add.at(count, ids, values)
            np.maximum.at(high, ids, values.astype(np.float32))
    return count, high


def counts_of(model: nn.Module) -> torch.Tensor:
    return model.count.pull(torch.arange(IDS)[None] * 7919 - 5)[0]  # type: ignore[operator, no-any-return, union-attr]


@pytest.mark.parametrize(("mode", "transport", "breaks"), each_value(["sync", "async", "bounded"], ["tcp", "auto"], [True, False]))
def test_every_push_of_every_worker_counts_once(tmp_path: Path, mode: str, transport: str, breaks: bool) -> None:
    """Links are cut with pushes on their way. The counts are exact, on the shards and in the final file."""
    held: list[torch.Tensor] = []

    def act(worker: Worker) -> None:
        pushing(breaks)(worker)
        held.append(counts_of(worker.model))

    with serving(tmp_path, workers=3, shards=2, mode=mode, transport=transport) as shards:
        workers = []
        for rank in range(3):
            model, loop = Counts(), None
            loop = torch.optim.SGD([model.count.anchor, model.high.anchor], lr=0.0)
            workers.append(Worker(shards, rank, model, loop))
        all_well(workers, act)
        assert shards.wait_ended() == [0, 0]
    count, high = expected(3)
    final = files.read_blocks(tmp_path / "run-1" / "final.safetensors")
    assert final["count.ids"].tolist() == [7919 * key - 5 for key in range(IDS)]
    assert final["count.weight"].dtype == torch.int32 and np.array_equal(final["count.weight"].numpy(), count)
    assert np.array_equal(final["high.weight"].numpy(), high)
    assert mode != "sync" or all(np.array_equal(rows.numpy(), count) for rows in held), "after a step of sync all see all pushes"


def test_outside_a_job_the_same_script_comes_to_the_same(tmp_path: Path) -> None:
    model, loop = ps.attach(Counts())
    before = counts_of(model)
    pushing()(type("Here", (), {"model": model, "optimizer": loop, "rank": 0})())
    count, high = expected(1)
    assert before.dtype == torch.int32 and not before.any()
    assert np.array_equal(counts_of(model).numpy(), count) and np.array_equal(model.high(torch.arange(IDS)).numpy(), high)


def test_what_is_pushed_counts_at_the_step_and_is_prefetched_after_it(tmp_path: Path) -> None:
    seen: list[list[int]] = []

    def act(worker: Worker) -> None:
        table, ids = worker.model.count, torch.tensor([3])
        for _ in range(3):
            table.push(ids, torch.full((1, WIDTH), 1 + worker.rank, dtype=torch.int32))
            before = table.pull(ids)
            table.prefetch(ids)
            worker.optimizer.step()
            seen.append([int(before[0, 0]), int(table.pull(ids)[0, 0])])

    with serving(tmp_path, workers=2, shards=1) as shards:
        models = [Counts() for _ in range(2)]
        all_well([Worker(shards, rank, m, torch.optim.SGD(m.parameters(), lr=0.0)) for rank, m in enumerate(models)], act)
    assert sorted(seen) == [[0, 3], [0, 3], [3, 6], [3, 6], [6, 9], [6, 9]]


def test_steps_that_are_made_again_push_nothing(tmp_path: Path) -> None:
    """A worker that uses no `ps.shard` makes its steps again after a restart."""

    def run(start: int, steps: int) -> Worker:
        model = Counts()
        worker = Worker(shards, 0, model, torch.optim.SGD(model.parameters(), lr=0.0), start=start)
        worker.attach()
        for step in range(steps):
            ids, values = drawn(step, 0)
            model.count.push(ids, values)
            worker.optimizer.step()
        return worker

    with serving(tmp_path, workers=1, shards=1, mode="async") as shards:
        run(1, steps=3).die()
        second = run(2, steps=4)
        rows = shards.servers[0].store.row_cells[0].table.pull(torch.arange(IDS))
        second.die()
    assert rows.sum(0).tolist() == sum(drawn(step, 0)[1].sum((0, 1)) for step in range(4)).tolist()  # type: ignore[union-attr]


def test_a_sum_beyond_int32_ends_the_job_with_a_sentence(tmp_path: Path) -> None:
    with serving(tmp_path, workers=1, shards=1) as shards:
        model = Counts()
        worker = Worker(shards, 0, model, torch.optim.SGD(model.parameters(), lr=0.0))
        worker.attach()
        most = torch.full((1, WIDTH), 2**30, dtype=torch.int32)
        model.count.push(torch.tensor([1]), most)
        worker.optimizer.step()
        model.count.push(torch.tensor([1]), most)
        pushed = aside(worker.optimizer.step)
        assert shards.wait_ended() == [EXIT_REFUSED]
        worker.session._end(SessionEnd("lost"))
        pushed.join(SECONDS)
        with pytest.raises(ValueError, match="sums reach 2147483648, beyond int32"):
            model.count.push(torch.tensor([1, 1]), torch.cat([most, most]))
    assert shards.servers[0].termination_message["error"].startswith("step 1 of table count: sums reach 2147483648, beyond int32")


@pytest.mark.parametrize(
    ("act", "error", "words"),
    [
        (lambda m: m.count.push(torch.tensor([1]), torch.ones(1, WIDTH)), ValueError, "values for a table are torch.int32 of shape .1, 3."),
        (lambda m: m.count.push(torch.tensor([1]), torch.ones(WIDTH, dtype=torch.int32)), ValueError, "got torch.int32 of .3."),
        (lambda m: m.high.push(torch.tensor([IDS]), torch.ones(1, WIDTH)), IndexError, "ids go from 12 to 12, there are 12 rows"),
        (lambda m: m.high.pull(torch.tensor([-1])), IndexError, "ids go from -1 to -1"),
        (lambda m: m.high.pull(torch.tensor([0.5])), TypeError, "ids of rows are whole numbers"),
        (lambda m: Counts().count.push(torch.tensor([1]), torch.ones(1, WIDTH, dtype=torch.int32)), RuntimeError, "call ps.attach"),
        (lambda m: ps.Table(3, 2, combine="mean"), ValueError, "combine is one of sum, max, min, or, and, count, logsumexp, got 'mean'"),
        (lambda m: ps.Table(3, 2, dtype=torch.int64), ValueError, "dtype of a Table is torch.float32 or torch.int32"),
        (lambda m: ps.Table(3, 2, "logsumexp", torch.int32), ValueError, "not with logsumexp"),
    ],
)
def test_what_a_table_does_not_take(act: Callable[[Any], Any], error: type[Exception], words: str) -> None:
    model, _ = ps.attach(Counts())
    with pytest.raises(error, match=words):
        act(model)


def test_a_model_without_an_optimizer_has_tables_alone() -> None:
    for model, words in ((nn.Linear(2, 1), "this one has parameter weight"), (nn.ReLU(), "this one has none")):
        with pytest.raises(Refused, match=words):
            ps.attach(model)


def test_what_would_lose_pushes_and_an_embedding_that_joins_are_refused(tmp_path: Path, last_words: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = ps.Embedding(9, 2, optimizer="sum")

    with serving(tmp_path, workers=1, shards=1) as shards:
        odd, model = Odd(), Counts()
        with pytest.raises(Refused, match="rule sum does not go with init normal"):
            Worker(shards, 0, odd, torch.optim.SGD(odd.parameters(), lr=0.1))
        backups = replace(shards.config, workers=2, backup_workers=1)
        with mock.patch.object(shards, "config", backups), pytest.raises(Refused, match="backupWorkers 1: a step may leave a push out"):
            Worker(shards, 0, model, torch.optim.SGD(model.parameters(), lr=0.0))
        worker = Worker(shards, 0, model, torch.optim.SGD(model.parameters(), lr=0.0))
        worker.attach()
        worker.optimizer.found_inf = torch.zeros(1)  # type: ignore[attr-defined]
        with pytest.raises(SystemExit):
            worker.optimizer.step()
        worker.die()
    assert "a skipped step loses what a ps.Table was given" in last_words.read_text()


@pytest.mark.parametrize("mode", ["async", "bounded"])
def test_a_push_is_answered_when_it_has_been_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """What a push lies in is the worker's again after its step: a slow shard, which has tables alone, must have read it by then."""
    plain = RowTable.push

    def slow(table: RowTable, *given: Any) -> int:
        time.sleep(0.03)
        return plain(table, *given)

    monkeypatch.setattr(RowTable, "push", slow)
    seen = torch.zeros(IDS)

    def act(worker: Worker) -> None:
        for step in range(5):
            worker.model.count.push(torch.arange(IDS), torch.full((IDS, WIDTH), 10**step, dtype=torch.int32))
            worker.optimizer.step()
        seen.copy_(worker.model.count.pull(torch.arange(IDS))[:, 0])

    with serving(tmp_path, workers=1, shards=2, mode=mode, transport="auto") as shards:
        model = Counts()
        del model.high
        all_well([Worker(shards, 0, model, torch.optim.SGD(model.parameters(), lr=0.0))], act)
    assert seen.tolist() == [11111] * IDS
