"""What a push does to the parameters. Pure: state, gradient and numbers in; state changed in place."""

from __future__ import annotations

from typing import Final

from psjob.rules.adagrad import Adagrad
from psjob.rules.adam import Adam, AdamW
from psjob.rules.base import Rule
from psjob.rules.dana import DanaZero
from psjob.rules.multi import MultiMomentum
from psjob.rules.reduce import Reduce
from psjob.rules.sgd import SGD, HeavyBall, Nag, Plain

_OPTIMIZERS: Final[tuple[Rule, ...]] = (SGD(), Adam(), AdamW(), Adagrad(), Reduce())
"""What a script's optimizer can be on the shards."""
_ASYNC: Final[tuple[Rule, ...]] = (
    Plain(),
    HeavyBall(),
    Nag(),
    MultiMomentum(),
    DanaZero(),
)
RULES: Final[dict[str, Rule]] = {rule.name: rule for rule in (*_OPTIMIZERS, *_ASYNC)}


def named(name: str) -> Rule:
    """The rule of that name. Raises ValueError, naming those that exist."""
    try:
        return RULES[name]
    except KeyError:
        raise ValueError(f"there is no rule {name!r}; the rules are {', '.join(RULES)}") from None
