"""Plays 1F1B on a virtual clock: each device does what is ready, backward passes first, and holds no more micro-batches than it may."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Timed:
    """A stage as the clock sees it; seconds of one micro-batch."""

    forward: float
    backward: float
    devices: tuple[int, ...]
    in_flight: int
    """Of one replica."""
    sends: float = 0.0
    """Seconds that a port is busy with what goes to the next stage, and again with the gradient that comes back."""
    late: float = 0.0
    """Latency of that message."""
    far: bool = False
    """Over the ports that lead out of the host."""


@dataclass
class Timeline:
    """What happened."""

    done: list[float] = field(default_factory=list)
    """When each micro-batch had been through all backward passes, in that order."""
    last: dict[int, float] = field(default_factory=dict)
    """When each stage ended its last backward pass."""
    busy: dict[int, float] = field(default_factory=dict)
    """Seconds that each device computed."""


FORWARD, BACKWARD, FREE = 0, 1, 2


class _Run:
    def __init__(self, stages: Sequence[Timed], count: int, port: Sequence[object]) -> None:
        self.stages, self.count, self.port = stages, count, port
        self.out = Timeline()
        self.clock: list[tuple[float, int, int, int, int]] = []
        self.number = 0
        self.ready: dict[int, dict[int, list[tuple[int, int]]]] = {}
        """Of each device: heaps of (micro-batch, -stage) by direction."""
        self.free: dict[int, bool] = {}
        for stage in stages:
            for device in stage.devices:
                self.ready[device] = {FORWARD: [], BACKWARD: []}
                self.free[device] = True
                self.out.busy[device] = 0.0
        self.held = [[0] * len(stage.devices) for stage in stages]
        self.ports: dict[tuple[object, bool, int], float] = {}

    def play(self) -> Timeline:
        for m in range(self.count):
            self._offer(0.0, FORWARD, 0, m)
        for device in self.ready:
            self._dispatch(0.0, device)
        while self.clock:
            now, _, what, k, m = heapq.heappop(self.clock)
            if what == FREE:
                self.free[k] = True
                self._dispatch(now, k)
            else:
                self._offer(now, what, k, m)
                self._dispatch(now, self._device(k, m))
        return self.out

    def _device(self, k: int, m: int) -> int:
        devices = self.stages[k].devices
        return devices[m % len(devices)]

    def _offer(self, now: float, what: int, k: int, m: int) -> None:
        heapq.heappush(self.ready[self._device(k, m)][what], (m, -k))

    def _dispatch(self, now: float, device: int) -> None:
        if not self.free[device]:
            return
        taken = self._next(device)
        if taken is None:
            return
        what, m, k = taken
        stage = self.stages[k]
        replica = m % len(stage.devices)
        seconds = stage.forward if what == FORWARD else stage.backward
        end = now + seconds
        self.free[device] = False
        self.out.busy[device] += seconds
        if what == FORWARD:
            self.held[k][replica] += 1
            if k + 1 < len(self.stages):
                self._at(self._sent(end, k, k + 1, m), FORWARD, k + 1, m)
            else:
                self._at(end, BACKWARD, k, m)
        else:
            self.held[k][replica] -= 1
            self.out.last[k] = max(self.out.last.get(k, 0.0), end)
            if k:
                self._at(self._sent(end, k, k - 1, m), BACKWARD, k - 1, m)
            else:
                self.out.done.append(end)
        self._at(end, FREE, device, m)

    def _next(self, device: int) -> tuple[int, int, int] | None:
        back, forth = self.ready[device][BACKWARD], self.ready[device][FORWARD]
        if back:
            m, k = heapq.heappop(back)
            return BACKWARD, m, -k
        waiting = []
        found = None
        while forth and found is None:
            m, k = heapq.heappop(forth)
            stage = self.stages[-k]
            if self.held[-k][m % len(stage.devices)] < stage.in_flight:
                found = FORWARD, m, -k
            else:
                waiting.append((m, k))
        for pair in waiting:
            heapq.heappush(forth, pair)
        return found

    def _sent(self, now: float, k: int, to: int, m: int) -> float:
        """When a message is there; the sender's port out and the receiver's port in are busy with it."""
        link = self.stages[min(k, to)]
        if self._device(k, m) == self._device(to, m):
            return now
        ends = ((self.port[self._device(k, m)], link.far, 0), (self.port[self._device(to, m)], link.far, 1))
        start = max([now, *(self.ports.get(end, 0.0) for end in ends)])
        for end in ends:
            self.ports[end] = start + link.sends
        return start + link.sends + link.late

    def _at(self, when: float, what: int, k: int, m: int) -> None:
        self.number += 1
        heapq.heappush(self.clock, (when, self.number, what, k, m))


def play(stages: Sequence[Timed], count: int, port: Sequence[object] | None = None) -> Timeline:
    """`count` micro-batches, all there at the start. `port`: what the messages of each device go through; itself by default."""
    most = max(device for stage in stages for device in stage.devices) + 1
    return _Run(stages, count, port if port is not None else range(most)).play()
