"""Loops drawn at random, and the simplest one that still fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.live.loop_runs import STRUCK, Fault, Job
from tests.live.loops import (
    BACKWARD,
    CLIPS,
    EVALUATIONS,
    HEADS,
    HOOKS,
    LOOKS,
    MODELS,
    PARTS,
    RAISED,
    TWO,
    ZERO,
    Loop,
    Pass,
    Setting,
    Training,
)

OPTIMIZERS = (
    "SGD(lr=0.05)", "SGD(lr=0.05, momentum=0.9, fused=True)", "SGD(lr=0.05, momentum=0.9, nesterov=True, fused=True)",
    "SGD(lr=0.05, momentum=0.9, dampening=0.5, weight_decay=0.01, fused=True)", "Adam(lr=0.01, fused=True)",
    "Adam(lr=0.01, amsgrad=True, fused=True)", "AdamW(lr=0.01, fused=True)", "Adagrad(lr=0.05, fused=True)", "RMSprop(lr=0.01)",
    "Adamax(lr=0.01)", "Rprop(lr=0.01)",
)  # fmt: skip
SCHEDULERS = (
    "", "by hand", "StepLR(2, 0.5)", "ExponentialLR(0.9)", "CosineAnnealingLR(T_max=6)",
    "OneCycleLR(max_lr=0.1, total_steps=400, cycle_momentum=False)",
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
    job: Job = field(default_factory=Job)


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
            leaves_out=rarely(0.1),
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
            anew=rarely(0.15),
            seeds=rarely(0.15),
            otherwise=rarely(0.15),
            stops=rarely(0.15),
            freezes=rarely(0.2),
            idle=seldom(("step", "backward"), 0.15),
        )

    setting = Setting(
        model=random.choice((*MODELS, TWO, PARTS)),
        optimizer=random.choice(OPTIMIZERS),
        scheduler=seldom(SCHEDULERS, 0.6),
        scheduled=random.choice(("step", "epoch")),
        handed=rarely(0.7),
        double=rarely(),
        autocast=rarely(0.15),
        averaged=rarely(0.15),
        hook=seldom(HOOKS, 0.25),
    )
    passes = tuple(a_pass() for _ in range(random.choice((1, 1, 1, 2))))
    if setting.model == "dropout" and any(each.head == "beside" for each in passes):
        # Torch's loader draws a seed as an iterator is made, and psjob's as it is asked first: numbers drawn between are others.
        setting = dataclasses.replace(setting, model="two layers")
    loop = Loop(setting, passes, random.choice((24, 26)), seldom(("backward", "step"), 0.15))
    found = [Fault(random.randrange(10), rarely(0.5), random.choice(STRUCK)) for _ in range(random.choice((0, 1, 1, 2)))]
    struck = tuple(sorted(found, key=lambda fault: fault.step)) if faults else ()
    # Where the shards' own rule steps, each push of one worker counts at once in other modes too, until one is lost.
    free = not struck and setting.optimizer.startswith(("SGD", "Adam(", "AdamW", "Adagrad")) and rarely(0.2)
    mode = random.choice(("async", "bounded")) if free else "sync"
    update_at = random.choice((None, None, "worker")) if mode == "sync" else None
    return Case(loop, Job(mode, update_at, random.choice((1, 2, 3)), struck))


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
    for each_field in dataclasses.fields(thing):
        value = getattr(thing, each_field.name)
        if dataclasses.is_dataclass(value):
            yield from (dataclasses.replace(thing, **{each_field.name: each}) for each in _simpler(value))
        elif isinstance(value, tuple):
            fewest = 1 if each_field.name == "passes" else 0
            for at in range(len(value)) if len(value) > fewest else ():
                yield dataclasses.replace(thing, **{each_field.name: (*value[:at], *value[at + 1 :])})
            for at, one in enumerate(value):
                yield from (
                    dataclasses.replace(thing, **{each_field.name: (*value[:at], each, *value[at + 1 :])}) for each in _simpler(one)
                )
        elif each_field.default is not dataclasses.MISSING and value != each_field.default:
            yield dataclasses.replace(thing, **{each_field.name: each_field.default})
