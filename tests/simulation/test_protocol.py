"""The protocol by seed: every promise holds in every mode, a seed is one history, and a failing one becomes short."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.simulation.protocol.cli import Total, main, outcomes
from tests.simulation.protocol.faults import Fault
from tests.simulation.protocol.mutants import ISSUED, OWN, found_at
from tests.simulation.protocol.plan import MODES, draw
from tests.simulation.protocol.run import run
from tests.simulation.protocol.shrink import shrink

FULL = Fault("disk-full", 0.0, 1e9, ("shard", 0), ("shard", 1), 0.0)
EACH = 25
"""Seeds a mode in one turn."""
MOST_SEEDS = 2_000
"""So many seeds find every mutant."""


@pytest.mark.parametrize("mode", MODES)
def test_promises_hold_in_every_mode(mode: str) -> None:
    broken = {o.plan.seed: f"{o.broken}: {o.detail[:500]}" for o in outcomes(range(EACH), mode, jobs=1) if o.broken}
    assert not broken, f"replay with: python -m tests.simulation --mode {mode} --replay SEED"


def trace(seed: int, hashes: str) -> str:
    """Digest of a run's trace, in a process with this seed of hashes."""
    code = f"from tests.simulation.protocol import plan, run; print('\\n'.join(run.run(plan.draw({seed}), traced=True).trace))"
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONHASHSEED": hashes, "PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), root])}
    made = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True, timeout=120)
    assert made.stdout.count(b"\n") > 50
    return hashlib.sha256(made.stdout).hexdigest()


def test_a_seed_is_one_history() -> None:
    assert trace(7, "0") == trace(7, "1")


def test_a_broken_promise_is_made_short() -> None:
    """A plan that can never end: its first values do not fit on the volume."""
    plan = draw(3)
    hopeless = replace(plan, interval=None, every=None, faults=(FULL, *plan.faults[:2]), shard_bytes=1_000_000)
    made = run(hopeless)
    assert made.broken == "the job hangs"
    short = shrink(made)
    assert short.broken == made.broken and short.plan.workers == 2 and short.plan.shards == 2
    assert len(short.plan.faults) == 1 and any("disk-full" in line for line in short.trace)


def test_the_last_line_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "3", "--jobs", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("3 seeds in ")


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_thousand_seeds() -> None:
    began, total = time.perf_counter(), Total()
    for outcome in outcomes(range(10_000), None, jobs=min(2, os.cpu_count() or 1)):
        total.add(outcome)
        assert outcome.broken is None, f"seed {outcome.plan.seed}: {outcome.broken}: {outcome.detail[:2000]}"
    seconds = time.perf_counter() - began
    print(total.words(seconds))
    assert seconds <= 600.0
    assert len(total.pairs) >= 150


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [*ISSUED, *OWN])
def test_a_mutant_is_found(name: str) -> None:
    found = found_at(name, range(MOST_SEEDS))
    print(f"{name}: {found}")
    assert found is not None, f"no seed below {MOST_SEEDS} finds it"
