"""The parts of a worker's step: each moment of the script's thread is in one of contract.STEP_PARTS, so they sum to the whole.

The thread says with `to` what it does from here on. Until the script calls psjob it computes. A wait for shards begins as `wire`, and is
divided when it ends. Each answer tells how long its push waited on the shard for other workers, and how long the update took.

On a GPU the script's calls only begin what is computed. `DeviceClock` times it by events, which are read a step later, so nothing waits
for them. The time beyond the calls belongs to `compute`; the host spends it waiting in copies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from threading import get_ident
from time import monotonic
from typing import Any, Final, NamedTuple

import torch

from psjob.contract import STEP_PARTS

COMPUTE, COPY_OUT, WIRE, OTHERS, UPDATE, COPY_BACK, OWN = range(len(STEP_PARTS))
NOBODY: Final = -1
"""What `to` gives to a thread that is not the script's: its time is no part of the step."""
TELL_SECONDS: Final = 1.0
CROWD: Final = 200
"""Workers that tell each second; of more, each tells more seldom."""


class LandedAnswer(NamedTuple):
    """One block's answer, in monotonic seconds of this process."""

    came: float
    """Its header was here."""
    landed: float
    """Its weights were where they are used."""
    copied: float
    """Of that time: seconds of copying from where it was received."""
    held: float
    """Seconds that its push waited on the shard for others."""
    updated: float
    """Seconds of its update."""


def split_wait(began: float, ended: float, answers: Iterable[LandedAnswer]) -> tuple[float, float, float]:
    """(others, update, copy back) of a wait, in seconds; the rest is the wire. `answers` in the order in which they landed.

    At each moment the wait is for the answer that comes next. Backwards from its landing the time is that of its copy, of its bytes, of its
    update, and of what its push waited for, as far as there is time.
    """
    others = update = back = 0.0
    at = began
    for answer in answers:
        landed = min(answer.landed, ended)
        left = landed - at
        if left <= 0:
            continue
        at = landed
        copied = min(left, answer.copied)
        left -= copied
        left -= min(left, max(0.0, answer.landed - answer.came - answer.copied))
        updated = min(left, answer.updated)
        held = min(left - updated, answer.held)
        others, update, back = others + held, update + updated, back + copied
    return others, update, back


def with_device(seconds: Sequence[float], device: float) -> list[float]:
    """The parts, where the device has computed for `device` seconds: what exceeds the script's own is taken from where the host waited."""
    found = list(seconds)
    for part in (COPY_OUT, OWN, WIRE, OTHERS, UPDATE, COPY_BACK):
        moved = min(found[part], max(0.0, device - found[COMPUTE]))
        found[part] -= moved
        found[COMPUTE] += moved
    return found


class StepParts:
    """Of one session. `tell` is given {"parts": seconds by part, "steps": how many} about once a second.

    Counted from the end of the first step, as `Idle` does it.
    """

    def __init__(self, workers: int = 1) -> None:
        self.tell: Callable[[dict[str, Any]], None] = lambda _body: None
        self.seconds = [0.0] * len(STEP_PARTS)
        self.answers: list[LandedAnswer] = []
        """That have landed since the last wait. Any thread adds to it."""
        self.device: DeviceClock | None = None
        self._every = TELL_SECONDS * max(1.0, workers / CROWD)
        self._thread = 0
        self._at, self._since = COMPUTE, monotonic()
        self._clock: int | None = None
        """At which the count began."""
        self._began = 0.0
        self._counts = False
        """Is the first step over?"""

    # -- the script's thread -------------------------------------------------------------------

    def enter(self) -> int:
        """The script calls psjob in this thread; give to `to` what this gives when it continues."""
        self._thread = get_ident()
        return self.to(OWN)

    def to(self, part: int) -> int:
        """From here on the thread does this; what it did before. In other threads nothing."""
        if part < 0 or get_ident() != self._thread:
            return NOBODY
        now, before = monotonic(), self._at
        self.seconds[before] += now - self._since
        self._since, self._at = now, part
        return before

    @property
    def exchanged(self) -> float:
        """Seconds so far that the script was in exchanges with shards, without waits for other workers."""
        return sum(self.seconds[part] for part in (COPY_OUT, WIRE, UPDATE, COPY_BACK))

    def wait(self, part: int = WIRE) -> tuple[int, float]:
        """A wait begins; give to `waited` what this gives."""
        return self.to(part), self._since

    def waited(self, begun: tuple[int, float]) -> None:
        """It is over. A wait on the wire was for what the answers say that have landed since."""
        before, began = begun
        if before == NOBODY:
            return
        waits_for = self.to(before)
        if waits_for != WIRE or not self.answers:
            return
        answers, self.answers = self.answers, []
        parts = split_wait(began, self._since, answers)
        self.seconds[WIRE] -= sum(parts)
        for part, seconds in zip((OTHERS, UPDATE, COPY_BACK), parts, strict=True):
            self.seconds[part] += seconds

    def step_boundary(self, clock: int, last: bool = False) -> None:
        """The script stands before step `clock`; `last`: it makes none any more."""
        self.to(self._at)
        self.answers = []  # nobody waited for these
        if self._clock is None:
            self._clock = clock
        steps = clock - self._clock
        if steps < 1 or (self._counts and not last and self._since - self._began < self._every):
            return
        device = 0.0 if self.device is None else self.device.take()
        seconds, self.seconds = with_device(self.seconds, device), [0.0] * len(STEP_PARTS)
        self._clock, self._began = clock, self._since
        if self._counts:
            self.tell({"parts": [round(one, 6) for one in seconds], "steps": steps})
        self._counts = True

    def begin_step(self) -> int:
        """As `enter`, where the script has its gradients."""
        before = self.enter()
        if self.device is not None:
            self.device.ends()
        return before

    def end_step(self, before: int) -> None:
        """As `to`, where the script has its weights."""
        if self.device is not None:
            self.device.begins()
        self.to(before)

    def timed(self, part: int, call: Callable[[], Any] | None) -> Callable[[], Any] | None:
        """The same call, whose time is of this part."""
        if call is None:
            return None

        def made() -> Any:
            before = self.to(part)
            try:
                return call()
            finally:
                self.to(before)

        return made


def own_time(call: Callable[[Any], None]) -> Callable[[Any], None]:
    """A method that the script calls, of an object with a `session`: its time is psjob's own, but for what it says itself."""

    @wraps(call)
    def timed(job: Any) -> None:
        before = job.session.parts.enter()
        call(job)
        job.session.parts.to(before)

    return timed


class DeviceClock:
    """Of a CUDA device: how long its current stream needs for what the script begins between two steps of the optimizer."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun: torch.cuda.Event | None = None
        self._steps: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def begins(self) -> None:
        self._begun = self._record()

    def ends(self) -> None:
        if self._begun is not None:
            self._steps.append((self._begun, self._record()))
            self._begun = None

    def take(self) -> float:
        """Seconds of the steps that the device is through with, and that were not taken before."""
        milliseconds = 0.0
        while self._steps and self._steps[0][1].query():  # type: ignore[no-untyped-call]
            first, last = self._steps.popleft()
            milliseconds += first.elapsed_time(last)
        return milliseconds / 1000

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event
