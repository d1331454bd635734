"""The choice: the founding text's machines, three kinds of network, a strategy in use, and what always holds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psjob_client.topology.choose import HYSTERESIS, TIE, Choice, choose
from psjob_client.topology.estimate import STRATEGIES
from tests.unit.topology_machines import machine, meshed, preset, switched, two_hosts

M = 160e6


def times(choice: Choice) -> dict[str, float]:
    return {given.strategy: given.seconds for given in choice.estimates}


def test_the_texts_pcie_machine() -> None:
    choice = choose(preset("d2l")[0], M)
    found = {name: 1e3 * seconds for name, seconds in times(choice).items()}
    assert (found["ps-one-device"], found["ps-cpu"], found["ps-split"]) == pytest.approx((60, 80, 15))
    assert choice.pick.seconds == pytest.approx(0.015)
    assert set(choice.unfit) == {"ps", "double-ring", "hierarchical"}


def test_the_texts_nvlink_machine() -> None:
    choice = choose(preset("d2l")[1], M)
    found = {name: 1e3 * seconds for name, seconds in times(choice).items()}
    assert (found["double-ring"], found["both-ways-ring"], found["ring"]) == pytest.approx((5.185, 2.593, 7.778), abs=5e-4)
    rings = next(given for given in choice.estimates if given.strategy == "double-ring")
    assert "2M/B: 5.93 ms; payload 2:1; rings 1-2-3-4-5-6-7-8 and 1-4-6-3-5-8-2-7" in rings.note
    assert choice.pick.strategy == "both-ways-ring"


def test_a_fast_switch_lets_the_parameter_server_work_as_a_ring_does() -> None:
    choice = choose(machine(switched(4, "10GB/s", "50us")), M)
    found = times(choice)
    assert choice.pick.strategy == "ps"
    assert found["ps"] == pytest.approx(found["ring"]) == pytest.approx(2 * 0.75 * M / 10e9 + 6 * 50e-6)
    assert found["both-ways-ring"] == pytest.approx(found["ring"])  # a switch's port is one link, however many neighbours


def test_a_fast_switch_and_few_bytes_call_for_a_tree() -> None:
    assert choose(machine(switched(16, "10GB/s", "50us")), 10e3).pick.strategy == "tree"


def test_across_a_slow_uplink_one_sum_a_host_crosses() -> None:
    choice = choose(machine(two_hosts()), M)
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
    choice = choose(machine(raw), M)
    told = {given.strategy: given for given in choice.estimates}
    assert told["hierarchical"].formula == "trees inside + ps across"
    assert "2 shards on servers" in told["ps"].note
    assert times(choice)["ps"] > 3 * times(choice)["hierarchical"]


@pytest.mark.parametrize(
    "raw", [meshed(4, w0w2=10e6), switched(4, measured=[{"between": ["w0", "w2"], "bandwidth": "10MB/s"}])], ids=["mesh", "switch"]
)
def test_one_bad_link_is_avoided_and_named(raw: dict[str, object]) -> None:
    choice = choose(machine(raw), M)
    assert {"w0", "w2"} not in [set(flow) for flow in choice.pick.flows]
    assert choice.pick.seconds < 0.3 * times(choice)["ps"]
    assert "it goes round the slow w0:w2 (10.0 MB/s)" in choice.reason
    assert choice.pick.strategy in ("ring", "both-ways-ring", "double-tree", "pipelined-tree")


def test_more_hosts_than_a_few_are_planned_too() -> None:
    choice = choose(machine(switched(128)), M)
    assert choice.pick.strategy == "ps" and len(choice.estimates) == 8


def test_a_strategy_in_use_is_left_only_for_more_than_a_tenth() -> None:
    near = machine(meshed(3, rate=1e9) | {"total": None})
    plain = choose(near, M)
    for name, seconds in times(plain).items():
        choice = choose(near, M, name)
        stays = seconds <= (1 + HYSTERESIS) * min(times(plain).values())
        assert choice.pick.strategy == (name if stays else plain.pick.strategy)
        if not stays:
            assert f"{name} that is in use" in choice.reason


def test_what_stays_says_what_the_change_would_bring() -> None:
    uplink = machine(two_hosts())
    assert choose(uplink, M).pick.strategy == "pipelined-tree"
    choice = choose(uplink, M, "hierarchical")
    assert choice.pick.strategy == "hierarchical"
    assert choice.reason.startswith(
        "hierarchical stays: pipelined-tree would take 1.32 s instead of 1.34 s, and 2 % are not more than the 10 %"
    )


def test_what_cannot_run_cannot_be_in_use() -> None:
    with pytest.raises(ValueError, match="hierarchical cannot run on switched: it needs two hosts, and a host with two devices"):
        choose(machine(switched(3)), M, "hierarchical")


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
    choice = choose(machine(raw), size, current)
    least = min(given.seconds for given in choice.estimates)
    assert all(0 < given.seconds < math.inf for given in choice.estimates)
    assert choice.pick.seconds <= least * (1 + (HYSTERESIS if current else TIE)) * 1.000001
    assert {given.strategy for given in choice.estimates} | set(choice.unfit) == set(STRATEGIES)
    assert choice.reason.count(". ") + choice.reason.endswith(".") >= 2 and "\n" not in choice.reason


@settings(max_examples=10)
@given(st.integers(2, 6), st.floats(1e6, 1e10), st.floats(1.0, 50.0), st.floats(1e3, 1e10))
def test_no_strategy_slows_down_on_faster_links(n: int, rate: float, faster: float, size: float) -> None:
    slow, fast = times(choose(machine(switched(n, rate)), size)), times(choose(machine(switched(n, rate * faster)), size))
    assert all(fast[name] <= slow[name] * 1.02 for name in slow)
