"""What a push does to rows. Pure: rows, their state, gradients and numbers in; changed in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from psjob.rules import base as blocks
from psjob.tables.rules.adagrad import Adagrad
from psjob.tables.rules.adam import Adam
from psjob.tables.rules.base import RowRule
from psjob.tables.rules.ftrl import Ftrl
from psjob.tables.rules.rowwise_adagrad import RowWiseAdagrad
from psjob.tables.rules.sgd import SGD

RULES: Final[dict[str, RowRule]] = {rule.name: rule for rule in (SGD(), Adagrad(), RowWiseAdagrad(), Adam(), Ftrl())}


def named(name: str) -> RowRule:
    """The rule of that name. Raises ValueError, naming those that exist."""
    try:
        return RULES[name]
    except (KeyError, TypeError):
        raise ValueError(f"there is no rule {str(name)[:40]!r} for rows; the rules are {', '.join(RULES)}") from None


def check_numbers(name: str, numbers: Mapping[str, Any]) -> dict[str, float | bool]:
    """Hyperparameters from JSON for the rule `name`, whole and of the right kind. Raises ValueError naming rule, number and value."""
    checked = blocks.check_numbers(named(name), numbers)
    if name == Ftrl.name and checked["lr"] <= 0:
        raise ValueError(f"rule {name}: lr is above 0, since it divides, got {checked['lr']!r}")
    return checked
