"""Training loops of all kinds under psjob come to the numbers of plain torch, or are refused in a sentence; kills included.

A loop is drawn at random, written as a script and run twice: by plain torch, and as the worker of a job with a real shard. What it prints
(weights, rates, evaluations) is compared bit for bit. A loop with clipping by norm is compared within 1e-4.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.live.loops import script
from tests.live.loops_checked import WRONG, Outcome, outcome
from tests.live.loops_drawn import Case, drawn, simplest

SHRINKS = 60
"""Runs at most of simpler cases than one that failed."""
soak = (pytest.mark.soak, pytest.mark.timeout(7200))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("cases", "faults"),
    [
        pytest.param(12, False, id="usual"),
        pytest.param(100, False, id="hundred", marks=[pytest.mark.rotating, pytest.mark.timeout(600)]),
        pytest.param(40, True, id="kills", marks=soak),
        pytest.param(1000, False, id="soak", marks=soak),
        pytest.param(1000, True, id="soak kills", marks=soak),
    ],
)
def test_a_loop_is_equal_to_plain_torch_or_refused(tmp_path: Path, cases: int, faults: bool) -> None:
    found: dict[str, int] = {}

    @settings(
        max_examples=cases, database=None, deadline=None, suppress_health_check=list(HealthCheck), phases=(Phase.generate,),
        derandomize=cases <= 100,
    )  # fmt: skip
    @given(st.integers(0, 1 << 64))
    def run(seed: int) -> None:
        case = drawn(Random(seed), faults)
        came = outcome(tmp_path, case)
        assert came.kind not in WRONG, told(tmp_path, case, came)
        found[came.kind] = found.get(came.kind, 0) + 1

    run()
    assert found.get("equal", 0) > cases * 0.6, f"most loops are right, and not refused: {found}"


def told(folder: Path, case: Case, came: Outcome) -> str:
    """A failing case, and the simplest like it."""
    left = [SHRINKS]

    def fails(other: Case) -> bool:
        left[0] -= 1
        return left[0] >= 0 and outcome(folder, other).kind == came.kind

    simple = simplest(case, fails)
    return f"{came.kind}: {came.words}\n{simple}\n{script(simple.loop)}"
