"""Reductions: how the pushes of several ranks become one. In rank order, so that the same pushes give the same bits.

`Reduce` makes no update on the shard: it gives the mean gradient back and keeps the weights that workers store. Commutative semirings are
two operations that make sums of products, with whose help pushes compute more than gradients.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from psjob.rules import arrays
from psjob.rules.arrays import Array
from psjob.rules.base import BaseRule, BlockState, Hyperparameters, UpdateFacts

Reduction = Callable[[Sequence[Array], Array], None]
"""Writes what `pushes` (one per rank present, in rank order; 1-D, alike) come to into `out`, which may be the first of them."""


class ReductionProblem(ValueError):
    """A reduction that does not exist, or one of the user's that broke its promise. The text names it and says what to change."""


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
ROBUST: Final[tuple[Reduction, ...]] = (median, trimmed_mean)
"""Those that a minority of ranks cannot move far, nor hold up: a rank that skips a step counts as absent."""
REDUCTIONS: Final[dict[str, Reduction]] = {"mean": mean_in_rank_order, **MONOIDS, "median": median, "trimmed_mean": trimmed_mean}


@dataclass(frozen=True)
class Own:
    """A reduction of the user's. `function` is given a list of the pushes of one block: 1-D tensors of one length and dtype, one per rank
    present, in rank order, at least one. It returns a new tensor of that length and dtype, or one of them, and leaves them as they are.

    It works by element: element i of its answer follows from elements i of only the pushes, since a block is any part of the model.
    The same pushes must give the same bits. It is called by several threads at a time.
    """

    name: str
    function: Callable[[list[Array]], Array]

    def __call__(self, pushes: Sequence[Array], out: Array) -> None:
        """See `Reduction`. Raises ReductionProblem for an exception of the function's, or an answer of another kind, length or dtype."""
        given = f"{len(pushes)} pushes of {arrays.dtype_of(out)} [{len(out)}]"
        try:
            made = self.function(list(pushes))
        except (Exception, SystemExit) as error:  # whoever ends a thread of the shard's leaves its workers waiting
            raise ReductionProblem(
                f"training.sync.reduction {self.name} failed on {given}: {type(error).__name__}: {str(error)[:300]}"
            ) from None
        if not isinstance(made, type(out)) or made.dtype != out.dtype or made.shape != out.shape:
            what = f"{arrays.dtype_of(made)} {list(made.shape)}" if isinstance(made, type(out)) else f"a {type(made).__name__}"
            raise ReductionProblem(f"training.sync.reduction {self.name} made {what} of {given}; it must return a tensor like each of them")
        arrays.put(out, made)


def reduction_named(name: str) -> Reduction:
    """The reduction of that name, or the user's own as `module:function`, which is imported and tried. Raises ReductionProblem."""
    if name in REDUCTIONS:
        return REDUCTIONS[name]
    module, colon, function = name.partition(":")
    if not (colon and module and function):
        raise ReductionProblem(
            f"there is no reduction {name!r}; the reductions are {', '.join(REDUCTIONS)}, or your own as module:function"
        )
    try:
        found = getattr(importlib.import_module(module), function)
    except (Exception, SystemExit) as error:
        raise ReductionProblem(
            f"training.sync.reduction {name} cannot be imported: {type(error).__name__}: {str(error)[:300]}; shards look in their "
            "working folder, on PYTHONPATH and among installed packages"
        ) from None
    if not callable(found):
        raise ReductionProblem(f"training.sync.reduction {name} is a {type(found).__name__}; it must be a function of a list of tensors")
    return _tried(Own(name, found))


_TRIAL: Final = ((3.0, -1.0, 0.5, 2.0), (-2.0, 4.0, 0.5, 1.0), (1.0, 0.0, -6.0, 8.0))
"""Pushes of three ranks."""


def _tried(own: Own) -> Own:
    """`own`, when a few pushes have shown no fault. Raises ReductionProblem."""
    pushes = [torch.tensor(push, dtype=torch.float32, device="cpu") for push in _TRIAL]
    whole, one = torch.empty(4, dtype=torch.float32, device="cpu"), torch.empty(1, dtype=torch.float32, device="cpu")
    own(pushes, whole)
    if [push.tolist() for push in pushes] != [list(push) for push in _TRIAL]:
        raise ReductionProblem(
            f"training.sync.reduction {own.name} writes to the pushes that it is given; it must return a tensor and leave them"
        )
    for at in range(len(whole)):
        own([push[at : at + 1] for push in pushes], one)
        if not torch.allclose(one, whole[at : at + 1], equal_nan=True):
            raise ReductionProblem(
                f"training.sync.reduction {own.name} does not work by element: element {at} of three pushes comes to {float(whole[at]):g} "
                f"among others and to {float(one):g} by itself. A block is any part of the model, so no element may look at another"
            )
    own(pushes[:1], whole)  # as when one rank is left
    return own


def _in_order(join: arrays.Joining, pushes: Sequence[Array], out: Array) -> None:
    if not pushes:
        raise ValueError("a reduction needs at least one push")
    if len(pushes) == 1:
        arrays.put(out, pushes[0])
        return
    arrays.combine(join, pushes[0], pushes[1], out)
    for push in pushes[2:]:
        arrays.combine(join, out, push, out)


def _middle(pushes: Sequence[Array], cut: int, out: Array) -> None:
    """The mean of what is left when each element has lost its `cut` lowest and `cut` highest values."""
    if not pushes:
        raise ValueError("a reduction needs at least one push")
    kept = list(arrays.sorted_by_element(pushes))[cut : len(pushes) - cut]
    mean_in_rank_order(kept, out)


class Reduce(BaseRule):
    """The workers step; the shard counts."""

    name = "reduce"
    hyperparameters: Final[Mapping[str, float | bool]] = {}

    def init(self, weights: Array) -> BlockState:
        """State before the first update."""
        return BlockState(weights)

    def apply(self, state: BlockState, grad: Array, hyperparameters: Hyperparameters, facts: UpdateFacts = UpdateFacts()) -> None:
        """Count; the weights change only when a worker stores them."""
        state.steps += 1


@dataclass(frozen=True)
class Semiring:
    """`plus` joins pushes; `times` makes them, and distributes over it. `one` changes nothing when multiplied; `plus.identity` is zero.

    Shards need only `plus`: workers multiply.
    """

    plus: Monoid
    times: arrays.Joining
    one: float

    def combine(self, row: Sequence[float], rows: Sequence[Array], out: Array) -> None:
        """out = row[0] times rows[0] plus row[1] times rows[1] …: a product of a vector and a matrix by the matrix's rows."""
        terms = [
            arrays.combine(self.times, arrays.full_like(x, value), x, arrays.full_like(x, 0)) for value, x in zip(row, rows, strict=True)
        ]
        self.plus(terms, out)


SEMIRINGS: Final[dict[str, Semiring]] = {
    "plus-times": Semiring(MONOIDS["sum"], "multiply", 1.0),
    "max-plus": Semiring(MONOIDS["max"], "add", 0.0),
    "min-plus": Semiring(MONOIDS["min"], "add", 0.0),
    "max-min": Semiring(MONOIDS["max"], "minimum", float("inf")),
    "or-and": Semiring(MONOIDS["or"], "logical_and", 1.0),
}
"""Sums of products · critical paths · shortest paths (in numbers without -inf) · widest paths · reachability (in 0 and 1)."""
