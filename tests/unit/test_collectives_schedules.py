"""Every schedule on symbols, 2 to 16 ranks: whole sums of the same bits everywhere, links as modelled, times as in the formulas.

- A schedule carried out on symbols: which sums, in which order, every rank holds in the end; and what a step asks of links and ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from psjob.collectives.schedule import (
    EIGHT_GPUS,
    STRATEGIES,
    Link,
    Schedule,
    broadcast_from_first,
    chunks_for,
    disjoint_rings,
    part_of_rank,
    planner,
    reduce_to_first,
    schedule_of,
)
from psjob_client.topology import costs

RANKS = range(2, 17)
CHUNKS = 5
MODEL = {"mirrored": (2, 1), "ring": (1, 1), "both-ways-ring": (2, 1), "double-ring": (2, 1), "tree": (2, 1), "pipelined-tree": (3, 1),
         "double-tree": (4, 2), "servers": (15, 1), "hierarchical": (3, 1), "hierarchical-servers": (15, 1)}  # fmt: skip
"""Ports of a rank each way, and moves of a link in a step."""


def made() -> list[tuple[str, int, int]]:
    """Each strategy with each number of ranks it can do, and of devices to a node."""
    found = []
    for name in STRATEGIES:
        for ranks in RANKS:
            if not name.startswith("hierarchical"):
                found += [(name, ranks, 1)] if name != "double-ring" or ranks >= 5 else []
            else:
                found += [(name, ranks, devices) for devices in range(1, ranks + 1) if ranks % devices == 0]
    return found


@pytest.mark.parametrize(("name", "ranks", "devices"), made())
def test_every_rank_has_each_contribution_once_in_the_same_bits(name: str, ranks: int, devices: int) -> None:
    plan = schedule_of(name, ranks, CHUNKS, devices)
    held = carried_out(plan)
    assert all(contributions(chunk) == dict.fromkeys(range(ranks), 1) for chunk in held[0])
    assert all(chunks == held[0] for chunks in held)
    ports, moves = busiest(plan)
    assert ports <= MODEL[name][0]
    assert moves <= (2 if ranks == 2 else MODEL[name][1])
    for step in plan.steps:
        assert not {(m.sender, m.chunk) for m in step} & {(m.receiver, m.chunk) for m in step}, "what is sent changes while it is sent"
        assert all(m.sender != m.receiver for m in step)


@pytest.mark.parametrize("ranks", RANKS)
def test_mirrored_adds_from_left_to_right(ranks: int) -> None:
    wanted: object = 0
    for rank in range(1, ranks):
        wanted = frozenset({wanted, rank})
    assert all(chunk == wanted for chunks in carried_out(schedule_of("mirrored", ranks, CHUNKS)) for chunk in chunks)


@pytest.mark.parametrize("ranks", RANKS)
def test_down_to_one_rank_and_up_from_it(ranks: int) -> None:
    summed = carried_out(reduce_to_first(ranks, CHUNKS))[0]
    assert all(contributions(chunk) == dict.fromkeys(range(ranks), 1) for chunk in summed)
    spread = carried_out(broadcast_from_first(ranks, CHUNKS), lambda rank: None if rank else 7)
    assert all(chunk == 7 for chunks in spread for chunk in chunks)


@pytest.mark.parametrize("ranks", range(5, 17))
def test_two_rings_share_no_link(ranks: int) -> None:
    first, second = disjoint_rings(ranks)
    assert sorted(first) == sorted(second) == list(range(ranks))
    assert not _links(first) & _links(second)


def _links(ring: tuple[int, ...]) -> set[frozenset[int]]:
    return {frozenset(pair) for pair in zip(ring, ring[1:] + ring[:1], strict=True)}


@pytest.mark.parametrize(("name", "ranks", "devices", "words"), [
    ("double-ring", 4, 1, "at least 5"),
    ("hierarchical", 6, 4, "same number"),
    ("hierarchical", 6, 0, "same number"),
    ("star", 4, 1, "no strategy 'star'; there are mirrored, ring"),
    ("ring", 0, 1, "at least 1"),
])  # fmt: skip
def test_what_cannot_be_done_is_refused(name: str, ranks: int, devices: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        schedule_of(name, ranks, 1, devices)


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "double-ring"])
def test_a_lone_rank_moves_nothing(name: str) -> None:
    assert not any(schedule_of(name, 1).steps)


def test_a_plans_order_says_who_does_what() -> None:
    ring = planner("ring", 4, order=(0, 2, 1, 3))(1 << 20)
    assert set(ring.link_elements(100)) == {(0, 2), (2, 1), (1, 3), (3, 0)}
    assert all(contributions(chunk) == dict.fromkeys(range(4), 1) for chunks in carried_out(ring) for chunk in chunks)
    with pytest.raises(ValueError, match=r"order \[0, 1, 1, 3\] is not one of the ranks 0 to 3, each once"):
        planner("ring", 4, order=(0, 1, 1, 3))


# -- times: M bytes, links of B bytes a second each way and latency α ------------------------------------------------------------------

M, B, ALPHA = 1 << 24, 1e9, 50e-6


def took(plan: Schedule) -> float:
    return seconds(plan, M, lambda _link: B, ALPHA)


@pytest.mark.parametrize("ranks", RANKS)
def test_times_are_those_of_the_formulas(ranks: int) -> None:
    link = (M, ranks, B, ALPHA)
    assert took(schedule_of("ring", ranks)) == pytest.approx(costs.ring_seconds(*link), rel=1e-4)
    if ranks > 2:
        assert took(schedule_of("both-ways-ring", ranks)) == pytest.approx(costs.both_ways_ring_seconds(*link), rel=1e-4)
    assert took(schedule_of("tree", ranks)) == pytest.approx(costs.tree_seconds(*link))
    pipelined = costs.pipelined_tree_seconds(*link, chunks=CHUNKS)
    assert took(schedule_of("pipelined-tree", ranks, CHUNKS)) == pytest.approx(pipelined, rel=1e-4)
    assert took(schedule_of("servers", ranks)) == pytest.approx(2 * (ALPHA + M / (ranks * B)), rel=1e-4)
    assert took(schedule_of("mirrored", ranks, CHUNKS)) == pytest.approx(costs.chain_seconds(*link, chunks=CHUNKS), rel=1e-4)


def test_hierarchical_is_the_sum_of_its_levels() -> None:
    nodes, devices = 4, 4
    inside = 2 * costs.tree_one_way(M, devices, B, ALPHA, chunks=nodes)
    whole = costs.levels(inside, costs.ring_seconds(M, nodes, B, ALPHA))
    assert took(schedule_of("hierarchical", nodes * devices, 1, devices)) == pytest.approx(whole, rel=1e-4)
    served = costs.levels(inside, 2 * (ALPHA + M / (nodes * B)))
    assert took(schedule_of("hierarchical-servers", nodes * devices, 1, devices)) == pytest.approx(served, rel=1e-4)


def test_eight_gpus_take_as_long_as_one_ring_over_54_gb_a_second() -> None:
    """d2l 13.7: 160 MB on eight V100, links of 18 GB/s, pairs of them on the first ring."""
    twice = _links(EIGHT_GPUS[0])

    def rate(link: Link) -> float:
        return 36e9 if frozenset(link) in twice else 18e9

    nbytes = 160_000_000
    double = seconds(schedule_of("double-ring", 8), nbytes, rate, 0.0)
    assert double == pytest.approx(5.19e-3, rel=1e-3)
    assert double == pytest.approx(costs.double_ring_seconds(nbytes, 8, (36e9, 18e9)), rel=1e-4)
    assert seconds(schedule_of("ring", 8), nbytes, rate, 0.0) == pytest.approx(1.5 * double, rel=1e-3)
    assert seconds(schedule_of("both-ways-ring", 8), nbytes, lambda _link: 54e9, 0.0) == pytest.approx(2.59e-3, rel=2e-3)
    used = {frozenset(link) for link in schedule_of("double-ring", 8).link_elements(nbytes)}
    assert len(used) == 16


def test_trees_win_small_vectors_and_rings_large_ones() -> None:
    for ranks in (4, 8, 16):
        assert seconds(schedule_of("tree", ranks), 1 << 10, lambda _: B, ALPHA) < seconds(
            schedule_of("ring", ranks), 1 << 10, lambda _: B, ALPHA
        )
        assert seconds(schedule_of("tree", ranks), 1 << 26, lambda _: B, ALPHA) > seconds(
            schedule_of("ring", ranks), 1 << 26, lambda _: B, ALPHA
        )


# -- bytes -------------------------------------------------------------------------------------------------------------------------------


def test_an_uplink_carries_one_vector_for_a_node_not_one_for_each_device() -> None:
    """Two nodes of two devices. Flat to a server across, each device sends its own vector up; here the first device alone sends."""
    for name in ("hierarchical", "hierarchical-servers"):
        across = {link: n for link, n in schedule_of(name, 4, 1, 2).link_elements(1000).items() if link[0] // 2 != link[1] // 2}
        assert across == {(0, 2): 1000, (2, 0): 1000}


def test_every_share_goes_straight_to_its_server() -> None:
    assert schedule_of("servers", 4).link_elements(1000) == {(a, b): 500 for a in range(4) for b in range(4) if a != b}


@pytest.mark.parametrize("numel", [0, 1, 3, 7, 1000])
@pytest.mark.parametrize("name", STRATEGIES)
def test_links_carry_the_same_from_both_ends(name: str, numel: int) -> None:
    plan = schedule_of(name, 6, CHUNKS, 2)
    spans = plan.spans(numel)
    assert sum(span.stop - span.start for span in spans) == numel and spans[-1].stop == numel
    for end in (0, 1):
        seen = sum(
            spans[move.chunk].stop - spans[move.chunk].start
            for rank in range(6) for step in part_of_rank(plan, rank) for move in step if (move.sender, move.receiver)[end] == rank
        )  # fmt: skip
        assert seen == sum(plan.link_elements(numel).values())


def test_pipelines_cut_into_pieces_of_about_a_mebibyte() -> None:
    assert [chunks_for(nbytes) for nbytes in (0, 1 << 20, 10 << 20, 1 << 40)] == [1, 1, 10, 64]


Sum = int | frozenset["Sum"] | None
"""A rank's own contribution, two sums added (which of them first changes no bit), or nothing yet."""


