"""The choice: the founding text's machines, three kinds of network, a strategy in use, and what always holds.

- The cost models: the founding text's numbers, where trees and rings cross, and what a pipeline's steps come to when they are counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psjob_client.topology import costs
from psjob_client.topology.choose import HYSTERESIS, STRATEGIES, TIE, Choice, choose_strategy
from psjob_client.topology.machine import FIGURES
from tests.unit.topology_machines import machine, meshed, preset, switched, two_hosts

M = 160e6


def times(choice: Choice) -> dict[str, float]:
    return {given.strategy: given.seconds for given in choice.estimates}


def test_the_texts_pcie_machine() -> None:
    choice = choose_strategy(preset("d2l")[0], M)
    found = {name: 1e3 * seconds for name, seconds in times(choice).items()}
    assert (found["ps-one-device"], found["ps-cpu"], found["ps-split"]) == pytest.approx((60, 80, 15))
    assert choice.pick.seconds == pytest.approx(0.015)
    assert set(choice.unfit) == {"ps", "double-ring", "hierarchical"}


def test_the_texts_nvlink_machine() -> None:
    choice = choose_strategy(preset("d2l")[1], M)
    found = {name: 1e3 * seconds for name, seconds in times(choice).items()}
    assert (found["double-ring"], found["both-ways-ring"], found["ring"]) == pytest.approx((5.185, 2.593, 7.778), abs=5e-4)
    rings = next(given for given in choice.estimates if given.strategy == "double-ring")
    assert "2M/B: 5.93 ms; payload 2:1; rings 1-2-3-4-5-6-7-8 and 1-4-6-3-5-8-2-7" in rings.note
    assert choice.pick.strategy == "both-ways-ring"


def test_a_fast_switch_lets_the_parameter_server_work_as_a_ring_does() -> None:
    choice = choose_strategy(machine(switched(4, "10GB/s", "50us")), M)
    found = times(choice)
    assert choice.pick.strategy == "ps"
    assert found["ps"] == pytest.approx(found["ring"]) == pytest.approx(2 * 0.75 * M / 10e9 + 6 * 50e-6)
    assert found["both-ways-ring"] == pytest.approx(found["ring"])  # a switch's port is one link, however many neighbours


def test_a_fast_switch_and_few_bytes_call_for_a_tree() -> None:
    assert choose_strategy(machine(switched(16, "10GB/s", "50us")), 10e3).pick.strategy == "tree"


def test_across_a_slow_uplink_one_sum_a_host_crosses() -> None:
    choice = choose_strategy(machine(two_hosts()), M)
    found = times(choice)
    assert choice.pick.strategy in ("hierarchical", "pipelined-tree")
    assert found["hierarchical"] <= choice.pick.seconds * 1.05
    crossing = {flow for flow in choice.pick.flows if flow[0][0] != flow[1][0]}
    assert len(crossing) == 2  # one pair of devices, both ways
    assert found["ring"] > 1.5 * choice.pick.seconds
    across = M / 125e6
    assert found["ps"] == pytest.approx(4 * across, rel=0.01)  # four devices' gradients and four devices' weights, not one host's
    assert f"{across:.2f} s across" in next(given.note for given in choice.estimates if given.strategy == "hierarchical")


def test_servers_take_what_crosses_between_hosts() -> None:
    raw = two_hosts(servers=["s0", "s1"])
    raw["links"] += [{"between": [server, "pa"], "bandwidth": "1Gb/s", "latency": "50us"} for server in raw["servers"]]
    choice = choose_strategy(machine(raw), M)
    told = {given.strategy: given for given in choice.estimates}
    assert told["hierarchical"].formula == "trees inside + ps across"
    assert "2 shards on servers" in told["ps"].note
    assert times(choice)["ps"] > 3 * times(choice)["hierarchical"]


@pytest.mark.parametrize(
    "raw", [meshed(4, w0w2=10e6), switched(4, measured=[{"between": ["w0", "w2"], "bandwidth": "10MB/s"}])], ids=["mesh", "switch"]
)
def test_one_bad_link_is_avoided_and_named(raw: dict[str, object]) -> None:
    choice = choose_strategy(machine(raw), M)
    assert {"w0", "w2"} not in [set(flow) for flow in choice.pick.flows]
    assert choice.pick.seconds < 0.3 * times(choice)["ps"]
    assert "it goes round the slow w0:w2 (10.0 MB/s)" in choice.reason
    assert choice.pick.strategy in ("ring", "both-ways-ring", "double-tree", "pipelined-tree")


def test_more_hosts_than_a_few_are_planned_too() -> None:
    choice = choose_strategy(machine(switched(128)), M)
    assert choice.pick.strategy == "ps" and len(choice.estimates) == 8


def test_a_strategy_in_use_is_left_only_for_more_than_a_tenth() -> None:
    near = machine(meshed(3, rate=1e9) | {"total": None})
    plain = choose_strategy(near, M)
    for name, seconds in times(plain).items():
        choice = choose_strategy(near, M, name)
        stays = seconds <= (1 + HYSTERESIS) * min(times(plain).values())
        assert choice.pick.strategy == (name if stays else plain.pick.strategy)
        if not stays:
            assert f"{name} that is in use" in choice.reason


def test_what_stays_says_what_the_change_would_bring() -> None:
    uplink = machine(two_hosts())
    assert choose_strategy(uplink, M).pick.strategy == "pipelined-tree"
    choice = choose_strategy(uplink, M, "hierarchical")
    assert choice.pick.strategy == "hierarchical"
    assert choice.reason.startswith(
        "hierarchical stays: pipelined-tree would take 1.32 s instead of 1.34 s, and 2 % are not more than the 10 %"
    )


def test_what_cannot_run_cannot_be_in_use() -> None:
    with pytest.raises(ValueError, match="hierarchical cannot run on switched: it needs two hosts, and a host with two devices"):
        choose_strategy(machine(switched(3)), M, "hierarchical")


pairs = st.floats(1e6, 1e11)


@settings(max_examples=15)
@given(
    st.integers(2, 6),
    st.lists(pairs, min_size=15, max_size=15),
    st.floats(1, 1e10),
    st.floats(0, 1e-3),
    st.none() | pairs,
    st.none() | st.sampled_from(["ps", "ps-split", "ring", "both-ways-ring", "tree", "pipelined-tree", "double-tree", "ps-one-device"]),
)
def test_no_pick_is_slower_than_the_best_by_more_than_the_hysteresis(
    n: int, rates: list[float], size: float, latency: float, total: float | None, current: str | None
) -> None:
    raw = meshed(n, latency=latency)
    for link, rate in zip(raw["links"], rates, strict=False):
        link["bandwidth"] = rate
    raw["total"] = total
    choice = choose_strategy(machine(raw), size, current)
    least = min(given.seconds for given in choice.estimates)
    assert all(0 < given.seconds < math.inf for given in choice.estimates)
    assert choice.pick.seconds <= least * (1 + (HYSTERESIS if current else TIE)) * 1.000001
    assert {given.strategy for given in choice.estimates} | set(choice.unfit) == set(STRATEGIES)
    assert choice.reason.count(". ") + choice.reason.endswith(".") >= 2 and "\n" not in choice.reason


@settings(max_examples=10)
@given(st.integers(2, 6), st.floats(1e6, 1e10), st.floats(1.0, 50.0), st.floats(1e3, 1e10))
def test_no_strategy_slows_down_on_faster_links(n: int, rate: float, faster: float, size: float) -> None:
    slow, fast = times(choose_strategy(machine(switched(n, rate)), size)), times(choose_strategy(machine(switched(n, rate * faster)), size))
    assert all(fast[name] <= slow[name] * 1.02 for name in slow)


PCIE = FIGURES["pcie3-x16"].bandwidth
NVLINKS = 3 * FIGURES["nvlink-lane"].bandwidth
MODELS = [
    costs.one_device_seconds,
    costs.one_cpu_seconds,
    costs.split_seconds,
    costs.ring_seconds,
    costs.both_ways_ring_seconds,
    costs.tree_seconds,
    costs.pipelined_tree_seconds,
    costs.colocated_seconds,
]
sizes = st.floats(1, 1e12)
rates = st.floats(1e3, 1e12)
delays = st.floats(0, 1.0)
counts = st.integers(2, 64)


@pytest.mark.parametrize(
    ("found", "milliseconds"),
    [
        (costs.one_device_seconds(M, 4, PCIE), 60),
        (costs.one_cpu_seconds(M, 4, PCIE), 80),
        (costs.split_seconds(M, 4, PCIE), 15),
        (costs.ring_of_many(M, NVLINKS), 5.926),
        (costs.ring_seconds(M, 8, NVLINKS), 5.185),
        (costs.both_ways_ring_seconds(M, 8, NVLINKS), 2.593),
        (costs.double_ring_seconds(M, 8, [36e9, 18e9]), 5.185),
        (costs.ring_seconds(M, 8, 36e9), 7.778),
        (costs.tree_seconds(M, 8, 36e9), 26.667),
        (costs.pipelined_tree_seconds(M, 8, 36e9, chunks=100), 4.667),
    ],
)
def test_the_numbers_of_the_founding_text_and_of_its_exercises(found: float, milliseconds: float) -> None:
    assert 1e3 * found == pytest.approx(milliseconds, abs=5e-4)


def test_the_second_ring_makes_the_first_one_and_a_half_times_as_quick() -> None:
    assert costs.ring_seconds(M, 8, 36e9) / costs.double_ring_seconds(M, 8, [36e9, 18e9]) == pytest.approx(1.5)


def test_figures_are_the_founding_texts_in_bytes_a_second() -> None:
    told = {name: figure.bandwidth / 1e9 for name, figure in FIGURES.items()}
    wanted = {"nvlink": 100, "nvlink-lane": 18, "pcie3-lane": 1, "pcie3-x16": 16, "ethernet-100": 10, "ethernet-10": 1, "ethernet-1": 0.1}
    assert told == wanted
    assert all("Dive into Deep Learning" in figure.source for figure in FIGURES.values())


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_the_sharding_law_holds_where_the_links_do(workers: int, shards: int) -> None:
    found = costs.sharded_seconds(M, workers, shards, worker=48e6, shard=32e6)
    assert found == pytest.approx(max(M / 48e6, workers * M / (shards * 32e6)))
    assert costs.sharded_seconds(M, workers, workers, 32e6, 32e6) == pytest.approx(M / 32e6)  # as many shards as workers: constant


@pytest.mark.parametrize("n", [2, 4, 8])
def test_shards_beside_workers_send_what_a_ring_sends(n: int) -> None:
    assert costs.colocated_seconds(M, n, 1e9) == pytest.approx(2 * (1 - 1 / n) * M / 1e9) == pytest.approx(costs.ring_seconds(M, n, 1e9))


def test_levels_are_added_or_the_longer_one_counts() -> None:
    assert (costs.levels(0.2, 0.5), costs.levels(0.2, 0.5, overlapped=True)) == (0.7, 0.5)


CROSSINGS = {2: 0, 3: 3, 4: 0.8, 5: 5 / 3, 8: 32 / 17, 16: 176 / 49, 32: 832 / 129, 64: 3648 / 321}
"""By devices, in α·B bytes: (n-1-d) / (d - (n-1)/n) with d = ⌊log₂ n⌋."""


@pytest.mark.parametrize(("n", "crossing"), CROSSINGS.items())
def test_trees_win_below_the_crossing_and_rings_above(n: int, crossing: float) -> None:
    latency, bandwidth = 1e-4, 1e9
    below = costs.tree_below(n, bandwidth, bandwidth, latency)
    assert below == pytest.approx(crossing * latency * bandwidth)
    for factor, tree_wins in ((0.99, True), (1.01, False)):
        if below:
            size = below * factor
            assert (costs.tree_seconds(size, n, bandwidth, latency) < costs.ring_seconds(size, n, bandwidth, latency)) is tree_wins


def test_a_tree_on_much_wider_links_has_no_crossing() -> None:
    assert costs.tree_below(4, 100e9, 1e9, 1e-4) == math.inf


def counted_steps(n: int, chunks: int, ports: int) -> int:
    """Steps of an all-reduce in chunks on the binary tree, each device sending and receiving at most `ports` chunks a step."""
    parents = [(i - 1) // 2 for i in range(n)]
    children = [[i for i in range(1, n) if parents[i] == parent] for parent in range(n)]
    risen, fallen = [0] * n, [0] * n
    steps = 0
    while min(fallen[1:]) < chunks:
        steps += 1
        summed = [min((risen[child] for child in children[i]), default=chunks) for i in range(n)]
        whole = [summed[0], *fallen[1:]]
        up = [(risen[i], i, parents[i], risen) for i in range(1, n) if risen[i] < summed[i]]
        down = [(fallen[i], parents[i], i, fallen) for i in range(1, n) if fallen[i] < whole[parents[i]]]
        out, into = [0] * n, [0] * n
        for _, source, target, done in sorted(up + down, key=lambda move: move[0]):
            if out[source] < ports and into[target] < ports:
                out[source] += 1
                into[target] += 1
                done[source if done is risen else target] += 1
    return steps


@pytest.mark.parametrize("n", [2, 3, 4, 5, 7, 8, 9, 16, 31, 64])
@pytest.mark.parametrize("chunks", [1, 2, 7, 50])
def test_a_pipelined_trees_steps_are_those_of_its_formula(n: int, chunks: int) -> None:
    ports = costs.tree_edges(n)
    assert counted_steps(n, chunks, ports) == costs.pipelined_tree_seconds(chunks, n, 1.0, chunks=chunks, ports=ports)


@pytest.mark.parametrize(
    ("n", "ports", "at_least"), [(2, 1, 1), (3, 2, 1), (4, 2, 1), (4, 1, 2), (5, 2, 1.5), (8, 2, 1.5), (5, 1, 3), (8, 1, 3), (64, 1, 3)]
)
def test_one_tree_on_fewer_ports_takes_three_times_as_long_not_twice(n: int, ports: int, at_least: float) -> None:
    chunks = 400
    assert costs.pipelined_tree_seconds(chunks, n, 1.0, chunks=chunks, ports=ports) / chunks == pytest.approx(at_least, rel=0.05)
    assert counted_steps(n, chunks, ports) / chunks >= at_least


def test_two_mirrored_trees_keep_one_port_as_busy_as_a_ring() -> None:
    found = costs.pipelined_tree_seconds(M / 2, 8, 1e9 / 4, chunks=1000)
    assert found == pytest.approx(costs.ring_of_many(M, 1e9), rel=0.01)
    assert found < costs.pipelined_tree_seconds(M, 8, 1e9, chunks=1000, ports=1) * 0.7


@given(sizes, counts, rates, st.floats(1e-7, 1e-2))
def test_no_number_of_chunks_is_better_than_the_one_taken(size: float, n: int, bandwidth: float, latency: float) -> None:
    best = costs.best_chunks(size, n, bandwidth, latency)
    taken = costs.pipelined_tree_seconds(size, n, bandwidth, latency)
    for other in {max(1, best // 2), max(1, best - 1), min(best + 1, max(1, int(size // costs.SMALLEST_CHUNK)))}:
        assert taken <= costs.pipelined_tree_seconds(size, n, bandwidth, latency, chunks=other) * 1.02


@pytest.mark.parametrize("model", MODELS)
@given(size=sizes, n=counts, bandwidth=rates, latency=delays, more=st.floats(1, 100))
def test_time_falls_with_bandwidth_and_rises_with_bytes_and_latency(
    model: Callable[[float, int, float, float], float], size: float, n: int, bandwidth: float, latency: float, more: float
) -> None:
    found = model(size, n, bandwidth, latency)
    assert 0 < found < math.inf
    assert model(size, n, bandwidth * more, latency) <= found * 1.02  # chunks are whole numbers
    assert model(size * more, n, bandwidth, latency) >= found * 0.98
    assert model(size, n, bandwidth, latency * more) >= found * 0.98


@given(sizes, counts, rates, st.floats(1e-9, 1.0))
def test_a_rings_bandwidth_term_is_nearly_constant_in_n_and_its_latency_term_is_not(size: float, n: int, rate: float, late: float) -> None:
    bare = costs.ring_seconds(size, n, rate)
    assert size / rate <= bare * 1.000001 and bare <= 2 * size / rate * 1.000001
    assert costs.ring_seconds(size, n, rate, late) - bare == pytest.approx(2 * (n - 1) * late, rel=1e-3, abs=1e-6 * bare)
