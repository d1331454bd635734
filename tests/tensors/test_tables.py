"""A table as a shard holds it: first values, admission, eviction, merging, partition, snapshots.

- Rules of rows against torch's optimizers where one exists, against the formula in plain Python where none does.
- id → slot, against a dict.
- Rows with a rule of their own follow the schedule of the attached optimizer, by its factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

import psjob as ps
from psjob.embeddings.row_tables import RowTables, schedule_factor
from psjob.process.errors import Refused
from psjob.rules.base import check_hyperparameters
from psjob.tables import BUCKETS, Partition, RowTable, TableSpec, bucket_of, merge
from psjob.tables.rules import RULES, named
from psjob.tables.slab import Index, Slab
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


torch.set_num_threads(1)

ROWS, DIM, STEPS = 12, 5, 7


def pushes(seed: int = 3, every_row: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
    chance = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(STEPS):
        ids = torch.randperm(ROWS, generator=chance)[: ROWS if every_row else 5]
        made.append((ids, torch.randn(len(ids), DIM, generator=chance)))
    return made


def trained(
    rule: str, hyperparameters: dict[str, Any], given: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(initial weights of all rows, weights after the pushes)."""
    table = RowTable(TableSpec("t", DIM, rule, num_rows=ROWS, seed=5))
    every = torch.arange(ROWS)
    before = table.pull(every)
    for clock, (ids, grads) in enumerate(given):
        table.push(ids, grads, check_hyperparameters(named(rule), hyperparameters), clock)
    return before, table.pull(every)


def by_torch(
    before: torch.Tensor, given: Sequence[tuple[torch.Tensor, torch.Tensor]], make: Callable[[Any], torch.optim.Optimizer]
) -> torch.Tensor:
    weights = torch.nn.Parameter(before.clone())
    optimizer = make([weights])
    for ids, grads in given:
        weights.grad = torch.sparse_coo_tensor(ids[None], grads, (ROWS, DIM), check_invariants=True).coalesce()
        optimizer.step()
    return weights.detach()


@pytest.mark.parametrize(("rule", "hyperparameters", "make", "every_row"), [
    ("sgd", {"lr": 0.1}, lambda p: torch.optim.SGD(p, lr=0.1), False),
    ("adagrad", {"lr": 0.1}, lambda p: torch.optim.Adagrad(p, lr=0.1), False),
    ("adagrad", {"lr": 0.1, "initial_accumulator_value": 0.3}, lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.3),
        False),
    ("adam", {"lr": 0.1}, lambda p: torch.optim.SparseAdam(p, lr=0.1), True),
    ("adam", {"lr": 0.1, "beta1": 0.5, "beta2": 0.7, "eps": 1e-3}, lambda p: torch.optim.SparseAdam(p, lr=0.1, betas=(0.5, 0.7), eps=1e-3),
        True),
])  # fmt: skip
def test_it_is_torchs_on_the_rows_touched(rule: str, hyperparameters: dict[str, Any], make: Callable[[Any], Any], every_row: bool) -> None:
    given = pushes(every_row=every_row)
    before, after = trained(rule, hyperparameters, given)
    torch.testing.assert_close(after, by_torch(before, given, make), rtol=2e-6, atol=2e-6)
    assert not torch.equal(before, after)


def test_weight_decay_is_of_the_rows_touched() -> None:
    ids, grads = torch.tensor([1, 3]), torch.ones(2, DIM)
    before, after = trained("sgd", {"lr": 0.1, "weight_decay": 0.5}, [(ids, grads)])
    expected = before.clone()
    expected[ids] -= 0.1 * (grads + 0.5 * before[ids])
    torch.testing.assert_close(after, expected)


def rowwise(w: list[float], g: list[list[float]], lr: float, eps: float, start: float) -> list[float]:
    total = start
    for grad in g:
        total += sum(x * x for x in grad) / len(grad)
        w = [a - lr * b / (math.sqrt(total) + eps) for a, b in zip(w, grad, strict=True)]
    return w


