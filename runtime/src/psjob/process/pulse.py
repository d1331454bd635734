"""Signs of life: what the threads that a process depends on have done lately, and a thread that judges it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from psjob.process import supervise

LOOKS = 8
"""So many looks in the time after which a silent thread counts as hung."""
_own = threading.local()
log = logging.getLogger("psjob.shard")


class Pulse:
    """Of one thread. It beats, is idle (waits for work), or is in a system call that may take long; any other silence is a hang."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._beaten = time.monotonic()
        self._resting: str | None = "not begun"

    def beat(self) -> None:
        """Work goes on."""
        self._beaten = time.monotonic()
        self._resting = None

    def idle(self) -> None:
        """There is nothing to do."""
        self._resting = "idle"

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """A system call is under way: how long it takes is the kernel's and the disk's to say."""
        before, self._resting = self._resting, "in a system call"
        try:
            yield
        finally:
            self._resting = before
            self._beaten = time.monotonic()

    def silent(self, now: float) -> float:
        """Seconds without a sign of life; 0 while nothing is due."""
        return 0.0 if self._resting is not None else max(0.0, now - self._beaten)

    def bind(self) -> None:
        """It is the calling thread's: `call` and `beat` of this module mean it."""
        _own.pulse = self
        self.beat()


@contextlib.contextmanager
def call() -> Iterator[None]:
    """A system call of the calling thread is under way, if somebody watches that thread."""
    own: Pulse | None = getattr(_own, "pulse", None)
    if own is None:
        yield
        return
    with own.calling():
        yield


def beat() -> None:
    """The calling thread works on, if somebody watches it."""
    own: Pulse | None = getattr(_own, "pulse", None)
    if own is not None:
        own.beat()


class Liveness:
    """Judges `pulses` in a thread of its own. A thread that is silent for `seconds` is hung. `on_alive` is called LOOKS times in these."""

    def __init__(self, pulses: Sequence[Pulse], seconds: float, on_alive: Callable[[], None] = lambda: None) -> None:
        self._pulses, self._seconds, self._on_alive = pulses, seconds, on_alive
        self._period = seconds / LOOKS
        self._looked = time.monotonic()
        self._awake = self._looked
        """Since when this process has not been stopped."""
        self._begun = False
        self._over = threading.Event()
        self.hung: str | None = None
        """What hangs, as a sentence; None: nothing."""

    def start(self) -> None:
        """Begin to watch."""
        self._begun = True
        supervise.start(self._watch, "liveness")

    def close(self) -> None:
        """Watch no more."""
        self._over.set()

    def alive(self) -> bool:
        """Does the process make progress, or wait for work? False also where this watch itself stands still."""
        return self.hung is None and (not self._begun or time.monotonic() - self._looked < self._seconds)

    def look(self, now: float) -> None:
        """Judge. Who was stopped with the whole process (a frozen node, SIGSTOP) is given its time anew."""
        if now - self._looked > 4 * self._period:
            self._awake = now
        self._looked = now
        silent = [(min(pulse.silent(now), now - self._awake), pulse) for pulse in self._pulses]
        worst = max(silent, key=lambda entry: entry[0], default=None)
        if worst is None or worst[0] < self._seconds:
            self.hung = None
            self._on_alive()
        else:
            if self.hung is None:
                log.warning("thread %s reports no progress; this shard answers that it is not alive", worst[1].name)
            self.hung = f"thread {worst[1].name} has not reported progress for {worst[0]:.0f} s"

    def _watch(self) -> None:
        while not self._over.wait(self._period):
            self.look(time.monotonic())
