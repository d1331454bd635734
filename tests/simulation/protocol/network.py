"""Streams between processes: ordered bytes within one, anything between two. Delay, slow links, breaks, half-open ends, partitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.simulation.protocol.kernel import Kernel, Process

FRAME = 128
"""Bytes of a frame's header."""
AGAIN = (0.2, 1.2)
"""After a partition has healed, seconds until what was lost is sent again."""
KEEPALIVE = (15.0, 45.0)
"""Seconds in which the kernel finds that the other half of a stream is gone, where nothing is sent."""


class End:
    """One process's end of a stream. `heard(frame)` and `ended()` are called in its process."""

    __slots__ = ("arrives", "closed", "ended", "free", "heard", "held", "network", "number", "owner", "peer", "tag", "turn")

    def __init__(self, network: Network, owner: Process, number: int) -> None:
        self.network, self.owner, self.number = network, owner, number
        self.peer: End = self
        self.heard: Callable[[Any], None] = lambda frame: None
        self.ended: Callable[[], None] = lambda: None
        self.closed = False
        """This end reads and writes no more."""
        self.turn = 0
        """Raised when all that is under way from this end is lost."""
        self.free = 0.0
        """When the wire has taken all that was sent so far."""
        self.arrives = 0.0
        self.held: list[Any] = []
        """What waits for a partition to heal."""
        self.tag: Any = None

    def send(self, frame: Any, size: int = 0) -> None:
        """Send a frame with `size` bytes of payload. On a stream that has ended it is forgotten."""
        if not self.closed:
            self.network.carry(self, frame, FRAME + size)

    def close(self) -> None:
        """Close this end; the peer hears of it after all that was sent."""
        if not self.closed:
            self.closed = True
            self.network.open.pop(self, None)
            self.network.carry(self, None, FRAME)


class Network:
    """`rate` bytes a second and `delay` seconds of a link, by the pair of pods where it differs from the rest."""

    def __init__(self, kernel: Kernel, delay: float, rate: float) -> None:
        self.kernel, self.delay, self.rate = kernel, delay, rate
        self.slow: dict[tuple[str, str], tuple[float, float]] = {}
        """By (from, to): delay and rate of that direction."""
        self.walls: dict[int, Callable[[str, str], bool]] = {}
        """Partitions: does nothing get from one pod to another?"""
        self.frames = 0
        self.open: dict[End, None] = {}
        self._waiting: dict[End, None] = {}
        self._count = 0

    def blocked(self, source: str, target: str) -> bool:
        """Does nothing get from `source` to `target` now?"""
        return bool(self.walls) and any(wall(source, target) for wall in self.walls.values())

    def connect(self, source: Process, target: Process) -> tuple[End, End] | None:
        """A new stream, the dialling end first; None where the target cannot be reached."""
        if not target.alive or self.blocked(source.pod, target.pod) or self.blocked(target.pod, source.pod):
            return None
        self._count += 1
        one, other = End(self, source, self._count), End(self, target, self._count)
        one.peer, other.peer = other, one
        self.open[one] = self.open[other] = None
        return one, other

    def latency(self, source: str, target: str) -> float:
        """Seconds that the next bytes take."""
        delay = self.slow[source, target][0] if (source, target) in self.slow else self.delay
        return delay * (0.5 + self.kernel.random.random())

    def carry(self, end: End, frame: Any, size: int) -> None:
        """Put a frame (None: the end of the stream) on the wire."""
        now, source, target = self.kernel.now, end.owner.pod, end.peer.owner.pod
        delay, rate = self.slow.get((source, target), (self.delay, self.rate)) if self.slow else (self.delay, self.rate)
        end.free = max(now, end.free) + size / rate
        end.arrives = max(end.arrives, end.free + delay * (0.5 + self.kernel.random.random()))
        self.kernel.after(end.arrives - now, self._arrive, end, frame, end.turn)

    def _arrive(self, end: End, frame: Any, turn: int) -> None:
        if end.turn != turn:
            return
        if end.held or (self.walls and self.blocked(end.owner.pod, end.peer.owner.pod)):
            end.held.append(frame)
            self._waiting[end] = None
            return
        self._land(end, frame)

    def _land(self, end: End, frame: Any) -> None:
        peer = end.peer
        if peer.owner.gone:
            return
        if peer.closed or not peer.owner.alive:
            if frame is not None:
                self.reset(peer)
            return
        self.frames += 1
        if frame is None:
            peer.owner.call(self._hear_end, peer)
        else:
            peer.owner.call(self._hear, peer, frame)

    def _hear(self, end: End, frame: Any) -> None:
        if not end.closed:
            end.heard(frame)

    def _hear_end(self, end: End) -> None:
        if not end.closed:
            end.closed = True
            end.turn += 1
            self.open.pop(end, None)
            end.ended()

    def reset(self, end: End) -> None:
        """Whoever sends to `end` is told that nobody reads there, where the word gets through."""
        if self.blocked(end.owner.pod, end.peer.owner.pod):
            return
        self.kernel.after(self.latency(end.owner.pod, end.peer.owner.pod), end.peer.owner.call, self._hear_end, end.peer)

    def heal(self, wall: int) -> None:
        """A partition ends. What was lost in it is sent again."""
        self.walls.pop(wall, None)
        for end in list(self._waiting):
            if not self.blocked(end.owner.pod, end.peer.owner.pod):
                del self._waiting[end]
                self.kernel.after(self.kernel.random.uniform(*AGAIN), self._again, end)

    def _again(self, end: End) -> None:
        if self.walls and self.blocked(end.owner.pod, end.peer.owner.pod):
            self._waiting[end] = None
            return
        held, end.held = end.held, []
        for frame in held:
            self._land(end, frame)

    def break_stream(self, end: End, told: bool, lingers: float) -> None:
        """A stream breaks: what is under way in one direction is lost at once, in the other after `lingers` seconds.

        `told`: both ends hear of it; else only `end`, and the other stays half-open until it sends.
        """
        end.peer.turn += 1
        end.peer.held.clear()
        turn = end.turn
        end.owner.call(self._hear_end, end)
        if lingers:
            end.turn = turn
        self.kernel.after(lingers, self._cut, end, told)

    def _cut(self, end: End, told: bool) -> None:
        end.turn += 1
        end.held.clear()
        if told:
            end.peer.owner.call(self._hear_end, end.peer)
        else:
            self.kernel.after(self.kernel.random.uniform(*KEEPALIVE), end.peer.owner.call, self._hear_end, end.peer)

    def killed(self, process: Process, silently: bool) -> None:
        """A process is dead: its host closes its streams, or (`silently`) nobody does."""
        process.gone = silently
        for end in [end for end in self.open if end.owner is process]:
            end.closed = True
            self.open.pop(end, None)
            if silently:
                end.turn += 1
                self.kernel.after(self.kernel.random.uniform(*KEEPALIVE), end.peer.owner.call, self._hear_end, end.peer)
            else:
                self.carry(end, None, FRAME)