def lazy_adam(w: list[float], g: list[list[float]], lr: float, b1: float, b2: float, eps: float) -> list[float]:
    m, v = [0.0] * len(w), [0.0] * len(w)
    for t, grad in enumerate(g, 1):
        m = [b1 * a + (1 - b1) * x for a, x in zip(m, grad, strict=True)]
        v = [b2 * a + (1 - b2) * x * x for a, x in zip(v, grad, strict=True)]
        step = lr * math.sqrt(1 - b2**t) / (1 - b1**t)
        w = [a - step * x / (math.sqrt(y) + eps) for a, x, y in zip(w, m, v, strict=True)]
    return w


def ftrl(w: list[float], g: list[list[float]], lr: float, beta: float, l1: float, l2: float) -> list[float]:
    n = [0.0] * len(w)
    z = [-a * (beta / lr + l2) - math.copysign(l1, a) for a in w]
    for grad in g:
        for i, x in enumerate(grad):
            sigma = (math.sqrt(n[i] + x * x) - math.sqrt(n[i])) / lr
            z[i] += x - sigma * w[i]
            n[i] += x * x
            w[i] = 0.0 if abs(z[i]) <= l1 else -(z[i] - math.copysign(l1, z[i])) / ((beta + math.sqrt(n[i])) / lr + l2)
    return w


@pytest.mark.parametrize(
    ("rule", "hyperparameters", "formula"),
    [
        ("rowwise_adagrad", {"lr": 0.1, "eps": 1e-3, "initial_accumulator_value": 0.2}, lambda w, g: rowwise(w, g, 0.1, 1e-3, 0.2)),
        ("adam", {"lr": 0.1, "beta1": 0.8, "beta2": 0.9, "eps": 1e-4}, lambda w, g: lazy_adam(w, g, 0.1, 0.8, 0.9, 1e-4)),
        ("ftrl", {"lr": 0.1, "beta": 0.5, "l1": 0.3, "l2": 0.2}, lambda w, g: ftrl(w, g, 0.1, 0.5, 0.3, 0.2)),
    ],
)
def test_it_is_its_formula(
    rule: str, hyperparameters: dict[str, Any], formula: Callable[[list[float], list[list[float]]], list[float]]
) -> None:
    given = pushes(seed=9)
    before, after = trained(rule, hyperparameters, given)
    for row in range(ROWS):
        mine = [grads[ids == row][0].tolist() for ids, grads in given if bool((ids == row).any())]
        assert after[row].tolist() == pytest.approx(formula(before[row].tolist(), mine), rel=1e-4, abs=1e-5)


def test_ftrl_makes_zeros() -> None:
    before, after = trained("ftrl", {"lr": 0.1, "l1": 50.0}, pushes(every_row=True))
    assert bool((before != 0).all()) and bool((after == 0).any())


def test_another_rate_moves_no_row_of_ftrl() -> None:
    table, every = RowTable(TableSpec("t", DIM, "ftrl", num_rows=ROWS, seed=5)), torch.arange(ROWS)
    for clock, (ids, grads) in enumerate(pushes(every_row=True)):
        table.push(ids, grads, check_hyperparameters(named("ftrl"), {"lr": 0.1, "l1": 0.01}), clock)
    before = table.pull(every)
    table.push(every, torch.zeros(ROWS, DIM), check_hyperparameters(named("ftrl"), {"lr": 0.02, "beta": 3.0, "l1": 0.01}), 1000)
    torch.testing.assert_close(table.pull(every), before, rtol=1e-5, atol=0)


def test_an_unknown_number_and_an_lr_that_divides_are_refused() -> None:
    with pytest.raises(ValueError, match="rule adagrad has no hyperparameter 'lr_decay'"):
        check_hyperparameters(named("adagrad"), {"lr_decay": 0.1})
    with pytest.raises(ValueError, match="lr is above 0"):
        check_hyperparameters(named("ftrl"), {"lr": 0.0})
    with pytest.raises(ValueError, match="there is no rule 'lion' for rows"):
        named("lion")
    assert set(RULES) == {"sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl"}