def carried_out(schedule: Schedule, first: Callable[[int], Sum] = lambda rank: rank) -> list[list[Sum]]:
    """What each rank holds of each chunk in the end, if rank r begins with `first(r)`. AssertionError where one sends what it has not."""
    held = [[first(rank) for _ in schedule.weights] for rank in range(schedule.ranks)]
    for step in schedule.steps:
        before = [list(chunks) for chunks in held]
        for move in step:
            sent = before[move.sender][move.chunk]
            assert sent is not None, f"rank {move.sender} sends chunk {move.chunk}, of which it has nothing"
            own = held[move.receiver][move.chunk]
            assert not move.add or own != sent, f"rank {move.receiver} adds to chunk {move.chunk} what it has"
            held[move.receiver][move.chunk] = frozenset({own, sent}) if move.add else sent
    return held


def contributions(value: Sum) -> Counter[int]:
    """How often each rank's contribution is in a sum."""
    if value is None:
        return Counter()
    if isinstance(value, int):
        return Counter([value])
    return sum((contributions(part) for part in value), Counter())


def busiest(schedule: Schedule) -> tuple[int, int]:
    """The most sends or receives of a rank in a step, and the most moves on a link in a step."""
    ports, links = 0, 0
    for step in schedule.steps:
        ends = Counter((end, place) for move in step for place, end in enumerate((move.sender, move.receiver)))
        ports = max(ports, *ends.values())
        links = max(links, *Counter((move.sender, move.receiver) for move in step).values())
    return ports, links


def seconds(schedule: Schedule, nbytes: int, rate: Callable[[Link], float], latency: float) -> float:
    """How long the steps take where a step lasts as long as its slowest link, and a link carries its moves one after the other."""
    sizes = [span.stop - span.start for span in schedule.spans(nbytes)]
    whole = 0.0
    for step in schedule.steps:
        took: Counter[Link] = Counter()
        for move in step:
            took[move.sender, move.receiver] += latency + sizes[move.chunk] / rate((move.sender, move.receiver))  # type: ignore[assignment]
        whole += max(took.values())
    return whole
