"""Schedules on tensors: sums as the oracle has them, bytes of each link as the plan has them, and no wait without an end."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import psjob as ps
from psjob.collectives.all_reduce import Pending, run_schedule
from psjob.collectives.schedule import STRATEGIES, Link, planner, schedule_of
from psjob.rules.reduction import mean_in_rank_order
from tests.live.collectives_processes import together
from tests.live.collectives_work import NUMEL, left_by, refusals, sums, uplink
from tests.support.soaking import rotating


@dataclass
class Road:
    """Links between threads; counts what each carried."""

    links: dict[tuple[int, int, int], queue.SimpleQueue[torch.Tensor]] = field(default_factory=dict)
    passed: Counter[Link] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def at(self, key: tuple[int, int, int]) -> queue.SimpleQueue[torch.Tensor]:
        with self.lock:
            return self.links.setdefault(key, queue.SimpleQueue())


class Through:
    """A transport between threads of one process."""

    def __init__(self, road: Road, rank: int) -> None:
        self.rank, self._road = rank, road

    def send(self, data: torch.Tensor, peer: int, tag: int) -> Pending:
        with self._road.lock:
            self._road.passed[self.rank, peer] += data.numel()
        self._road.at((self.rank, peer, tag)).put(data.clone())
        return Came(None, None)

    def receive(self, into: torch.Tensor, peer: int, tag: int) -> Pending:
        return Came(into, self._road.at((peer, self.rank, tag)))


@dataclass
class Came:
    into: torch.Tensor | None
    line: queue.SimpleQueue[torch.Tensor] | None

    def wait(self, timeout: timedelta) -> object:
        if self.into is not None and self.line is not None:
            self.into.copy_(self.line.get(timeout=timeout.total_seconds()))
        return True


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, int, int, int]:
    ranks = draw(st.integers(2, 7))
    name = draw(st.sampled_from([name for name in STRATEGIES if name != "double-ring" or ranks >= 5]))
    devices = draw(st.sampled_from([d for d in range(1, ranks + 1) if ranks % d == 0]))
    return name, ranks, devices, draw(st.integers(1, 9))


@settings(max_examples=60)
@given(case=cases(), numel=st.integers(0, 60), seed=st.integers(0, 1000))
def test_sums_are_the_oracles_and_links_carry_what_the_plan_says(case: tuple[str, int, int, int], numel: int, seed: int) -> None:
    name, ranks, devices, chunks = case
    plan = schedule_of(name, ranks, chunks, devices)
    torch.manual_seed(seed)
    whole = [torch.randint(-1000, 1000, (numel,)).float() for _ in range(ranks)]
    rough = [torch.randn(numel) for _ in range(ranks)]
    for vectors in (whole, rough):
        road, held = Road(), [vector.clone() for vector in vectors]
        threads = [threading.Thread(target=run_schedule, args=(plan, held[rank], Through(road, rank), 10.0)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(torch.equal(vector, held[0]) for vector in held)
        assert road.passed == plan.link_elements(numel)
        if vectors is whole:
            assert torch.equal(held[0], torch.stack(whole).sum(0))
        elif name == "mirrored":
            mean = torch.empty(numel)
            mean_in_rank_order(rough, mean)
            assert torch.equal(held[0].mul_(1.0 / ranks), mean)


# -- processes ---------------------------------------------------------------------------------------------------------------------------


def test_processes_have_the_oracles_sum_over_the_planned_links(tmp_path: Path) -> None:
    ranks = 6
    ended = together(ranks, sums, tmp_path)
    assert [rank.status for rank in ended] == [0] * ranks, ended
    for name in STRATEGIES:
        found = [rank.found[name] for rank in ended]
        assert all(each["right"] for each in found), name
        assert len({each for rank in found for each in rank["hashes"]}) == 1, name
        planned = schedule_of(name, ranks, 5, 2).link_elements(NUMEL)
        assert {(rank, int(peer)): n for rank, each in enumerate(found) for peer, n in each["sent"].items()} == dict(planned), name


@pytest.mark.parametrize("name", ["hierarchical", rotating("hierarchical-servers")])
def test_two_nodes_of_two_devices_send_one_vector_up_each(name: str, tmp_path: Path) -> None:
    ended = together(4, partial(uplink, name), tmp_path, local=2)
    assert all(rank.found["right"] for rank in ended)
    up = [sum(n for peer, n in each.found["sent"].items() if int(peer) // 2 != rank // 2) for rank, each in enumerate(ended)]
    assert up == [NUMEL, 0, NUMEL, 0]


@pytest.mark.parametrize(
    ("strategy", "how"),
    [("mirrored", "dies"), ("both-ways-ring", "is silent"), rotating("mirrored", "is silent"), rotating("both-ways-ring", "dies")],
)
def test_a_lost_peer_is_a_sentence_within_the_deadline(tmp_path: Path, strategy: str, how: str) -> None:
    *others, last = together(3, left_by, tmp_path, strategy, how)
    assert last.status == (9 if how == "dies" else 0)
    for rank, each in enumerate(others):
        assert each.found["lost"].startswith(f"rank {rank}: rank ") and "end all ranks and start them again" in each.found["lost"]
        assert each.found["after"] < 20
    assert any("rank 2" in each.found["lost"] for each in others)


# -- alone and refused -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "asked", "sentence"),
    [
        (torch.ones(3), {"strategy": "star"}, "no strategy 'star'; there are mirrored, ring"),
        (torch.ones(3), {"deadline": float("nan")}, "deadline is nan; it must be a number of seconds above 0"),
        (torch.ones(3), {"deadline": -1}, "deadline is -1; it must be"),
        (torch.ones(3), {"deadline": 1e30}, "1000000 at most"),
        (torch.ones(3, dtype=torch.int32), {"mean": True}, "mean of torch.int32"),
        (torch.eye(2).to_sparse(), {}, "only dense"),
        ("abc", {}, "all_reduce of a str; give a tensor"),
    ],
)
def test_what_is_wrong_with_any_number_of_ranks(tensors: Any, asked: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ps.all_reduce(tensors, **asked)


def test_a_lone_process_has_its_own_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    vector = torch.arange(3.0)
    ps.all_reduce(vector, mean=True)
    assert vector.tolist() == [0.0, 1.0, 2.0]


def test_half_an_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set; start the script with torchrun"):
        ps.all_reduce(torch.ones(1))


def test_what_cannot_be_summed_is_refused_with_a_sentence(tmp_path: Path) -> None:
    for rank in together(2, refusals, tmp_path):
        assert rank.status == 0, rank
        star, mean, sparse, few = rank.found
        assert "no strategy 'star'" in star and "mean of torch.int32" in mean and "only dense" in sparse and "at least 5" in few


def test_pieces_of_a_large_vector_are_pipelined() -> None:
    assert len(planner("mirrored", 3)(8 << 20).weights) == 8
