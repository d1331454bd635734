"""Which test a runner takes next. Decisions only: no process, no clock.

Each runner owns a stretch of the tests in their order, so that tests of one file meet in one process and share its fixtures. A runner whose
stretch is used up takes the later half of the largest other stretch, cut between two files if it can be. A test begins when the machine has
room for it: most tests wait more than they compute, so that more of them run at once than there are cores.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Load:
    """What a test asks of the machine while it runs: cores, memory in GiB. `seconds` is a guess of its time, for fair stretches."""

    cores: float
    memory: float
    seconds: float = 1.0
    alone: bool = False
    """It runs when everything else has ended, and nothing runs beside it."""


@dataclass(frozen=True)
class Test:
    """One test as the turns know it."""

    __test__ = False
    file: str
    load: Load
    whole: bool = False
    """All tests of its file run in one runner: they share what is made for them together."""


class Turns:
    """Shares tests, by their index, between runners. Each index is handed out once."""

    def __init__(self, tests: Sequence[Test], runners: int, room: Load) -> None:
        self._tests = tests
        self._room = room
        self._running: dict[int, int] = {}
        self._files: dict[int, str] = {}
        """By runner, the file of its last test."""
        self._queue: list[int] = []
        """Runners whose test waits for room, in their order: light tests do not keep a heavy one out forever."""
        shared = [index for index, test in enumerate(tests) if not test.load.alone]
        self._alone = [index for index, test in enumerate(tests) if test.load.alone]
        self._stretches = self._cut(shared, runners)

    @property
    def left(self) -> int:
        """Tests that have not been handed out."""
        return sum(map(len, self._stretches)) + len(self._alone)

    def begin(self, idle: Iterable[int]) -> list[tuple[int, int]]:
        """Of these idle runners those that begin a test now, each with its test; the others wait for room. Call it again after `end`."""
        idle = set(idle)
        waiting = [runner for runner in self._queue if runner in idle]
        taken = [(runner, self._take(runner)) for runner in (*waiting, *sorted(idle.difference(waiting)))]
        return [(runner, index) for runner, index in taken if index is not None]

    def ahead(self, runner: int) -> int | None:
        """The test that this runner will probably have next: fixtures that it shares are kept for it."""
        stretch = self._stretches[runner]
        return stretch[0] if stretch else None

    def end(self, runner: int) -> None:
        """The runner's test has ended, in whichever way."""
        self._running.pop(runner, None)

    def drop(self) -> list[int]:
        """Hand out nothing more; the tests that will not run."""
        dropped = [index for stretch in (*self._stretches, self._alone) for index in stretch]
        for stretch in (*self._stretches, self._alone):
            stretch.clear()
        return dropped

    def _take(self, runner: int) -> int | None:
        if not self._stretches[runner]:
            self._steal(runner)
        stretch = self._stretches[runner]
        if not stretch:
            if runner in self._queue:
                self._queue.remove(runner)
            if not self._alone or self._running or any(self._stretches):
                return None
            stretch = self._alone
        if runner not in self._queue:
            self._queue.append(runner)
        if self._queue[0] != runner or not self._fits(self._tests[stretch[0]].load):
            return None
        self._queue.remove(runner)
        index = self._running[runner] = stretch.pop(0)
        self._files[runner] = self._tests[index].file
        return index

    def _fits(self, load: Load) -> bool:
        running = [self._tests[index].load for index in self._running.values()]
        if not running:
            return True
        if any(other.alone for other in running):
            return False
        cores = load.cores + sum(other.cores for other in running)
        memory = load.memory + sum(other.memory for other in running)
        return cores <= self._room.cores + 1e-9 and memory <= self._room.memory + 1e-9

    def _seconds(self, stretch: Sequence[int]) -> float:
        return sum(self._tests[index].load.seconds for index in stretch)

    def _cut(self, indexes: Sequence[int], runners: int) -> list[list[int]]:
        share = self._seconds(indexes) / runners
        stretches: list[list[int]] = [[] for _ in range(runners)]
        taken, last, file = 0.0, 0, ""
        for index in indexes:
            test = self._tests[index]
            if not (test.whole and test.file == file):
                last = min(runners - 1, int(taken / share)) if share else 0
            stretches[last].append(index)
            taken, file = taken + test.load.seconds, test.file
        return stretches

    def _steal(self, runner: int) -> None:
        """Take the later half of the stretch with most seconds left."""
        for victim in sorted(range(len(self._stretches)), key=lambda other: -self._seconds(self._stretches[other])):
            place = self._middle(victim)
            if place is not None:
                self._stretches[runner] = self._stretches[victim][place:]
                del self._stretches[victim][place:]
                return

    def _middle(self, victim: int) -> int | None:
        """Where half of the victim's seconds lie before: between two files if that can be; None if nothing may be taken."""
        stretch = self._stretches[victim]
        half, passed, middle = self._seconds(stretch) / 2, 0.0, max(0, len(stretch) - 1)
        for place, index in enumerate(stretch):
            if passed >= half and place:
                middle = place
                break
            passed += self._tests[index].load.seconds
        files = [self._files.get(victim, ""), *(self._tests[index].file for index in stretch)]
        edges = [place for place in range(len(stretch)) if files[place] != files[place + 1]]
        later = [place for place in edges if place] or edges
        if later:
            return min(later, key=lambda place: abs(place - middle))
        return middle if stretch and not self._tests[stretch[middle]].whole else None
