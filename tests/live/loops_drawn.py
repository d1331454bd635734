"""Loops drawn at random, and the simplest one that still fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.live.loop_runs import Fault
from tests.live.loops import BACKWARD, CLIPS, EVALUATIONS, HEADS, HOOKS, LOOKS, MODELS, RAISED, TWO, ZERO, Loop, Pass, Setting, Training

OPTIMIZERS = (
    "SGD(lr=0.05)", "SGD(lr=0.05, momentum=0.9, fused=True)", "SGD(lr=0.05, momentum=0.9, nesterov=True, fused=True)",
    "SGD(lr=0.05, momentum=0.9, dampening=0.5, weight_decay=0.01, fused=True)", "Adam(lr=0.01, fused=True)",
    "Adam(lr=0.01, amsgrad=True, fused=True)", "AdamW(lr=0.01, fused=True)", "Adagrad(lr=0.05, fused=True)", "RMSprop(lr=0.01)",
    "Adamax(lr=0.01)", "Rprop(lr=0.01)",
)  # fmt: skip
SCHEDULERS = (
    "", "by hand", "StepLR(2, 0.5)", "ExponentialLR(0.9)", "CosineAnnealingLR(T_max=6)", "OneCycleLR(max_lr=0.1, total_steps=400)",
    "LambdaLR(lambda at: 1 / (1 + at))", "ReduceLROnPlateau(patience=0)", "CosineAnnealingWarmRestarts(3)", "LinearLR(0.1, 1.0, 4)",
    "MultiStepLR([2, 5], 0.5)",
)  # fmt: skip
AROUND = (
    "", "for epoch in range(2):", "for epoch in ps.epochs(2):", "for epoch in range(3):", "while n < 11:", "for epoch in ps.epochs(3):",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A loop, and how its job runs."""

    loop: Loop
    faults: tuple[Fault, ...] = ()
    update_at: str | None = None
    every: int = 2
    """Steps from one checkpoint to the next."""


def drawn(random: Random, faults: bool) -> Case:
    """Any case. `faults`: some have them."""

    def seldom(values: Iterable[str], share: float = 0.3) -> str:
        return random.choice(list(values)) if random.random() < share else ""

    def rarely(share: float = 0.3) -> bool:
        return random.random() < share

    def training() -> Training:
        return Training(
            zero=seldom(ZERO, 0.6) or "first",
            to_none=random.choice((None, None, True, False)),
            backward=seldom((*BACKWARD, "closure"), 0.6) or "once",
            clip=seldom(CLIPS),
            every=random.choice((1, 1, 1, 2, 3)),
            left=random.choice(("", "step", "length")),
            alternates=rarely(0.5),
        )

    def a_pass() -> Pass:
        return Pass(
            head=seldom(HEADS, 0.8) or "for",
            around=random.choice(AROUND),
            training=training(),
            function=rarely(),
            skips=rarely(0.2),
            leaves=random.choice((0, 0, 0, 4, 5)),
            raised=seldom(RAISED, 0.2),
            looks=seldom(LOOKS),
            evaluates=seldom(EVALUATIONS, 0.5),
            evaluates_within=rarely(),
            freezes=rarely(0.2),
            idle=seldom(("step", "backward"), 0.15),
        )

    setting = Setting(
        model=random.choice((*MODELS, TWO)),
        optimizer=random.choice(OPTIMIZERS),
        scheduler=seldom(SCHEDULERS, 0.6),
        scheduled=random.choice(("step", "epoch")),
        handed=rarely(0.7),
        double=rarely(),
        hook=seldom(HOOKS, 0.25),
    )
    passes = tuple(a_pass() for _ in range(random.choice((1, 1, 1, 2))))
    loop = Loop(setting, passes, random.choice((24, 26)), seldom(("backward", "step"), 0.15))
    struck = [Fault(random.randrange(10), rarely(0.5), rarely(0.4)) for _ in range(random.choice((0, 1, 1, 2)))] if faults else []
    return Case(loop, tuple(sorted(struck, key=lambda fault: fault.step)), random.choice((None, None, "worker")), random.choice((1, 2, 3)))


def simplest(case: Case, fails: Callable[[Case], bool]) -> Case:
    """With as many fields as can be as they are in the simplest case, where it still fails."""
    changed = True
    while changed:
        changed = False
        for simpler in _simpler(case):
            if fails(simpler):
                case, changed = simpler, True
                break
    return case


def _simpler(thing: Any) -> Iterator[Any]:
    """The same with one field as it is by default, or with one thing less in a tuple; within too."""
    for field in dataclasses.fields(thing):
        value = getattr(thing, field.name)
        if dataclasses.is_dataclass(value):
            yield from (dataclasses.replace(thing, **{field.name: each}) for each in _simpler(value))
        elif isinstance(value, tuple):
            fewest = 1 if field.name == "passes" else 0
            for at in range(len(value)) if len(value) > fewest else ():
                yield dataclasses.replace(thing, **{field.name: (*value[:at], *value[at + 1 :])})
            for at, one in enumerate(value):
                yield from (dataclasses.replace(thing, **{field.name: (*value[:at], each, *value[at + 1 :])}) for each in _simpler(one))
        elif field.default is not dataclasses.MISSING and value != field.default:
            yield dataclasses.replace(thing, **{field.name: field.default})