torch.set_num_threads(1)

EDGES = [0, -1, -2, 1, (1 << 63) - 1, -(1 << 63), 1 << 32, -(1 << 32)]
ID = st.one_of(st.sampled_from(EDGES), st.integers(-(1 << 63), (1 << 63) - 1), st.integers(-40, 40))


@settings(max_examples=150)
@given(st.lists(st.tuples(st.booleans(), st.lists(ID, max_size=60)), max_size=8))
def test_it_holds_what_a_dict_holds(turns: list[tuple[bool, list[int]]]) -> None:
    index, truth, slot = Index(), dict[int, int](), 0
    for add, ids in turns:
        if add:
            new = [i for i in dict.fromkeys(ids) if i not in truth]
            index.insert(torch.tensor(new, dtype=torch.int64), torch.arange(slot, slot + len(new)))
            truth |= {i: slot + at for at, i in enumerate(new)}
            slot += len(new)
        else:
            index.delete(torch.tensor(ids, dtype=torch.int64))
            for i in ids:
                truth.pop(i, None)
        asked = [*EDGES, *ids, *ids, *truth]
        found = index.lookup(torch.tensor(asked, dtype=torch.int64)).tolist()
        assert [max(-1, s) for s in found] == [truth.get(i, -1) for i in asked]
        assert len(index) == len(truth)


def test_it_grows_and_forgets_the_dead() -> None:
    index = Index()
    ids = torch.randint(-(1 << 63), (1 << 63) - 1, (40_000,), generator=torch.Generator().manual_seed(1))
    ids = torch.unique(ids)
    index.insert(ids, torch.arange(len(ids)))
    assert torch.equal(index.lookup(ids), torch.arange(len(ids)))
    size = index.nbytes
    for turn in range(20):  # the dead make room for the next without end
        index.delete(ids)
        assert len(index) == 0 and bool((index.lookup(ids) < 0).all())
        ids = ids + (turn + 1)
        index.insert(ids, torch.arange(len(ids)))
    assert index.nbytes <= 2 * size
    assert torch.equal(index.lookup(ids), torch.arange(len(ids)))


def test_ids_in_steps_do_not_pile_up() -> None:
    """Ids of one pattern (multiples of a power of two, a high half that counts) are found in few rounds, not one after another."""
    for shift in (0, 8, 20, 32, 44):
        index = Index()
        ids = torch.arange(1 << 15) << shift
        index.insert(ids, torch.arange(len(ids)))
        distance = (index._find(ids) - index._start(ids)) & index._mask
        assert float(distance.double().mean()) < 8, shift
        assert torch.equal(index.lookup(ids), torch.arange(len(ids)))


Schedule = Callable[[torch.optim.Optimizer], Callable[[int], Any]]
IDS = torch.tensor([[0, 1], [1, 2], [5, 5], [3, 0], [2, 4], [1, 3]])


@pytest.mark.parametrize(
    ("group", "attached", "factor"),
    [
        ({"lr": 0.5}, 0.5, 1.0),
        ({"lr": 0.125}, 0.5, 0.25),
        ({"lr": 0.125, "initial_lr": 0.25}, 0.5, 0.5),
        ({"lr": 0.0, "initial_lr": 0.25}, 0.0, 0.0),
        ({"lr": 0.25, "initial_lr": 0.25}, 0.0, 1.0),
        ({"lr": torch.tensor(0.125)}, 0.5, 0.25),
        ({"lr": 0.125}, 0.0, 1.0),
        ({"lr": 0.125, "initial_lr": 0.0}, 0.5, 1.0),
        ({}, 0.5, 1.0),
    ],
)
def test_the_factor_is_the_rate_now_over_the_first_one(group: Mapping[str, Any], attached: float, factor: float) -> None:
    assert schedule_factor(group, attached) == factor


