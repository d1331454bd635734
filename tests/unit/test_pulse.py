"""Liveness follows progress: a slow disk is no hang, a thread that stands still is one, and who was stopped is given its time anew.

- When a keeper judges that its server hangs.
- What waits for one thread: nothing is lost or overtaken, and what is urgent is taken at once.
"""

from __future__ import annotations

import queue
import threading
import time

import pytest

from psjob.process import supervise
from psjob.process.supervise import Liveness, ThreadPulse
from psjob.shard import snapshot_memory
from psjob.shard.coordinator_driver import MANY, Mailbox
from psjob.shard.keeper import LOOKS, Watch
from psjob.shard.snapshot_memory import BackgroundThrottle

TIMEOUT = 8.0


class Watched:
    """A thread's pulse, and the looks at it; `later` lets so much time pass, and looks once a second."""

    def __init__(self) -> None:
        self.now = time.monotonic()
        self.pulse = ThreadPulse("disk")
        self.liveness = Liveness([self.pulse], TIMEOUT)

    def later(self, seconds: float, gap: float = 1.0) -> str | None:
        end = self.now + seconds
        while self.now < end:
            self.now += gap
            self.liveness.look(self.now)
        return self.liveness.hung


def test_a_thread_that_works_and_gives_no_sign_hangs() -> None:
    watched = Watched()
    watched.pulse.beat()
    assert watched.later(TIMEOUT - 2) is None
    assert "thread disk has not reported progress for" in (watched.later(4) or "")
    assert not watched.liveness.alive()
    watched.pulse._beaten = watched.now
    assert watched.later(1) is None, "it continued"


def test_who_waits_for_work_may_do_so_for_ever() -> None:
    watched = Watched()
    assert watched.later(100) is None, "it has not begun"
    watched.pulse.beat()
    watched.pulse.idle()
    assert watched.later(100) is None


def test_a_system_call_may_take_as_long_as_the_disk_does() -> None:
    watched = Watched()
    watched.pulse.bind()
    with supervise.system_call():
        assert watched.later(1000) is None
    watched.pulse._beaten = watched.now
    assert watched.later(TIMEOUT - 2) is None
    assert watched.later(4) is not None, "after the call it is to continue"


def test_a_call_of_a_thread_that_nobody_watches_costs_nothing() -> None:
    seen = []

    def act() -> None:
        with supervise.system_call():
            seen.append(1)
        supervise.beat()

    thread = threading.Thread(target=act)
    thread.start()
    thread.join()
    assert seen == [1]


def test_a_process_that_was_stopped_as_a_whole_is_given_its_time_anew() -> None:
    watched = Watched()
    watched.pulse.beat()
    assert watched.later(300, gap=300) is None, "nothing ran, the watch neither"
    assert watched.later(TIMEOUT - 2) is None
    assert watched.later(4) is not None


# -- gaps between pushes -----------------------------------------------------------------------------------------------------------------


class Clock:
    """Stands for `time` where work beside pushes waits."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 1e-6)


@pytest.mark.parametrize("work", [0.001, 0.05, 1.0])
@pytest.mark.parametrize("parts", [10, 1000])
def test_pushes_that_never_cease_slow_a_checkpoint_by_a_third_and_a_fixed_time(
    monkeypatch: pytest.MonkeyPatch, work: float, parts: int
) -> None:
    clock = Clock()
    monkeypatch.setattr(snapshot_memory, "time", clock)
    between = BackgroundThrottle(clock.monotonic)
    for _ in range(parts):
        clock.now += work
        between.wait()
    took, worked = clock.now - 100.0, work * parts
    assert took <= worked * (1 + 1 / snapshot_memory.SHARE) + snapshot_memory.PATIENCE + 0.1
    assert between.waited >= min(snapshot_memory.SHARE * worked, snapshot_memory.PATIENCE) - 0.1, "as long as it is short, pushes go first"


SECONDS = 4.0
STEP = SECONDS / LOOKS


def hangs(*beats: int, pauses: dict[int, float] | None = None) -> int | None:
    """The look at which it hangs first, with these beats at one look after the other; a look of `pauses` comes so much later."""
    watch, now = Watch(), 0.0
    for number, seen in enumerate(beats):
        now += STEP + (pauses or {}).get(number, 0.0)
        if watch.hangs(seen, SECONDS, now):
            return number
    return None


@pytest.mark.parametrize(
    ("beats", "pauses", "at"),
    [
        pytest.param((0, 1, 2, 3, 4, 5, 6, 7, 8), {}, None, id="alive"),
        pytest.param((0, 1, 2, 2, 2, 2, 2, 2), {}, 2 + LOOKS, id="silent after a sign"),
        pytest.param((0, 1, 2, 2, 2, 2, 3, 3, 3), {}, None, id="a sign in time"),
        pytest.param((5,) * 20, {}, LOOKS, id="silent from the first one on"),
        pytest.param((0, 1, 2, 2, 2, 2, 2, 2, 2, 2), {5: 60.0}, 5 + LOOKS, id="the keeper stood still too"),
    ],
)
def test_a_server_hangs_after_a_silence(beats: tuple[int, ...], pauses: dict[int, float], at: int | None) -> None:
    assert hangs(*beats, pauses=pauses) == at


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
