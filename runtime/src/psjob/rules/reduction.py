"""Reductions: how the pushes of several ranks become one. In rank order, so that the same pushes give the same bits."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, cast

from psjob.rules import arrays
from psjob.rules.arrays import Array

Reduction = Callable[[Sequence[Array], Array], None]
"""Writes what `pushes` (one a rank present, in rank order; 1-D, alike) come to into `out`, which may be the first of them."""


def mean_in_rank_order(pushes: Sequence[Array], out: Array) -> None:
    """The mean: added from left to right, then one multiplication. NaN and inf pass through. Raises ValueError without any push."""
    _in_order("add", pushes, out)
    if len(pushes) > 1:
        out *= 1.0 / len(pushes)


@dataclass(frozen=True)
class Monoid:
    """An operation that is associative and commutative, so that pushes may be joined one by one, by a tree, or late.

    `identity` is the value that changes nothing. One that is `idempotent` (x + x = x) gives the same when a push is counted twice.
    `flags`: what counts of an element is whether it is 0.
    """

    join: arrays.Joining
    identity: float
    idempotent: bool
    flags: bool = False

    def __call__(self, pushes: Sequence[Array], out: Array) -> None:
        """See `Reduction`. Raises ValueError without any push."""
        _in_order(self.join, [arrays.as_flags(push) for push in pushes] if self.flags else pushes, out)


def median(pushes: Sequence[Array], out: Array) -> None:
    """By element, the one in the middle, or the mean of the two: fewer than half of the ranks cannot move it far (Yin et al. 2018)."""
    _middle(pushes, (len(pushes) - 1) // 2, out)


def trimmed_mean(pushes: Sequence[Array], out: Array) -> None:
    """By element, the mean without the n // 4 lowest and the n // 4 highest of n (Yin et al. 2018, arXiv 1803.01498)."""
    _middle(pushes, len(pushes) // 4, out)


MONOIDS: Final[dict[str, Monoid]] = {
    "sum": Monoid("add", 0.0, idempotent=False),
    "max": Monoid("maximum", float("-inf"), idempotent=True),
    "min": Monoid("minimum", float("inf"), idempotent=True),
    "or": Monoid("logical_or", 0.0, idempotent=True, flags=True),
    "and": Monoid("logical_and", 1.0, idempotent=True, flags=True),
    "count": Monoid("add", 0.0, idempotent=False, flags=True),
    "logsumexp": Monoid("logaddexp", float("-inf"), idempotent=False),
}
"""`or`, `and` and `count` (of the ranks where an element is not 0) give whole numbers, in the dtype of the pushes."""
REDUCTIONS: Final[dict[str, Reduction]] = {"mean": mean_in_rank_order, **MONOIDS, "median": median, "trimmed_mean": trimmed_mean}


def named(name: str) -> Reduction:
    """The reduction of that name, or the user's own as `module:function`, which is imported. Raises ValueError, naming what there is."""
    if name in REDUCTIONS:
        return REDUCTIONS[name]
    module, colon, function = name.partition(":")
    if not (colon and module and function):
        raise ValueError(f"there is no reduction {name!r}; the reductions are {', '.join(REDUCTIONS)}, or your own as module:function")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"reduction {name!r} cannot be imported: {error}") from None
    if not callable(found):
        raise ValueError(f"reduction {name!r} is a {type(found).__name__}; it must be a function of (pushes, out)")
    return cast(Reduction, found)


def _in_order(join: arrays.Joining, pushes: Sequence[Array], out: Array) -> None:
    if not pushes:
        raise ValueError("a reduction needs at least one push")
    if len(pushes) == 1:
        arrays.put(out, pushes[0])
        return
    arrays.join(join, pushes[0], pushes[1], out)
    for push in pushes[2:]:
        arrays.join(join, out, push, out)


def _middle(pushes: Sequence[Array], cut: int, out: Array) -> None:
    """The mean of what is left when each element has lost its `cut` lowest and `cut` highest values."""
    if not pushes:
        raise ValueError("a reduction needs at least one push")
    kept = list(arrays.sorted_by_element(pushes))[cut : len(pushes) - cut]
    mean_in_rank_order(kept, out)