def by_torch_schedules(make: Callable[[torch.optim.Optimizer], Any]) -> Schedule:
    def of(optimizer: torch.optim.Optimizer) -> Callable[[int], Any]:
        scheduler = make(optimizer)
        return lambda step: scheduler.step()

    return of


def by_hand(optimizer: torch.optim.Optimizer) -> Callable[[int], Any]:
    return lambda step: optimizer.param_groups[0].update(lr=0.1 / (step + 2))


def on_plateau(optimizer: torch.optim.Optimizer) -> Callable[[int], Any]:
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    return lambda step: scheduler.step(1.0)


SCHEDULES: dict[str, Schedule] = {
    "halves": by_torch_schedules(lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.5**step)),
    "warms up from 0": by_torch_schedules(lambda o: lr_scheduler.LambdaLR(o, lambda step: step / 4)),
    "one cycle": by_torch_schedules(lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=8, cycle_momentum=False)),
    "on a plateau": on_plateau,
    "by hand": by_hand,
}


def trained_schedules(embedding: nn.Module, schedule: Schedule, before: bool) -> torch.Tensor:
    """Rows after some steps; the scheduler is made before attach or after it."""
    model = nn.ModuleDict({"user": embedding})
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    move = schedule(optimizer) if before else None
    if isinstance(embedding, ps.Embedding):
        model, optimizer = ps.attach(model, optimizer)
    move = move or schedule(optimizer)
    for step, ids in enumerate(IDS):
        optimizer.zero_grad()
        model["user"](ids).square().sum().backward()
        optimizer.step()
        move(step)
    with torch.no_grad():
        return model["user"](torch.arange(6)).clone()


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_rows_of_a_rule_of_their_own_are_as_torchs_under_a_schedule(name: str, before: bool) -> None:
    values = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
    # Of one cycle the first rate is not the optimizer's: the rows' is that times the same factor.
    first = 0.3 / 25 if name == "one cycle" else 0.1
    ours = trained_schedules(ps.Embedding.from_pretrained(values, freeze=False, optimizer="sgd", lr=first), SCHEDULES[name], before)
    theirs = trained_schedules(nn.Embedding.from_pretrained(values.clone(), freeze=False), SCHEDULES[name], before)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert (ours - values).abs().max() > 1e-3


def tables(rule: str, **more: float) -> tuple[RowTables, torch.optim.Optimizer]:
    model = nn.ModuleDict({"user": ps.Embedding(6, 3, optimizer=rule, lr=0.4, **more), "head": nn.Linear(3, 1)})
    groups = [{"params": [model["user"].anchor], "lr": 0.2}, {"params": model["head"].parameters(), "lr": 3.0}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    return RowTables(model, optimizer, 0), optimizer


def test_rows_follow_the_group_of_their_anchor_only() -> None:
    found, optimizer = tables("adagrad", eps=0.01)
    optimizer.param_groups[1]["lr"] = 0.5
    assert found.hyperparameters()[0]["lr"] == 0.4
    optimizer.param_groups[0]["lr"] = 0.1
    assert found.hyperparameters()[0] | {"lr": 0.2, "eps": 0.01} == found.hyperparameters()[0]


def test_the_state_of_an_optimizer_that_is_put_back_brings_its_schedule() -> None:
    first, optimizer = tables("sgd")
    scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
    optimizer.step()
    scheduler.step()
    again, other = tables("sgd")
    other.load_state_dict(optimizer.state_dict())
    assert first.hyperparameters()[0]["lr"] == again.hyperparameters()[0]["lr"] == 0.2


def test_a_rule_that_has_no_rate_of_0_refuses_the_schedule_and_names_the_way_out() -> None:
    found, optimizer = tables("ftrl")
    optimizer.param_groups[0]["lr"] = 0.0
    with pytest.raises(
        Refused, match=r"rows of user: rule ftrl: lr is above 0.* got 0\. It is the rows' 0\.4 times 0, .* put user\.anchor into a"
    ):
        found.hyperparameters()
