"""What waits for one thread: nothing is lost or overtaken, and what is urgent is taken at once."""

from __future__ import annotations

import queue
import threading
import time

import pytest

from psjob.shard.coordinator_driver import MANY, Mailbox

LONG = 30.0


def taken(box: Mailbox[int], count: int, timeout: float = LONG) -> tuple[threading.Thread, list[int]]:
    """A thread that takes so many, and what it has taken."""
    found: list[int] = []

    def take() -> None:
        while len(found) < count:
            try:
                found.append(box.get(timeout))
            except queue.Empty:
                pass

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    return thread, found


def asleep(box: Mailbox[int]) -> None:
    end = time.monotonic() + LONG
    while not box._asleep and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(0.05)


def test_what_is_urgent_brings_what_came_before_it() -> None:
    box: Mailbox[int] = Mailbox()
    thread, found = taken(box, 3)
    asleep(box)
    box.put(1, urgent=False)
    box.put(2, urgent=False)
    time.sleep(0.1)
    assert found == [] and box.qsize() == 2
    began = time.monotonic()
    box.put(3)
    thread.join(LONG)
    assert found == [1, 2, 3] and time.monotonic() - began < LONG / 2


def test_what_is_not_urgent_is_taken_when_the_thread_looks() -> None:
    box: Mailbox[int] = Mailbox()
    thread, found = taken(box, 1, timeout=0.05)
    asleep(box)
    box.put(1, urgent=False)
    thread.join(LONG)
    assert found == [1] and box.empty()


def test_many_that_wait_wake_the_thread() -> None:
    box: Mailbox[int] = Mailbox()
    thread, found = taken(box, MANY + 1)
    asleep(box)
    for number in range(MANY + 1):
        box.put(number, urgent=False)
    thread.join(LONG / 2)
    assert found == list(range(MANY + 1))


def test_nothing_is_lost_between_threads() -> None:
    box: Mailbox[int] = Mailbox()
    puts, each = 4, 3000
    thread, found = taken(box, puts * each)

    def put(number: int) -> None:
        for at in range(each):
            box.put(number * each + at, urgent=at % 3 == 0 or at == each - 1)

    threads = [threading.Thread(target=put, args=(number,), daemon=True) for number in range(puts)]
    for one in threads:
        one.start()
    thread.join(LONG)
    assert sorted(found) == list(range(puts * each))
    for number in range(puts):
        assert [one for one in found if one // each == number] == list(range(number * each, (number + 1) * each))


def test_an_empty_one_says_so() -> None:
    with pytest.raises(queue.Empty):
        Mailbox[int]().get(0.01)
