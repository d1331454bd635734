"""Events that tell whether workers go on, and who waits for whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from psjob.protocol.coordinator.alike import Told
from psjob.protocol.coordinator.drift import Digest


@dataclass(frozen=True)
class Stirred:
    """A worker's script goes on, by a step that pushes nothing.

    `passes`: how many passes over its data it has run through again, told once it stands where it was.
    """

    stream: int
    passes: int = 0


@dataclass(frozen=True)
class StepLost:
    """A worker needs of another stage's worker `rank` what only a lost process of it had made, in that step."""

    stream: int
    rank: int
    step: int


@dataclass(frozen=True)
class WorkersAwaited:
    """Answers of a shard wait for a push of these workers, so many seconds already. `clocks`: complete clocks by rank, of shard 0 alone."""

    shard: int
    seconds: Mapping[int, float]
    clocks: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class InputsSeen:
    """What a worker's first steps were made of, a number each; its script does not use `ps.shard`."""

    stream: int
    sums: tuple[int, ...]


@dataclass(frozen=True)
class DigestCame:
    """What a worker's weights are, in sums."""

    stream: int
    digest: Digest


@dataclass(frozen=True)
class DataSeen:
    """What a worker's data are that it gives to `ps.shard` and trains on."""

    stream: int
    told: Told


@dataclass(frozen=True)
class Measured:
    """What a worker of a stage tells of itself at step `clock`; None where it is not known.

    `idle`: the part of its last steps in which it waited. `resident`, `peak` and `device_peak`: bytes in RAM now and at most, and at most
    on its device. `waits`: what it has waited for since `seconds`, None: it goes on; `awaited`: the worker that this comes from.
    `delay`: by how many updates its last ones were late, where stages do not flush.
    """

    stream: int
    clock: int
    idle: float | None = None
    resident: int | None = None
    peak: int | None = None
    device_peak: int | None = None
    waits: str | None = None
    awaited: int | None = None
    seconds: float = 0.0
    delay: float | None = None
