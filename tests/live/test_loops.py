"""Training loops of all kinds under psjob come to the numbers of plain torch, or are refused in a sentence; kills included.

A loop is drawn at random, written as a script and run twice: by plain torch, and as the worker of a job with a real shard. What it prints
(weights, rates, evaluations) is compared bit for bit. A loop with clipping by norm is compared within 1e-4. The soak's parts are 2,000
loops, half of them with kills of the worker, of its shard, or of both.

- Loops drawn at random, and the simplest one that still fails.
- What a generated loop comes to under psjob, by what plain torch prints: equal, refused in a sentence, or wrong.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from psjob import contract
from tests.live.loop_runs import STRUCK, Fault, Job, Ran, begun, under_psjob
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
    script,
    without,
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
            zero=seldom(ZERO, 0.6) or "first", to_none=random.choice((None, None, True, False)),
            backward=seldom((*BACKWARD, "closure"), 0.6) or "once", clip=seldom(CLIPS), every=random.choice((1, 1, 1, 2, 3)),
            left=random.choice(("", "step", "length")), alternates=rarely(0.5), leaves_out=rarely(0.1),
        )  # fmt: skip

    def a_pass() -> Pass:
        return Pass(
            head=seldom(HEADS, 0.8) or "for", around=random.choice(AROUND), training=training(), function=rarely(), skips=rarely(0.2),
            leaves=random.choice((0, 0, 0, 4, 5)), raised=seldom(RAISED, 0.2), looks=seldom(LOOKS), evaluates=seldom(EVALUATIONS, 0.5),
            evaluates_within=rarely(), anew=rarely(0.15), seeds=rarely(0.15), otherwise=rarely(0.15), stops=rarely(0.15),
            freezes=rarely(0.2), idle=seldom(("step", "backward"), 0.15),
        )  # fmt: skip

    setting = Setting(
        model=random.choice((*MODELS, TWO, PARTS)), optimizer=random.choice(OPTIMIZERS), scheduler=seldom(SCHEDULERS, 0.6),
        scheduled=random.choice(("step", "epoch")), handed=rarely(0.7), double=rarely(), autocast=rarely(0.15), averaged=rarely(0.15),
        hook=seldom(HOOKS, 0.25),
    )  # fmt: skip
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


CLOSE = 1e-4
"""Of numbers that follow from a norm, which is summed in another order than torch's."""
FRAME = "/psjob/"


@dataclass(frozen=True)
class Outcome:
    """`kind` is `equal`, `refused`, NO_LOOP, or one of WRONG; `words` the sentence, or what is wrong."""

    kind: str
    words: str = ""


WRONG = ("differs", "crashed", "hung")
NO_LOOP = "no loop"
"""Plain torch does not run it."""


def outcome(folder: Path, case: Case) -> Outcome:
    """Run a case in `folder`, which is empty afterwards."""
    source = script(case.loop)
    try:
        expected = begun(folder / "plain", without(source))
        try:
            ran = under_psjob(folder / "psjob", source, case.job)
        finally:
            wanted = expected()
        return Outcome(NO_LOOP, wanted.err[-600:]) if wanted.code else _judged(case, ran, wanted)
    except AssertionError as hung:
        return Outcome("hung", str(hung))
    finally:
        for name in ("plain", "psjob"):
            shutil.rmtree(folder / name, ignore_errors=True)


def _judged(case: Case, ran: Ran, expected: Ran) -> Outcome:
    told = [line for line in ran.err.splitlines() if line.startswith("psjob: ")]
    if ran.code == contract.EXIT_REFUSED and told and not _shows_frames(ran.err):
        return Outcome("refused", told[-1].removeprefix("psjob: "))
    if ran.code:
        return Outcome("crashed", f"exit code {ran.code}: {ran.err[-1500:]}")
    # A script that continues from a record runs lines between passes again, and prints there what is so by then.
    found, wanted = (ran.lines, expected.lines) if ran.starts == 1 else (ran.lines[-1:], expected.lines[-1:])
    same = _same if case.loop.exact else _close
    for number, (one, other) in enumerate(zip(found, wanted, strict=False)):
        if not same(one, other):
            return Outcome("differs", f"line {number} is {one[:200]} in place of {other[:200]}")
    if len(found) != len(wanted):
        return Outcome("differs", f"{len(found)} lines in place of {len(wanted)}")
    return Outcome("equal")


def _shows_frames(told: str) -> bool:
    return any(line.lstrip().startswith('File "') and FRAME in line and ".venv" not in line for line in told.splitlines())


def _same(one: str, other: str) -> bool:
    return one == other


def _close(one: str, other: str) -> bool:
    (word, _, numbers), (other_word, _, others) = one.partition(" "), other.partition(" ")
    if word != other_word or word != "end":
        return word == other_word
    pairs = [pair for each in zip(json.loads(numbers), json.loads(others), strict=True) for pair in zip(*each, strict=True)]
    return all(math.isclose(a, b, rel_tol=CLOSE, abs_tol=CLOSE) for a, b in pairs)


SHRINKS = 60
"""Runs at most of simpler cases than one that failed."""
SOAKS, EACH = 10, 100
"""Of the soak, without kills and with, and loops of a part."""
EQUAL, NO_LOOPS = 0.8, 0.03
"""Share of the loops that must be equal, and of those at most that plain torch does not run."""
SOAK = (pytest.mark.soak, pytest.mark.timeout(1800))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("cases", "faults"),
    [
        pytest.param(12, False, id="usual"),
        pytest.param(100, False, id="hundred", marks=pytest.mark.rotating),
        pytest.param(40, True, id="kills", marks=pytest.mark.rotating),
        *(pytest.param(EACH, False, id=f"soak {part}", marks=SOAK) for part in range(SOAKS)),
        *(pytest.param(EACH, True, id=f"soak kills {part}", marks=SOAK) for part in range(SOAKS)),
    ],
)
def test_a_loop_is_equal_to_plain_torch_or_refused(request: pytest.FixtureRequest, tmp_path: Path, cases: int, faults: bool) -> None:
    kinds, sentences = Counter[str](), Counter[str]()

    @settings(
        max_examples=cases, database=None, deadline=None, suppress_health_check=list(HealthCheck), phases=(Phase.generate,),
        derandomize=request.node.get_closest_marker("soak") is None,
    )  # fmt: skip
    @given(st.integers(0, 1 << 64))
    def run(seed: int) -> None:
        case = drawn(Random(seed), faults)
        came = outcome(tmp_path, case)
        assert came.kind not in WRONG, told(tmp_path, case, came)
        kinds[came.kind] += 1
        if came.kind == "refused":
            sentences[came.words.rpartition(" (train.py:")[0]] += 1

    run()
    summary = f"of {kinds.total()} loops {kinds['equal']} are equal, {kinds['refused']} refused"
    print(summary, *(f"{count} x {sentence}" for sentence, count in sentences.most_common()), sep="\n")
    assert kinds["equal"] >= EQUAL * kinds.total() and kinds[NO_LOOP] <= max(1, NO_LOOPS * kinds.total()), summary


def told(folder: Path, case: Case, came: Outcome) -> str:
    """A failing case, and the simplest like it."""
    left = [SHRINKS]

    def fails(other: Case) -> bool:
        left[0] -= 1
        return left[0] >= 0 and outcome(folder, other).kind == came.kind

    simple = simplest(case, fails)
    return f"{came.kind}: {came.words}\n{simple}\n{script(simple.loop)}"
