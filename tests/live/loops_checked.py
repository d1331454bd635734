"""What a generated loop comes to under psjob, by what plain torch prints: equal, refused in a sentence, or wrong."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

from psjob import contract
from tests.live.loop_runs import Ran, begun, under_psjob
from tests.live.loops import script, without
from tests.live.loops_drawn import Case

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
