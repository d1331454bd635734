"""Training loops of all kinds under psjob come to the numbers of plain torch, or are refused in a sentence; kills included.

A loop is drawn at random, written as a script and run twice: by plain torch, and as the worker of a job with a real shard. What it prints
(weights, rates, evaluations) is compared bit for bit. A loop with clipping by norm is compared within 1e-4. The soak's parts are 2,000
loops, half of them with kills of the worker, of its shard, or of both.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.live.loops import script
from tests.live.loops_checked import NO_LOOP, WRONG, Outcome, outcome
from tests.live.loops_drawn import Case, drawn, simplest

SHRINKS = 60
"""Runs at most of simpler cases than one that failed."""
PARTS, EACH = 10, 100
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
        *(pytest.param(EACH, False, id=f"soak {part}", marks=SOAK) for part in range(PARTS)),
        *(pytest.param(EACH, True, id=f"soak kills {part}", marks=SOAK) for part in range(PARTS)),
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
