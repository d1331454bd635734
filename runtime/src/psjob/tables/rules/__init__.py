"""What a push does to rows. Pure: rows, their state, gradients and hyperparameters in; changed in place."""

from __future__ import annotations

from typing import Final

from psjob.rules.reduction import MONOIDS
from psjob.tables.rules.adagrad import RowAdagrad, RowWiseAdagrad
from psjob.tables.rules.adam import RowAdam
from psjob.tables.rules.base import RowRule
from psjob.tables.rules.combine import Combine
from psjob.tables.rules.ftrl import RowFtrl
from psjob.tables.rules.sgd import RowSGD

__all__ = ["COMBINES", "RULES", "Combine", "RowRule", "named"]

RULES: Final[dict[str, RowRule]] = {rule.name: rule for rule in (RowSGD(), RowAdagrad(), RowWiseAdagrad(), RowAdam(), RowFtrl())}
"""Of gradients."""
COMBINES: Final[dict[str, Combine]] = {name: Combine(name, monoid) for name, monoid in MONOIDS.items()}
"""Rules for pushed values that are not gradients."""


def named(name: str) -> RowRule:
    """The rule of that name. Raises ValueError, naming those that exist."""
    try:
        return COMBINES[name] if name in COMBINES else RULES[name]
    except (KeyError, TypeError):
        raise ValueError(f"there is no rule {str(name)[:40]!r} for rows; the rules are {', '.join(RULES)}") from None
