"""Virtual time, one source of chance, and processes that can die, stand still and see wrong clocks."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from random import Random
from typing import Any

WALL = 1_700_000_000.0
"""Unix time at virtual second 0."""


class Kernel:
    """The event queue. Events at one time run in the order in which they were asked for, so a seed has one history."""

    def __init__(self, seed: int | str) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self.steps = 0
        self.traced: list[str] | None = None
        """What happened, a line each; None: nobody wants to read it."""
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def after(self, delay: float, act: Callable[..., None], *args: Any) -> None:
        """Call `act(*args)` in `delay` seconds."""
        self._count += 1
        heapq.heappush(self._queue, (self.now + delay, self._count, act, args))

    def run(self, done: Callable[[], bool], until: float) -> bool:
        """Run events until `done` or virtual time `until`; True where it is done."""
        queue = self._queue
        while queue:
            if done():
                return True
            if queue[0][0] > until:
                break
            self.now, _, act, args = heapq.heappop(queue)
            self.steps += 1
            act(*args)
        return done()

    def trace(self, who: str, what: str) -> None:
        """Note a line, where somebody wants to read them."""
        if self.traced is not None:
            self.traced.append(f"{self.now:9.3f} {who:<10} {what}")


class Process:
    """One start of one program. `pod` names it; it is its own host. A process that stands still hears of everything when it continues."""

    def __init__(self, kernel: Kernel, pod: str) -> None:
        self.kernel, self.pod = kernel, pod
        self.alive = True
        self.gone = False
        """Dead without a word: no stream of it was closed."""
        self.frozen = False
        self.jump = 0.0
        """Seconds by which its monotonic clock has jumped ahead."""
        self.wall_jump = 0.0
        """Seconds by which its wall clock is off; may be below 0."""
        self.born = kernel.now
        self.offset = kernel.random.uniform(0.0, 5000.0)
        """Its host's monotonic clock when it began."""
        self.code: int | None = None
        self.message: dict[str, Any] = {}
        self._late: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def clock(self) -> float:
        """Monotonic seconds, as this process sees them."""
        return self.kernel.now - self.born + self.offset + self.jump

    def wall(self) -> float:
        """Unix time, as this process sees it."""
        return WALL + self.kernel.now + self.wall_jump

    def call(self, act: Callable[..., None], *args: Any) -> None:
        """Do this in the process, now or when it continues; never where it is dead."""
        if self.frozen:
            self._late.append((act, args))
        elif self.alive:
            act(*args)

    def after(self, delay: float, act: Callable[..., None], *args: Any) -> None:
        """Do this in the process in `delay` seconds."""
        self.kernel.after(delay, self.call, act, *args)

    def freeze(self) -> None:
        """Stand still."""
        if self.alive:
            self.frozen = True
            self.trace("stands still")

    def thaw(self) -> None:
        """Continue. What came meanwhile is heard now, in its order."""
        if not self.frozen:
            return
        self.frozen = False
        self.trace("goes on")
        late, self._late = self._late, []
        for position, (act, args) in enumerate(late):
            if self.frozen:
                self._late = [*late[position:], *self._late]
                return
            self.call(act, *args)

    def end(self, code: int, message: dict[str, Any] | None = None) -> None:
        """The process has ended with an exit status. Its streams are its driver's to close."""
        if self.alive:
            self.alive, self.frozen, self.code = False, False, code
            self.message = message or {}
            self._late.clear()
            self.trace(f"ends with {code} {self.message or ''}")

    def trace(self, what: str) -> None:
        """Note a line of this process."""
        self.kernel.trace(self.pod, what)
