"""What a push does to the parameters. Pure: state, gradient and hyperparameters in; state changed in place."""

from __future__ import annotations

from typing import Final

from psjob.rules.adagrad import Adagrad, Ftrl
from psjob.rules.adam import Adam, AdamW, AsyncAdam, NAdam
from psjob.rules.base import Rule
from psjob.rules.dana import DanaSlim, DanaZero, MultiMomentum
from psjob.rules.outer import DelayedNesterov, OuterNesterov
from psjob.rules.reduction import Reduce
from psjob.rules.sgd import SGD, HeavyBall, Nag, Plain
from psjob.rules.stale import DelayCompensated, GapAware, LrOverLag

_OPTIMIZERS: Final[tuple[Rule, ...]] = (SGD(), Adam(), AdamW(), NAdam(), Adagrad(), Reduce())
"""What a script's optimizer can be on the shards."""
_ASYNC: Final[tuple[Rule, ...]] = (
    Plain(),
    HeavyBall(),
    Nag(),
    MultiMomentum(),
    DanaZero(),
    DanaSlim(),
    DelayCompensated("dana-dc", DanaZero(), adaptive=False),
    DelayCompensated("dc-asgd", HeavyBall(), adaptive=True),
    GapAware("gap-aware", Nag(), momentum="momentum_buffer"),
    GapAware("gap-aware-dana", DanaZero(), momentum="v"),
    LrOverLag(),
    AsyncAdam(),
    Ftrl(),
    OuterNesterov(),
    DelayedNesterov(),
)
RULES: Final[dict[str, Rule]] = {rule.name: rule for rule in (*_OPTIMIZERS, *_ASYNC)}


def named(name: str) -> Rule:
    """The rule of that name. Raises ValueError, naming those that exist."""
    try:
        return RULES[name]
    except KeyError:
        raise ValueError(f"there is no rule {name!r}; the rules are {', '.join(RULES)}") from None
