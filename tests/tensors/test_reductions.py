"""Reductions: the laws of monoids and semirings, rank order, and pushes that compute shortest paths."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from psjob.rules.reduction import MONOIDS, REDUCTIONS, SEMIRINGS, ReductionProblem, mean_in_rank_order, reduction_named

torch.set_num_threads(1)
WHOLE = st.integers(-50, 50).map(float)
FLAG = st.sampled_from([0.0, 1.0])
KINDS = {"torch": lambda values: torch.tensor(values, dtype=torch.float64), "numpy": lambda values: np.array(values, dtype=np.float64)}


def numbers_for(name: str) -> st.SearchStrategy[float]:
    return FLAG if name in ("or", "and", "or-and") else WHOLE


def joined(name: str, *values: float, kind: str = "torch") -> float:
    """The reduction of pushes of one element each."""
    out = KINDS[kind]([math.nan])
    reduction_named(name)([KINDS[kind]([value]) for value in values], out)
    return float(out[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [name for name in MONOIDS if name != "count"])
@given(data=st.data())
@settings(max_examples=15)
def test_monoids_keep_their_laws(name: str, kind: str, data: st.DataObject) -> None:
    a, b, c = (data.draw(numbers_for(name)) for _ in range(3))

    def join(x: float, y: float) -> float:
        return joined(name, x, y, kind=kind)

    assert join(join(a, b), c) == pytest.approx(join(a, join(b, c)), rel=1e-12)
    assert join(a, b) == join(b, a)
    assert join(a, MONOIDS[name].identity) == join(MONOIDS[name].identity, a) == a
    assert (join(join(a, b), b) == join(a, b)) or not MONOIDS[name].idempotent


def test_a_push_that_is_counted_twice_shows_where_it_must() -> None:
    again = {name: joined(name, 1.0, 0.0, 0.0) == joined(name, 1.0, 1.0, 0.0, 0.0) for name in MONOIDS}
    assert again == {name: monoid.idempotent for name, monoid in MONOIDS.items()}


@pytest.mark.parametrize("name", SEMIRINGS)
@given(data=st.data())
@settings(max_examples=15)
def test_semirings_keep_their_laws(name: str, data: st.DataObject) -> None:
    ring = SEMIRINGS[name]
    a, b, c = (data.draw(numbers_for(name)) for _ in range(3))

    def times(x: float, y: float) -> float:
        out = KINDS["torch"]([0.0])
        ring.combine([x], [KINDS["torch"]([y])], out)
        return float(out[0])

    def plus(x: float, y: float) -> float:
        out = KINDS["torch"]([0.0])
        ring.plus([KINDS["torch"]([x]), KINDS["torch"]([y])], out)
        return float(out[0])

    assert times(times(a, b), c) == times(a, times(b, c))
    assert times(a, b) == times(b, a)
    assert times(a, ring.one) == a
    assert times(a, ring.plus.identity) == ring.plus.identity
    assert times(a, plus(b, c)) == plus(times(a, b), times(a, c))


EXPECTED: list[tuple[str, list[list[float]], list[float]]] = [
    ("mean", [[1, 2], [3, 4], [5, 9]], [3, 5]),
    ("sum", [[1, 2], [3, 4], [5, 9]], [9, 15]),
    ("max", [[1, 9], [3, 4]], [3, 9]),
    ("min", [[1, 9], [3, 4]], [1, 4]),
    ("or", [[0, 2, 0], [0, 0, 3]], [0, 1, 1]),
    ("and", [[0, 2, 5], [0, 0, 3]], [0, 0, 1]),
    ("count", [[0, 2, 5], [0, 0, 3]], [0, 1, 2]),
    ("logsumexp", [[0, -1000], [0, -1000]], [math.log(2), math.log(2) - 1000]),
    ("median", [[1, 7], [2, 5], [99, 6]], [2, 6]),
    ("median", [[1], [2], [4], [1e30]], [3]),
    ("trimmed_mean", [[1], [2], [4], [1e30]], [3]),
    ("trimmed_mean", [[1], [2], [6]], [3]),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "pushes", "expected"), EXPECTED)
def test_reductions_by_element(name: str, pushes: list[list[float]], expected: list[float], kind: str) -> None:
    given = [KINDS[kind](push) for push in pushes]
    out = KINDS[kind]([math.nan] * len(expected))
    reduction_named(name)(given, out)
    assert out.tolist() == pytest.approx(expected, rel=1e-12)
    assert [g.tolist() for g in given] == pushes, "pushes are left as they are"
    reduction_named(name)(given, given[0])
    assert given[0].tolist() == pytest.approx(expected, rel=1e-12), "out may be the first push"


def test_every_reduction_has_a_row() -> None:
    assert {row[0] for row in EXPECTED} == set(REDUCTIONS)


def test_order_shows_in_the_bits_of_real_numbers_and_not_of_whole_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    real = list(torch.randn(8, 100_000, generator=generator))
    whole = [push.mul(1000).round() for push in real]

    def total(pushes: Sequence[Any]) -> Any:
        out = torch.empty_like(pushes[0])
        reduction_named("sum")(pushes, out)
        return out

    assert torch.equal(total(real), total(real))
    assert torch.equal(total(real), reduce(torch.add, real)), "rank order is from left to right"
    assert torch.equal(total(whole), total(whole[::-1]))
    other = total(real) != total(real[::-1])
    assert 0.55 < float(other.float().mean()) < 0.65
    assert float((total(real) - total(real[::-1])).abs().max()) < 5e-6


def test_pushes_of_rows_compute_shortest_paths() -> None:
    """Four workers own the edges out of some nodes each; a push is what their nodes reach, a clock one more edge."""
    nodes, chance = 50, np.random.default_rng(7)
    weights = np.where(chance.random((nodes, nodes)) < 0.12, chance.integers(1, 100, (nodes, nodes)).astype(float), np.inf)
    np.fill_diagonal(weights, 0.0)
    ring = SEMIRINGS["min-plus"]
    owned = np.array_split(np.arange(nodes), 4)
    far = torch.full((nodes,), ring.plus.identity, dtype=torch.float64)
    far[0] = ring.one
    for _ in range(nodes - 1):
        pushes = []
        for rows in owned:
            pushes.append(torch.empty_like(far))
            ring.combine([float(far[row]) for row in rows], [torch.tensor(weights[row]) for row in rows], pushes[-1])
        ring.plus(pushes, far)
    assert far.tolist() == dijkstra(weights)
    assert sum(math.isfinite(distance) for distance in far.tolist()) > 40


def dijkstra(weights: Any) -> list[float]:
    far = [math.inf] * len(weights)
    heap = [(0.0, 0)]
    while heap:
        distance, node = heapq.heappop(heap)
        if far[node] <= distance:
            continue
        far[node] = distance
        for other, length in enumerate(weights[node]):
            if math.isfinite(length):
                heapq.heappush(heap, (distance + float(length), other))
    return far


def spread(pushes: list[torch.Tensor]) -> torch.Tensor:
    whole = torch.stack(pushes)
    return whole.amax(0) - whole.amin(0)


def krum(pushes: list[torch.Tensor]) -> torch.Tensor:
    """The push that is nearest to the others as a whole: not by element."""
    return min(pushes, key=lambda push: sum(float((push - other).norm()) for other in pushes))


def in_place(pushes: list[torch.Tensor]) -> torch.Tensor:
    for push in pushes[1:]:
        pushes[0] += push
    return pushes[0]


def by_index(pushes: list[torch.Tensor]) -> torch.Tensor:
    return pushes[1] * 2


def of_many_only(pushes: list[torch.Tensor]) -> torch.Tensor:
    if len(pushes[0]) > 100:
        raise RuntimeError("too long")
    return pushes[0].double() if len(pushes[0]) > 10 else pushes[0]


def test_a_reduction_of_ones_own() -> None:
    own = reduction_named(f"{__name__}:spread")
    out = torch.zeros(2)
    own([torch.tensor([1.0, 2.0]), torch.ones(2), torch.tensor([4.0, 5.0])], out)
    assert out.tolist() == [3, 4]


def test_one_that_fails_later_is_named_with_what_it_was_given() -> None:
    own = reduction_named(f"{__name__}:of_many_only")
    for length, words in (
        (200, "of_many_only failed on 2 pushes of float32 .200.: RuntimeError: too long"),
        (20, "of_many_only made float64 .20. of 2 pushes of float32 .20.; it must return a tensor like each of them"),
    ):
        with pytest.raises(ReductionProblem, match=words):
            own([torch.ones(length), torch.ones(length)], torch.empty(length))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mode", "no reduction 'mode'; the reductions are mean, sum, .* or your own as module:function"),
        ("nowhere.at_all:f", "nowhere.at_all:f cannot be imported: ModuleNotFoundError: No module named 'nowhere'; shards look in"),
        ("math:f", "math:f cannot be imported: AttributeError: module 'math' has no attribute 'f'"),
        ("math:pi", "math:pi is a float; it must be a function"),
        ("json:dumps", "json:dumps failed on 3 pushes of float32 .4.: TypeError: Object of type Tensor"),
        ("builtins:len", "builtins:len made a int of 3 pushes"),
        ("torch:stack", r"torch:stack made float32 \[3, 4\] of 3 pushes"),
        (f"{__name__}:krum", "does not work by element: element 0 of three pushes comes to"),
        (f"{__name__}:in_place", "writes to the pushes that it is given"),
        (f"{__name__}:by_index", "failed on 1 pushes of float32 .4.: IndexError"),
        (":f", "no reduction ':f'"),
    ],
)
def test_names_that_are_none(name: str, words: str) -> None:
    with pytest.raises(ReductionProblem, match=words):
        reduction_named(name)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_nothing_cannot_be_reduced(name: str) -> None:
    with pytest.raises(ValueError, match="at least one push"):
        reduction_named(name)([], torch.zeros(1))
    one = torch.tensor([1.0])
    reduction_named(name)([one], out := torch.zeros(1))
    assert torch.equal(out, one)
    assert mean_in_rank_order is reduction_named("mean")
