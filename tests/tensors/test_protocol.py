"""The protocol by seed: every promise holds in every mode, a seed is one history, and a failing one becomes short."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.simulation.protocol.cli import Total, main, outcomes
from tests.simulation.protocol.faults import Fault
from tests.simulation.protocol.mutants import FOUND, ISSUED, OWN, found_at, replayed, table, with_mutant
from tests.simulation.protocol.plan import CRASHING, MODES, draw
from tests.simulation.protocol.run import Outcome, run
from tests.simulation.protocol.shrink import shrink

EACH = 8
"""Seeds a mode in one turn."""
MOST_SEEDS = 4_000
"""So many seeds find every mutant."""
DESIGN = Path(__file__).parents[2] / "docs/design/0001-protocol-machine.md"


@pytest.mark.parametrize("mode", [*MODES, CRASHING])
def test_promises_hold_in_every_mode(mode: str) -> None:
    broken = {o.plan.seed: f"{o.broken}: {o.detail[:500]}" for o in outcomes(range(EACH), mode, jobs=1) if o.broken}
    assert not broken, f"replay with: python -m tests.simulation --mode {mode} --replay SEED"


@pytest.mark.parametrize("seed", [22627, 24019, 29242])
def test_promises_hold_where_one_was_broken(seed: int) -> None:
    """A final checkpoint whose writer crashed before it could say so, and fences of a coordinator that was lost before workers heard."""
    made = run(draw(seed, CRASHING))
    assert made.broken is None, made.detail


def test_a_crash_alone_sends_nobody_back() -> None:
    """Of shard 0 and of another, one after the other, once training has begun."""
    for seed in range(6):
        crashes = (crash(0, 0.3), crash(1, 0.8), crash(0, 1.2))
        made = run(replace(draw(seed, CRASHING), steps=(20, 20), workers=2, step_seconds=0.1, faults=crashes))
        assert made.broken is None, f"seed {seed}: {made.detail}"
        assert made.counts["taken up"] == 3 and made.counts["restores"] == 0


@pytest.mark.parametrize("mode", ["sync", "bounded"])
def test_no_request_for_a_checkpoint_is_lost_with_shard_0(mode: str) -> None:
    """It dies, crashes or is drained about when the request is read, cut and committed. Nothing but the request asks for a checkpoint."""
    for seed, kind in enumerate(("kill", "crash", "drain", "power-cut")):
        who, phase = ("shard", 0), "training"
        faults = (Fault("ask", 1.5, 0.0, who, who, 0.0, phase), *(Fault(kind, at, 1.0, who, who, 0.0, phase) for at in (2.0 + seed, 6.0)))
        plan = replace(draw(seed, mode), shards=2, blocks=2, tables=0, workers=2, steps=(30, 30), step_seconds=0.6)
        made = run(replace(plan, every=None, interval=None, policy="AllWorkers", starts=0.2, faults=faults))
        assert made.broken is None, f"seed {seed}: {made.detail}"
        assert made.counts["answered before the end"], f"seed {seed}"


def crash(shard: int, at: float) -> Fault:
    return Fault("crash", at, 1.0, ("shard", shard), ("shard", shard), 0.0, "training")


def test_a_seed_is_one_history() -> None:
    """In this process, and in one with another seed of hashes."""
    code = "from tests.simulation.protocol import plan, run; print('\\n'.join(run.run(plan.draw(7), traced=True).trace))"
    root = str(Path(__file__).parents[2])
    hashes = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    env = {**os.environ, "PYTHONHASHSEED": hashes, "PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), root])}
    other = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True, timeout=120, text=True)
    here = run(draw(7), traced=True).trace
    assert len(here) > 50 and other.stdout.splitlines() == here


def small(seed: int) -> Outcome:
    """A seed that breaks a promise, made short."""
    made = run(draw(seed))
    assert made.broken is not None and (made.plan.workers > 2 or made.plan.shards > 2)
    return shrink(made)


def test_a_broken_promise_is_made_short() -> None:
    short = with_mutant("a commit does not wait for one shard", small, 0)
    assert short.broken == "not one snapshot"
    assert (short.plan.workers, short.plan.shards, short.plan.faults) == (2, 2, ())
    assert any("commits manifest" in line for line in short.trace)


def test_the_last_line_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "3", "--jobs", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("3 seeds in ")


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", [None, CRASHING])
def test_ten_thousand_seeds(mode: str | None) -> None:
    began, total = time.perf_counter(), Total()
    for outcome in outcomes(range(10_000), mode, jobs=min(2, os.cpu_count() or 1)):
        total.add(outcome)
        assert outcome.broken is None, f"seed {outcome.plan.seed}: {outcome.broken}: {outcome.detail[:2000]}"
    seconds = time.perf_counter() - began
    print(total.words(seconds))
    assert seconds <= 600.0
    assert len(total.pairs) >= (150 if mode is None else 100)


def test_every_mutant_has_a_seed_and_its_row_in_the_design() -> None:
    assert list(FOUND) == [*ISSUED, *OWN]
    assert table() in DESIGN.read_text(), "write the table anew with: python -m tests.simulation.protocol.mutants"


@pytest.mark.parametrize("name", FOUND)
def test_a_mutant_breaks_its_promise_at_its_seed(name: str) -> None:
    without = run(FOUND[name].plan)
    assert without.broken is None, f"without the mutant: {without.detail[:500]}"
    assert replayed(name) == FOUND[name].promise


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FOUND)
def test_a_mutant_is_found_by_search(name: str) -> None:
    found = found_at(name, range(MOST_SEEDS), FOUND[name].mode)
    print(f"{name}: {found}")
    assert found is not None, f"no seed below {MOST_SEEDS} finds it"
