"""Threads that a process depends on.

One that raises ends the process, with the reason where the planner reads it. One that hangs is found: a thread that is watched has a
`ThreadPulse`, and a thread of `Liveness` judges all pulses.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

from psjob.process.errors import leave_message

EXIT_BROKEN = 1
"""A crash, as the planner counts them."""
log = logging.getLogger("psjob")
_end: Callable[[str], None] | None = None
_ends = threading.RLock()


def guard(end: Callable[[str], None] | None = None) -> None:
    """From now on a broken thread of this process ends it: by `end(sentence)`, or at once with the sentence as termination message."""
    global _end
    _end = end or end_broken


def thread(target: Callable[..., None], name: str, *args: Any) -> threading.Thread:
    """A daemon thread that calls `target(*args)`, not started yet. What it raises ends the process, if that is guarded."""

    return threading.Thread(target=_watched(target, name, args), name=name, daemon=True)


def _watched(target: Callable[..., None], name: str, args: tuple[Any, ...]) -> Callable[[], None]:
    def run() -> None:
        try:
            target(*args)
        except Exception as error:
            thread_broken(name, error)

    return run


def start_thread(target: Callable[..., None], name: str, *args: Any) -> threading.Thread:
    """As `thread`, and start it."""
    made = thread(target, name, *args)
    made.start()
    return made


def timer(seconds: float, target: Callable[..., None], name: str, *args: Any) -> threading.Timer:
    """Call `target(*args)` after some seconds, unless it is cancelled."""

    made = threading.Timer(seconds, _watched(target, name, args))
    made.name, made.daemon = name, True
    made.start()
    return made


def thread_broken(name: str, error: BaseException) -> None:
    """A thread met what it did not expect. If the process is not guarded (tests share one), it is only logged."""
    sentence = thread_error(name, error)
    log.error("%s\n%s", sentence, "".join(traceback.format_exception(error)))
    if _end is not None:
        with _ends:  # the first ends the process, and says why
            _end(sentence)


def thread_error(name: str, error: BaseException) -> str:
    """The sentence: thread, exception, and the last frame."""
    return f"thread {name} failed: {type(error).__name__}: {str(error)[:300]}{_at(error.__traceback__)}"


def _at(trace: TracebackType | None) -> str:
    frames = traceback.extract_tb(trace)
    return f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno} {frames[-1].name})" if frames else ""


def end_broken(sentence: str) -> None:
    """End this process now as a crash, with the sentence as its termination message."""
    print(f"psjob: {sentence}", file=sys.stderr, flush=True)
    leave_message({"problem": sentence})
    logging.shutdown()
    os._exit(EXIT_BROKEN)


LOOKS = 8
"""So many looks in the time after which a silent thread counts as hung."""
_of_thread = threading.local()
shard_log = logging.getLogger("psjob.shard")


class ThreadPulse:
    """Of one thread. It beats, is idle (waits for work), or is in a system call that may take long; any other silence is a hang."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._beaten = time.monotonic()
        self._resting: str | None = "not begun"

    def beat(self) -> None:
        """Work continues."""
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
        _of_thread.pulse = self
        self.beat()


@contextlib.contextmanager
def system_call() -> Iterator[None]:
    """A system call of the calling thread is under way, if somebody watches that thread."""
    own: ThreadPulse | None = getattr(_of_thread, "pulse", None)
    if own is None:
        yield
        return
    with own.calling():
        yield


def beat() -> None:
    """The calling thread works on, if somebody watches it."""
    own: ThreadPulse | None = getattr(_of_thread, "pulse", None)
    if own is not None:
        own.beat()


class Liveness:
    """Judges `pulses` in a thread of its own. A thread that is silent for `seconds` is hung. `on_alive` is called LOOKS times in these."""

    def __init__(self, pulses: Sequence[ThreadPulse], seconds: float, on_alive: Callable[[], None] = lambda: None) -> None:
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
        start_thread(self._watch, "liveness")

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
                shard_log.warning("thread %s reports no progress; this shard answers that it is not alive", worst[1].name)
            self.hung = f"thread {worst[1].name} has not reported progress for {worst[0]:.0f} s"

    def _watch(self) -> None:
        while not self._over.wait(self._period):
            self.look(time.monotonic())
