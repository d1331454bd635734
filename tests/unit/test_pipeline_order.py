"""Orders of work, delays and ways of pipelines: pure formulas, and schedules run against each other on queues."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psjob.pipeline.schedule import Flush, FTPipe, PipeDream, TwoBW, double_buffered, stashed, warm_up
from tests.support.pipeline_orders import Direction, GPipe, StageWork, gpipe, one_forward_one_backward, without_flush, work_of

F, B = Direction.FORWARD, Direction.BACKWARD
depth, many = st.integers(1, 6), st.integers(1, 12)


def text(work: list[StageWork]) -> str:
    return " ".join(f"{one.direction.value}{one.micro}" for one in work)


def test_the_orders_of_three_stages() -> None:
    assert text(gpipe(3)) == "F0 F1 F2 B0 B1 B2"
    assert [text(one_forward_one_backward(k, 3, 4)) for k in range(3)] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    assert text(without_flush(0, (3, 1), 12, replica=1)) == "F1 F4 B1 F7 B4 F10 B7 B10"


def most_open(work: list[StageWork]) -> int:
    now = most = 0
    for one in work:
        now += 1 if one.direction is F else -1
        most = max(most, now)
    return most


def check_each_once(work: list[StageWork], numbers: range) -> None:
    assert Counter(work) == Counter([StageWork(F, n) for n in numbers] + [StageWork(B, n) for n in numbers])
    for n in numbers:
        assert work.index(StageWork(F, n)) < work.index(StageWork(B, n))
    for direction in Direction:
        assert [one.micro for one in work if one.direction is direction] == list(numbers)


@given(stages=depth, microbatches=many, data=st.data())
def test_each_micro_batch_goes_forth_and_back_once_and_few_are_in_flight(stages: int, microbatches: int, data: st.DataObject) -> None:
    stage = data.draw(st.integers(0, stages - 1))
    flush = one_forward_one_backward(stage, stages, microbatches, first=7)
    check_each_once(flush, range(7, 7 + microbatches))
    assert most_open(flush) == min(microbatches, stages - stage)
    check_each_once(gpipe(microbatches), range(microbatches))
    endless = without_flush(stage, [1] * stages, microbatches)
    check_each_once(endless, range(microbatches))
    assert most_open(endless) <= stages - stage


def run_all(
    orders: dict[tuple[int, int], list[StageWork]], replicas: list[int], seconds: int = 1
) -> tuple[int, dict[tuple[int, int], int]]:
    """Let workers (stage, replica) follow their orders on a clock. Returns the end, and how long each worked. Fails where all wait."""
    last = len(replicas) - 1
    done: dict[tuple[int, StageWork], int] = {}
    places, free, busy = dict.fromkeys(orders, 0), dict.fromkeys(orders, 0), dict.fromkeys(orders, 0)
    while any(places[who] < len(work) for who, work in orders.items()):
        moved = False
        for (stage, replica), work in orders.items():
            while places[stage, replica] < len(work):
                one = work[places[stage, replica]]
                if one.direction is F:
                    needs = (stage - 1, one) if stage else None
                else:
                    needs = (stage + 1, one) if stage < last else (stage, StageWork(F, one.micro))
                if needs is not None and needs not in done:
                    break
                begin = max(free[stage, replica], done[needs] if needs else 0)
                free[stage, replica] = done[stage, one] = begin + seconds
                busy[stage, replica] += seconds
                places[stage, replica] += 1
                moved = True
        assert moved, f"all wait: {places}"
    return max(free.values()), busy


@given(replicas=st.lists(st.integers(1, 4), min_size=1, max_size=5), total=st.integers(1, 30))
@settings(deadline=None)
def test_stages_with_any_replicas_never_wait_for_each_other(replicas: list[int], total: int) -> None:
    orders = {(k, r): without_flush(k, replicas, total, r) for k, count in enumerate(replicas) for r in range(count)}
    run_all(orders, replicas)
    for stage in range(len(replicas)):
        assert Counter(one for (k, _), work in orders.items() if k == stage for one in work if one.direction is B) == Counter(
            StageWork(B, n) for n in range(total)
        )


@given(stages=depth, microbatches=many)
@settings(deadline=None)
def test_a_flush_idles_by_the_formula_and_no_flush_hardly(stages: int, microbatches: int) -> None:
    for way in (GPipe(), Flush()):
        orders = {(k, 0): work_of(way, k, stages, microbatches, 1) for k in range(stages)}
        end, busy = run_all(orders, [1] * stages)
        assert 1 - busy[0, 0] / end == pytest.approx((stages - 1) / (microbatches + stages - 1))
    end, busy = run_all({(k, 0): work_of(PipeDream(), k, stages, 1, 400) for k in range(stages)}, [1] * stages)
    assert end - busy[0, 0] <= 2 * (stages - 1)


@given(stages=depth, microbatches=st.integers(1, 8), data=st.data())
def test_the_delay_is_what_the_order_of_work_makes_it(stages: int, microbatches: int, data: st.DataObject) -> None:
    """A stage's own order says how many updates it has made when a minibatch begins."""
    stage = data.draw(st.integers(0, stages - 1))
    work = without_flush(stage, [1] * stages, 40 * microbatches)
    begins = [work.index(StageWork(F, n * microbatches)) for n in range(40)]
    made = [sum(one.direction is B for one in work[:place]) // microbatches for place in begins]
    late = [n - updates for n, updates in enumerate(made)]
    expected = stashed(stage, [1] * stages, microbatches)
    assert late == [min(n, expected) for n in range(40)]
    if microbatches == 1:
        assert expected == stages - 1 - stage


def test_delays_of_each_way() -> None:
    assert [PipeDream().delay(k, [1] * 4, 1) for k in range(4)] == [3, 2, 1, 0]
    assert [PipeDream().delay(k, [1] * 4, 4) for k in range(4)] == [1, 1, 1, 0]
    assert [PipeDream(vertical_sync=True).delay(k, [1] * 4, 1) for k in range(4)] == [3] * 4
    assert [TwoBW().delay(k, [1] * 4, 4) for k in range(4)] == [1] * 4
    assert [FTPipe().delay(k, [1] * 4, 1) for k in range(4)] == [3, 2, 1, 0]
    assert [Flush().delay(k, [1] * 4, 2) for k in range(4)] == [0] * 4
    assert [stashed(k, (15, 1)) for k in range(2)] == [1, 0]
    assert [warm_up(k, (9, 5, 1, 1)) for k in range(4)] == [1, 1, 1, 0]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: warm_up(3, (1, 1)), "stage 3 of 2 stages: must be 0 to 1"),
        (lambda: warm_up(0, (1, 0)), "replicas of stage 1 is 0, must be 1 or more"),
        (lambda: double_buffered(4, 3), "microbatches is 3 with 4 stages: 2BW needs at least one for each stage; raise it to 4"),
        (lambda: gpipe(0), "microbatches is 0, must be 1 or more"),
        (lambda: without_flush(0, (2, 1), 4, replica=2), "replica 2 of stage 0: must be 0 to 1"),
    ],
)
def test_what_cannot_be_is_refused(call: object, says: str) -> None:
    with pytest.raises(ValueError, match="^" + says.replace("(", r"\(") + "$"):
        call()  # type: ignore[operator]
