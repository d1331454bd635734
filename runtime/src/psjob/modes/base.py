"""What a mode decides: which pushes count, together and now, and who may continue. Pure; one object serves shard, simulator and reference.

A mode decides once for a whole push (every block of a worker's clock). So an update by some of the workers is by the same ones in every
block. A *version* is a number of updates. The *staleness* of a push is the updates between the weights it was computed on and now.

In a *decided* mode the coordinator decides which pushes count, once for all blocks of all shards.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import ClassVar, Final, NamedTuple, Protocol

MOST_DELAY: Final = 8
"""A worker holds a gradient and an answer for each push that is under way."""


class Push(NamedTuple):
    """A push that arrived and has not been decided on. Pushes sort by worker: the order in which gradients are summed."""

    worker: int
    clock: int
    """The worker's step number, from 0."""
    base: int | None
    """Version of the weights that it was computed on; None: of weights that a restore has undone, so that its staleness is not known."""
    at: float = 0.0
    """When it arrived, in the caller's seconds."""


class Batch(NamedTuple):
    """A decision: an update is the sum of `weights` × gradient over `kept`, in that order; `dropped` have no effect; others wait on."""

    kept: tuple[Push, ...] = ()
    dropped: tuple[Push, ...] = ()
    weights: tuple[float, ...] | None = None
    """None: the mean (a sum in that order, multiplied once by 1/n)."""
    until: float | None = None
    """Nothing yet (both empty), but ask again at this time, even if nothing more arrives."""


class Mode(Protocol):
    """A way to synchronise. Its numbers are its dataclass fields."""

    @property
    def name(self) -> str: ...

    @property
    def inner_steps(self) -> int:
        """0: a push is a gradient. H: it is the difference of weights after H steps of the worker's own."""
        ...

    @property
    def delay(self) -> int:
        """How many of a worker's pushes may be under way while it computes: τ of Li et al. 2014 (OSDI, §3). 0: it waits for each."""
        ...

    def takes(self, arrived: Sequence[Push], expected: Set[int], version: int, now: float = 0.0) -> Batch | None:
        """Decide on pushes that arrived, given in order of arrival; None: they wait. Asked at each arrival and after each decision.

        `expected` are the workers that have not left, `version` is the number of updates made, `now` is the caller's time in seconds.
        """
        ...

    def stale(self, base: int | None, version: int) -> bool:
        """Is a push dropped that was computed on weights of version `base`? Never decided otherwise at a later version."""
        ...

    def may_go(self, clock: int, lowest: int, waiting: int) -> bool:
        """May a worker that has pushed `clock` times begin its next step?

        `lowest` is the least such number over the workers that have not left; `waiting`: how many of its pushes are not decided on.
        """
        ...


class ServedMode(Mode, Protocol):
    """A mode that jobs can run today."""

    @property
    def decided(self) -> bool:
        """The coordinator decides, for all blocks alike (else each block does by itself, and all come to the same decision)."""
        ...

    @property
    def rewinds_together(self) -> bool:
        """A lost shard sends every worker back to the checkpoint (else only that shard's blocks go back)."""
        ...

    @property
    def steady(self) -> bool:
        """No block moves on before every worker that was sent its version has pushed again."""
        ...

    @property
    def worker_update(self) -> bool:
        """The workers may step by themselves on the reduced gradient."""
        ...

    @property
    def ahead(self) -> int | None:
        """How many clocks a worker may be ahead of the slowest. 0: a block's version is the clock; None: any number."""
        ...

    def version_for(self, clock: int) -> int:
        """What a block must have come to before it answers a push of `clock`: a version where `ahead` is 0, else a step that may begin.

        If the mode is decided, see `Decided`.
        """
        ...

    def marks(self) -> bool:
        """Does a snapshot need each worker's mark, rather than a step that all pass?"""
        ...


class BaseMode:
    """What most modes are: a push is a gradient and is never dropped, its worker waits until it is decided on, and all rewind together."""

    inner_steps: int = 0
    delay: int = 0
    decided: ClassVar[bool] = False
    rewinds_together: ClassVar[bool] = True
    steady: ClassVar[bool] = False
    worker_update: ClassVar[bool] = False

    def stale(self, base: int | None, version: int) -> bool:
        return False

    def may_go(self, clock: int, lowest: int, waiting: int) -> bool:
        return waiting <= self.delay

    def version_for(self, clock: int) -> int:
        return clock + 1

    def marks(self) -> bool:
        return False


def check_delay(name: str, delay: int) -> None:
    """Raise ValueError for a delay that no job can have."""
    if not 0 <= delay <= MOST_DELAY:
        raise ValueError(f"{name}: delay is {delay}, must be 0 to {MOST_DELAY}")


class DecidedMode(BaseMode):
    """See `ServedMode`. A shard answers a push when the coordinator says that its worker may go.

    `version_for` counts the worker's own clocks that were answered, not updates.
    """

    decided: ClassVar[bool] = True
    ahead: ClassVar[int | None] = 0
