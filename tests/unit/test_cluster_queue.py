"""The queue: no doubles, one turn a key at a time, fair, exact later times, delays that double."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from psjob_operator.cluster.client import JobKey, TokenBucket
from psjob_operator.cluster.queue import FAIR, Queue

A, B, C = JobKey("n", "a"), JobKey("n", "b"), JobKey("n", "c")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_key_added_twice_is_taken_once() -> None:
    queue = Queue(Clock())
    queue.add(A)
    queue.add(A)
    assert queue.take() == A
    assert queue.take() is None


def test_a_key_added_during_its_turn_comes_again_after_it_and_behind_the_others() -> None:
    queue = Queue(Clock())
    queue.add(A)
    assert queue.take() == A
    queue.add(A)
    queue.add(B)
    assert queue.take() == B
    assert queue.take() is None, "A's turn still runs"
    queue.done(A)
    assert queue.take() == A
    queue.done(A)
    queue.done(B)
    assert queue.take() is None


def test_a_later_time_is_kept_exactly_and_the_earliest_wins() -> None:
    clock = Clock()
    queue = Queue(clock)
    queue.add_at(A, 1010.0)
    queue.add_at(A, 1005.0)
    queue.add_at(A, 1020.0)
    clock.now = 1004.9
    assert queue.take() is None
    clock.now = 1005.0
    assert queue.take() == A
    queue.done(A)
    clock.now = 2000.0
    assert queue.take() is None, "the later wishes were answered by the earliest"


def test_failures_in_a_row_double_the_delay_up_to_its_limit_and_success_ends_the_row() -> None:
    clock = Clock()
    queue = Queue(clock, first_backoff=0.5, max_backoff=4.0)
    assert [queue.fail(A) for _ in range(5)] == [0.5, 1.0, 2.0, 4.0, 4.0]
    queue.succeed(A)
    assert queue.fail(A) == 0.5
    assert queue.fail(A, at_least=30.0) == 30.0
    assert [queue.fail(A, at_most=3.0) for _ in range(2)] == [2.0, 3.0]


def test_a_key_rests_after_a_long_turn_and_gathers_what_comes() -> None:
    clock = Clock()
    queue = Queue(clock)
    queue.add(A)
    assert queue.take() == A
    queue.add(A)
    queue.done(A, rest=2.0)
    queue.add(A)
    queue.add(B)
    assert queue.take() == B
    clock.now = 1001.9
    assert queue.take() is None
    clock.now = 1002.0
    assert queue.take() == A
    queue.done(A)
    assert queue.take() is None


def test_what_is_forgotten_does_not_come_back() -> None:
    clock = Clock()
    queue = Queue(clock)
    queue.add_at(A, 1001.0)
    queue.forget(A)
    clock.now = 1002.0
    assert queue.take() is None


def test_next_wakes_for_an_added_key_and_for_a_time_that_comes() -> None:
    async def scenario() -> list[JobKey]:
        queue = Queue()
        waiting = asyncio.create_task(queue.next())
        await asyncio.sleep(0)
        queue.add(B)
        first = await asyncio.wait_for(waiting, 5)
        queue.done(first)
        waiting = asyncio.create_task(queue.next())
        await asyncio.sleep(0)
        queue.add_at(C, 0.0)
        return [first, await asyncio.wait_for(waiting, 5)]

    assert asyncio.run(scenario()) == [B, C]


@given(st.lists(st.sampled_from(["add a", "add b", "add c", "take", "done"]), max_size=60))
def test_no_key_runs_twice_at_once_and_none_is_lost(steps: list[str]) -> None:
    queue = Queue(Clock())
    keys = {"a": A, "b": B, "c": C}
    running: list[JobKey] = []
    wanted: set[JobKey] = set()
    for step in steps:
        if step.startswith("add"):
            queue.add(keys[step[-1]])
            wanted.add(keys[step[-1]])
        elif step == "take":
            key = queue.take()
            if key is not None:
                assert key not in running
                running.append(key)
                wanted.discard(key)
        elif running:
            queue.done(running.pop(0))
    for key in running:
        queue.done(key)
    rest = set()
    while (key := queue.take()) is not None:
        rest.add(key)
        queue.done(key)
    assert rest == wanted


def test_the_bucket_lets_a_burst_through_and_then_spaces_calls_evenly() -> None:
    clock = Clock()
    bucket = TokenBucket(rate=10.0, burst=3, clock=clock)
    assert [bucket.reserve() for _ in range(3)] == [0.0, 0.0, 0.0]
    assert [round(bucket.reserve(), 6) for _ in range(3)] == [0.1, 0.2, 0.3]
    clock.now += 10.0
    assert [bucket.reserve() for _ in range(3)] == [0.0, 0.0, 0.0], "it never holds more than its burst"
    assert bucket.reserve() > 0


def test_nothing_is_kept_of_a_job_that_is_gone() -> None:
    """Its last turn finds no job: that turn's rest is nobody's."""
    queue = Queue(clock=lambda: 5.0)
    key = JobKey("n", "job")
    for _ in range(2):
        queue.add(key)
        assert queue.take() == key
        queue.forget(key)
        queue.done(key, rest=0.2)
    kept = {name: value for name, value in vars(queue).items() if isinstance(value, dict | set | list) or name == "_ready"}
    assert all(not value for value in kept.values()), kept


def test_a_closed_queue_forgets_and_takes_nothing_in() -> None:
    clock = Clock()
    queue = Queue(clock)
    for key in (A, B):
        queue.add(key)
    queue.fail(A)
    queue.add_at(C, clock.now + 1)
    assert queue.take() == A
    queue.done(A, rest=5)
    queue.close()
    queue.add(A)
    queue.add_at(B, clock.now)
    clock.now += 10
    assert queue.take() is None and len(queue) == 0
    queue.open()
    assert queue.take() is None
    queue.add(A)
    assert queue.take() == A
    assert queue.fail(A) == 0.5, "failures of an earlier term are forgotten"


def test_the_lowest_rank_comes_first_and_of_one_rank_the_first() -> None:
    ranks = {A: 2, B: 1, C: 1}
    queue = Queue(Clock(), rank=lambda key: ranks[key])
    for key in (A, B, C):
        queue.add(key)
    assert [queue.take(), queue.take(), queue.take(), queue.take()] == [B, C, A, None]


def test_a_key_that_waits_gets_more_urgent_by_being_added_again_and_never_less() -> None:
    ranks = {A: 2, B: 2, C: 1}
    queue = Queue(Clock(), rank=lambda key: ranks[key])
    for key in (A, B, C):
        queue.add(key)
    ranks[B] = 0
    queue.add(B)
    ranks[C] = 3
    queue.add(C)
    assert [queue.take(), queue.take(), queue.take(), queue.take()] == [B, C, A, None]
    assert queue.waiting() == 0


def test_who_takes_only_what_is_urgent_leaves_the_rest() -> None:
    ranks = {A: 4, B: 0}
    queue = Queue(Clock(), rank=lambda key: ranks[key])
    queue.add(A)
    assert queue.take(1) is None
    queue.add(B)
    assert queue.take(1) == B
    assert queue.take() == A


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=120), st.integers(0, 5))
def test_nobody_starves_and_nobody_is_taken_twice(steps: list[tuple[int, int]], watched: int) -> None:
    """However urgent the others are, a key that waits behind n older ones begins within FAIR * (n + 1) turns."""
    ranks: dict[JobKey, int] = {}
    queue = Queue(Clock(), rank=lambda key: ranks[key])
    slow = JobKey("n", "slow")
    ranks[slow] = 9
    before = [JobKey("n", f"k{number}") for number in range(watched)]
    for key in before:
        ranks[key] = 0
        queue.add(key)
    queue.add(slow)
    turns = 0
    for number, rank in [*steps, *((0, 0) for _ in range(FAIR * (watched + 1)))]:
        key = JobKey("n", f"k{number}")
        ranks[key] = rank
        queue.add(key)
        taken = queue.take()
        assert taken is not None
        queue.done(taken)
        turns += 1
        if taken == slow:
            break
    assert turns <= FAIR * (watched + 1)
