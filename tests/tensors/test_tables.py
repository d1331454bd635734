"""A table as a shard holds it: first values, admission, eviction, merging, partition, snapshots."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from psjob.rules.base import check_hyperparameters
from psjob.tables import BUCKETS, Partition, RowTable, TableSpec, bucket_of, merge
from psjob.tables.rules import named
from psjob.tables.slab import Slab
from psjob.tables.spec import initial_rows

torch.set_num_threads(1)

LR = check_hyperparameters(named("sgd"), {"lr": 1.0})
ADAM = check_hyperparameters(named("adam"), {"lr": 0.1})


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def ones(count: int, dim: int = 3) -> torch.Tensor:
    return torch.ones(count, dim)


def small(**more: Any) -> TableSpec:
    return TableSpec(**{"name": "t", "dim": 3, "rule": "sgd", **more})


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"name": ""}, "name matches"),
        ({"name": "a/b"}, "name matches"),
        ({"dim": 0}, "dim is a whole number from 1 to 65536, got 0"),
        ({"dim": True}, "dim is a whole number"),
        ({"rule": "lion"}, "no rule 'lion'"),
        ({"num_rows": 0}, "num_rows is a whole number from 1"),
        ({"dtype": "float16"}, "dtype is float32"),
        ({"init": "xavier"}, "init is one of normal, uniform, zeros"),
        ({"scale": float("nan")}, "scale is a finite number"),
        ({"admit_after": 256}, "admit_after is a whole number from 1 to 255, got 256"),
        ({"evict_after": 0}, "evict_after is a whole number from 1"),
    ],
)
def test_a_spec_names_what_is_wrong(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        small(**wrong)


def test_a_spec_survives_json() -> None:
    spec = small(num_rows=7, init="uniform", scale=0.5, seed=-3, admit_after=4, evict_after=90)
    assert TableSpec.from_json(spec.to_json()) == spec
    with pytest.raises(ValueError, match=r"unknown: \['colour'\]"):
        TableSpec.from_json(spec.to_json() | {"colour": 1})


# -- first values --------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.sampled_from(["normal", "uniform"]), st.integers(1, 37), st.integers(1, 70), st.integers(0, 1 << 40))
def test_a_row_begins_alike_wherever_it_is_asked_for(init: str, dim: int, count: int, salt: int) -> None:
    """Alone, in a batch, on another shard: the same bits."""
    spec = small(dim=dim, init=init, scale=0.1)
    many = torch.arange(count) * 7919 + salt
    together = initial_rows(spec, many)
    at = salt % count
    assert torch.equal(together[at], initial_rows(spec, many[at : at + 1])[0])
    assert torch.equal(together.flip(0), initial_rows(spec, many.flip(0)))


def test_first_values_have_the_shape_that_was_asked_for() -> None:
    many = torch.arange(4000)
    normal, uniform = initial_rows(small(dim=32, scale=2.0), many), initial_rows(small(dim=32, init="uniform", scale=3.0), many)
    assert abs(float(normal.mean())) < 0.02 and abs(float(normal.std()) - 2) < 0.02
    assert abs(float((normal / 2).pow(4).mean()) - 3) < 0.1  # the kurtosis of a normal distribution
    assert float(uniform.min()) >= -3 and float(uniform.max()) <= 3 and abs(float(uniform.std()) - 3**0.5) < 0.02
    assert len(torch.unique(normal)) > 0.99 * normal.numel()
    corr = torch.corrcoef(normal.T) - torch.eye(32)
    assert float(corr.abs().max()) < 0.1
    assert not torch.equal(initial_rows(small(seed=1), many), initial_rows(small(seed=2), many))
    assert not torch.equal(initial_rows(small(name="a"), many), initial_rows(small(name="b"), many))
    assert not initial_rows(small(init="zeros"), many).any()


def test_first_values_never_change() -> None:
    """A golden: a checkpoint leaves rows out that were never pushed, so their values must not depend on the release."""
    found = initial_rows(small(seed=1), ids(0, -5))
    golden = torch.tensor(GOLDEN)
    torch.testing.assert_close(found, golden, rtol=0, atol=1e-6)


GOLDEN = [[-1.3899343, 0.599975, 0.5606822], [1.5900632, 1.2974447, 0.6520404]]


# -- pull and push -------------------------------------------------------------------------------


def test_a_pull_makes_no_row_and_a_push_does() -> None:
    table = RowTable(small())
    first = table.pull(ids(5, -9, 5))
    assert len(table) == 0 and torch.equal(first[0], first[2])
    table.push(ids(-9), ones(1), LR, 0)
    assert len(table) == 1
    assert torch.equal(table.pull(ids(-9, 5)), torch.stack([first[1] - 1, first[0]]))
    first.zero_()
    assert table.pull(ids(5)).any()


def test_slots_that_were_given_back_are_taken_first() -> None:
    slab = Slab(4, {}, 6)
    slab.give_back(slab.take(5)[1:4])
    assert sorted(slab.take(3).tolist()) == [1, 2, 3] and slab.take(1).tolist() == [5]
    with pytest.raises(MemoryError, match="room for 6 rows on a shard, 7 are asked for"):
        slab.take(1)


def test_what_does_not_fit_is_refused() -> None:
    table = RowTable(small(num_rows=10))
    with pytest.raises(ValueError, match="table t: ids are 0 to 9, got 10"):
        table.pull(ids(3, 10))
    with pytest.raises(ValueError, match="ids are 0 to 9, got -1"):
        table.push(ids(-1), ones(1), LR, 0)
    with pytest.raises(ValueError, match=r"gradients are float32 of \(1, 3\)"):
        table.push(ids(1), ones(1, 4), LR, 0)
    with pytest.raises(ValueError, match="vector of int64"):
        table.pull(torch.zeros(2))


def test_a_row_comes_when_it_was_named_often_enough() -> None:
    table = RowTable(small(admit_after=3))
    first = table.pull(ids(1, 2))
    for clock in range(2):
        assert table.push(ids(1, 2), ones(2), LR, clock) == 0
    assert len(table) == 0 and torch.equal(table.pull(ids(1, 2)), first)
    assert table.push(ids(1, 3), ones(2), LR, 2) == 1
    assert len(table) == 1 and torch.equal(table.pull(ids(1, 2)), first - torch.tensor([[1.0], [0.0]]))


def test_counts_never_fall_short_and_stay_bounded() -> None:
    table = RowTable(small(admit_after=4))
    assert table._counts is not None
    rare = torch.arange(100_000) * 31
    for clock in range(3):
        table.push(rare, ones(len(rare)), LR, clock)
    early = len(table)
    assert early < 0.05 * len(rare), "few may come early"
    table.push(rare, ones(len(rare)), LR, 3)
    assert len(table) == len(rare)
    assert table._counts._cells.nbytes == 16 << 20


def test_rows_that_nobody_names_go() -> None:
    table = RowTable(small(evict_after=16, rule="adam"))
    first = table.pull(ids(1))
    table.push(ids(1, 2), ones(2), ADAM, 0)
    for clock in range(1, 16):
        table.push(ids(2), ones(1), ADAM, clock)
        assert table.evict(clock) == 0
    assert table.evict(16) == 1 and len(table) == 1
    assert torch.equal(table.pull(ids(1)), first)
    used = table._slab.top
    table.push(ids(1), ones(1), ADAM, 17)
    fresh = RowTable(small(rule="adam"))
    fresh.push(ids(1), ones(1), ADAM, 0)
    assert torch.equal(table.pull(ids(1)), fresh.pull(ids(1))), "its state begins again too"
    assert table._slab.top == used, "its slot is used again"


# -- several workers -----------------------------------------------------------------------------


def test_a_merge_adds_in_rank_order() -> None:
    big, one = torch.full((1, 1), 2.0**24), torch.ones(1, 1)
    found, grads = merge([(ids(7), big), (ids(7), one), (ids(7), -big)], 4)
    assert found.tolist() == [7] and grads.item() == 0.0, "2^24 + 1 is 2^24 in float32, so that the order shows"
    found, grads = merge([(ids(7), big), (ids(7), -big), (ids(7), one)], 4)
    assert grads.item() == 0.25


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(-9, 9), unique=True, max_size=12), min_size=1, max_size=4), st.integers(1, 5))
def test_a_merge_is_the_sum_by_row(named: list[list[int]], present: int) -> None:
    parts = [(ids(*row), torch.randn(len(row), 2, generator=torch.Generator().manual_seed(7))) for row in named]
    truth: dict[int, torch.Tensor] = {}
    for row, grads in parts:
        for i, grad in zip(row.tolist(), grads.clone(), strict=True):
            truth[i] = truth[i] + grad if i in truth else grad
    found, merged = merge(parts, present)
    assert sorted(found.tolist()) == sorted(truth)
    for i, grad in zip(found.tolist(), merged, strict=True):
        assert torch.equal(grad, truth[i] * (1.0 / present))


# -- partition -----------------------------------------------------------------------------------


def test_buckets_are_even_and_never_change() -> None:
    for pattern in (torch.arange(200_000), torch.arange(200_000) << 20, -torch.arange(200_000) * 1024):
        load = torch.bincount(bucket_of(pattern), minlength=BUCKETS)
        assert int(load.max()) < 300 and int(load.min()) > 110
    assert bucket_of(ids(0, 1, -1, 1 << 62)).tolist() == BUCKET_GOLDEN


BUCKET_GOLDEN = [904, 580, 915, 2]


def test_a_partition_is_whole_and_survives_json() -> None:
    three = Partition.even(3)
    assert Partition.from_json(three.to_json()) == three
    assert sum(int(three.buckets(shard).sum()) for shard in range(3)) == BUCKETS
    some = torch.arange(1000)
    assert torch.equal(three.shard_of(some), bucket_of(some) % 3)
    with pytest.raises(ValueError, match="a shard for each of 1024 buckets, got 2"):
        Partition(1, (0, 1))


# -- snapshots ----------------------------------------------------------------------------------------


def full(table: RowTable) -> dict[int, list[float]]:
    """Every row by id: last clock, weights, state."""
    planes = table.export()
    names = [name for name in planes if name != "ids"]
    return {i: [x for name in names for x in planes[name][at].reshape(-1).tolist()] for at, i in enumerate(planes["ids"].tolist())}


def copied(table: RowTable, parts: list[dict[str, torch.Tensor]], onto: RowTable | None = None) -> RowTable:
    other = RowTable(table.spec) if onto is None else onto
    for part in parts:
        other.load(part)
    return other


@settings(max_examples=40)
@given(st.data())
def test_a_snapshot_is_the_table_as_it_was(data: Any) -> None:
    """Whatever is pushed or goes while it is read; and a chain of changes gives the same as the whole."""
    table = RowTable(small(rule="adam", evict_after=3))
    chain = RowTable(table.spec)
    clock = 0

    def push() -> None:
        nonlocal clock
        some = data.draw(st.lists(st.integers(0, 60), unique=True, min_size=1, max_size=40))
        table.push(ids(*some), torch.randn(len(some), 3), ADAM, clock)
        table.evict(clock)
        clock += 1

    for turn in range(3):
        for _ in range(data.draw(st.integers(0, 3))):
            push()
        truth = full(table)
        snapshot = table.snapshot(changed_only=turn > 0)
        snapshot._step = 8
        parts = []
        for part in range(len(snapshot.sizes())):
            if data.draw(st.booleans()):
                push()
            parts.append(snapshot.take(part))
            assert len(parts[-1]["ids"]) == snapshot.sizes()[part]
        kept = data.draw(st.booleans()) or turn == 0
        if kept:
            chain.remove(snapshot.removed)
            copied(table, parts, chain)
            assert full(chain) == truth
        table.settle(kept)
        assert not table._owed.narrow(0, 0, table._slab.top).any()


def test_rows_come_back_onto_other_shards() -> None:
    spec = small(rule="adam", admit_after=2)
    whole = RowTable(spec)
    some = torch.arange(500) * 3 - 700
    for clock in range(4):
        whole.push(some[clock * 10 :], torch.randn(500 - clock * 10, 3), ADAM, clock)
    whole.push(ids(99_999), ones(1), ADAM, 4)
    snapshot = whole.snapshot(changed_only=False)
    parts = list(snapshot.parts())
    three = Partition.even(3)
    shards = []
    for shard in range(3):
        shards.append(RowTable(spec))
        for part in parts:
            shards[-1].load(part, three.buckets(shard))
        shards[-1].load_counts(snapshot.counts, three.buckets(shard))
        assert bool((three.shard_of(shards[-1].export()["ids"]) == shard).all())
    merged: dict[int, list[float]] = {}
    for part_of in shards:
        merged |= full(part_of)
    assert merged == full(whole) and sum(len(t) for t in shards) == len(whole)
    home = shards[int(three.shard_of(ids(99_999)))]
    assert home.push(ids(99_999), ones(1), ADAM, 5) == 1, "its count of one came along"
    whole.settle(True)
    whole.select(three.buckets(1))
    assert full(whole) == full(shards[1]) or len(whole) == len(shards[1])


def test_planes_that_do_not_fit_are_refused() -> None:
    table = RowTable(small(rule="adam"))
    table.push(ids(1), ones(1), ADAM, 0)
    rows = table.export()
    with pytest.raises(ValueError, match=r"plane exp_avg is torch.float32 of \(1, 3\), found nothing"):
        table.load({name: plane for name, plane in rows.items() if name != "exp_avg"})
    with pytest.raises(ValueError, match="plane weights is"):
        table.load(rows | {"weights": torch.zeros(1, 4)})
    with pytest.raises(ValueError, match="last seen at a step below 0"):
        table.load(rows | {"seen": ids(-1)})


def test_rows_are_looked_at_once_a_clock_however_many_pushes_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    table = RowTable(small(evict_after=16))
    ids = torch.tensor([1, 2, 3])
    looks = []
    monkeypatch.setattr(table._slab, "seen_until", lambda clock: looks.append(clock) or torch.empty(0, dtype=torch.int64))
    for clock in (1, 2, 1, 2, 3, 4, 4, 2, 5, 6):
        table.push(ids, torch.ones(3, table.spec.dim), LR, clock)
        table.evict(clock)
    assert looks == [2 - 16, 4 - 16, 6 - 16], "each second clock is looked at, once, and none for a push that comes late"
