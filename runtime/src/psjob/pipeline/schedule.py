"""What one worker of a stage does next, batch after batch: forwards, backwards and updates, in the order of its way of training. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from psjob.pipeline.delays import warm_up
from psjob.pipeline.ways import TrainingWay


@dataclass(frozen=True)
class Forward:
    """Of one micro-batch of a batch."""

    batch: int
    micro: int


@dataclass(frozen=True)
class Backward:
    """Of a micro-batch whose forward was made."""

    batch: int
    micro: int


@dataclass(frozen=True)
class Update:
    """All backwards of a batch are made, and the script has stepped: its gradient is pushed."""

    batch: int


Work = Forward | Backward | Update


class StageSchedule:
    """Of replica `replica` of stage `stage`. Batches are counted from `first`; before it, each has made its update.

    A worker makes `warm_up` forwards ahead of its backwards, over the edges of batches where its way does not flush. An update is made
    when its batch's backwards are done and `step` was called for it.

    Attributes:
        updates: the version of the stage's weights: batches whose update was made.
        stepped: batches for which `step` was called: the next batch has this number.
    """

    def __init__(self, way: TrainingWay, stage: int, replicas: Sequence[int], replica: int = 0, first: int = 0) -> None:
        self.way, self._replica, self._replicas = way, replica, replicas[stage]
        self._ahead = warm_up(stage, replicas)
        self.updates = self.stepped = first
        self._open: deque[Forward] = deque()
        """Forwards whose backward is to come."""
        self._left: dict[int, int] = {}
        """By batch: backwards that are to come."""

    def batch(self, microbatches: int) -> Iterator[Work]:
        """The next batch, cut in so many parts: what is done of it and of those before. Each piece is done before the next is asked for."""
        number = self.stepped
        own = range(self._replica, microbatches, self._replicas)
        self._left[number] = len(own)
        while self.updates < self.way.awaits(number) and self._open:
            yield from self._back()
        for micro in own:
            forward = Forward(number, micro)
            yield forward
            self._open.append(forward)
            if len(self._open) > self._ahead:
                yield from self._back()
        if self.way.flushes:
            yield from self.drain()

    def step(self) -> Iterator[Work]:
        """The script's step that follows a batch."""
        self.stepped += 1
        return self._updates()

    def drain(self) -> Iterator[Work]:
        """No batch follows, or none before this one is through: the backwards that are left."""
        while self._open:
            yield from self._back()

    def _back(self) -> Iterator[Work]:
        oldest = self._open.popleft()
        yield Backward(oldest.batch, oldest.micro)
        self._left[oldest.batch] -= 1
        yield from self._updates()

    def _updates(self) -> Iterator[Work]:
        while self.updates < self.stepped and not self._left[self.updates]:
            yield Update(self.updates)
            del self._left[self.updates]
            self.updates += 1
