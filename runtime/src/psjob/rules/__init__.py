"""What a push does to the parameters. Pure: state, gradient and numbers in; state changed in place."""

from __future__ import annotations

from typing import Final

from psjob.rules.adagrad import Adagrad
from psjob.rules.adam import Adam, AdamW
from psjob.rules.base import Rule
from psjob.rules.reduce import Reduce
from psjob.rules.sgd import SGD

RULES: Final[dict[str, Rule]] = {rule.name: rule for rule in (SGD(), Adam(), AdamW(), Adagrad(), Reduce())}


def named(name: str) -> Rule:
    """The rule of that name. Raises ValueError, naming those that exist."""
    try:
        return RULES[name]
    except KeyError:
        raise ValueError(f"there is no rule {name!r}; the rules are {', '.join(RULES)}") from None
