"""What the processes of one worker bring to a step, and what it comes to: one push of one rank. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Part:
    """Of one process. `none`: rows of the table without a gradient; `bad`: the first that holds NaN or inf."""

    clock: int
    absent: bool = False
    skip: bool = False
    none: frozenset[int] = frozenset()
    bad: int | None = None

    def to_json(self) -> dict[str, Any]:
        """For another process of the worker."""
        return {"clock": self.clock, "absent": self.absent, "skip": self.skip, "none": sorted(self.none), "bad": self.bad}

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Part:
        """What `to_json` gave. Raises KeyError, TypeError and ValueError."""
        bad = None if body["bad"] is None else int(body["bad"])
        return cls(int(body["clock"]), bool(body["absent"]), bool(body["skip"]), frozenset(map(int, body["none"])), bad)


@dataclass(frozen=True)
class Whole:
    """Of the worker. `present`: processes whose gradients are summed, in the order of the sum; none where the worker is absent."""

    present: tuple[int, ...]
    absent: bool
    skip: bool
    none: frozenset[int]
    bad: int | None


def together(parts: Mapping[int, Part]) -> Whole:
    """`parts` by local rank; who has none there is through with its script. A row that some have a gradient of counts as zero elsewhere."""
    there = {local: parts[local] for local in sorted(parts) if not parts[local].absent}
    skip = any(part.skip for part in there.values())
    return Whole(
        present=() if skip else tuple(there),
        absent=not there,
        skip=skip,
        none=frozenset.intersection(*(part.none for part in there.values())) if there else frozenset(),
        bad=next((part.bad for part in there.values() if part.bad is not None), None),
    )


def owner(block: int, active: Sequence[int]) -> int:
    """Which of the processes that take part in a step sums a block."""
    return active[block % len(active)]
