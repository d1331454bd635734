"""A large resume record on a slow link: it arrives, and steps continue beside it."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from tests.e2e.workloads.running import manifest
from tests.support.netjob import NetJob, members
from tests.support.netns import Network, require

pytestmark = [pytest.mark.nodes, pytest.mark.soak, pytest.mark.timeout(600)]
MEBIBYTES, BITS = 18, 1_600_000
ALONE = MEBIBYTES * 2**23 / BITS
"""Seconds that the record takes where nothing else is on the link: 94."""
LONGEST_STEP = 5.0
FIRST_CUT = 20


def test_a_large_record_on_a_slow_link_delays_no_step(tmp_path: Path) -> None:
    require()
    job = manifest(
        tmp_path,
        ["linked.py", "0.25", "--ballast", str(MEBIBYTES)],
        workers=1,
        shards=1,
        training={"transport": "tcp"},
        checkpoint={"everySteps": FIRST_CUT, "periodSeconds": 3600},
    )
    with Network(members(1, 1)) as network, NetJob(network, tmp_path, job) as going:
        going.wait_for("the first step", going.least)
        with network.limited("worker-0", BITS):
            assert going.least() < FIRST_CUT, "the record was sent before the link was slow"

            def committed() -> bool:
                longest = longest_step(going)
                assert longest <= LONGEST_STEP, f"no step for {longest:.1f} s\n{going.story()}"
                return going.checkpoint() >= FIRST_CUT

            going.wait_for("the checkpoint that holds the record", committed, 2 * ALONE + 30, every=0.2)
            took = time.time() - next(at for step, at in going.steps(0) if step == FIRST_CUT)
            steps = going.step(0) - FIRST_CUT
        print(f"the record took {took:.1f} s (alone {ALONE:.1f} s), {steps} steps beside it, the longest {longest_step(going):.2f} s")
        last = going.end_soon()
        assert going.finish().summary["steps"] == last
    assert took > 0.9 * ALONE, "the link was faster than it should be"


def longest_step(job: NetJob) -> float:
    """Seconds between two steps at most, the open one counted until now."""
    times = [at for _, at in job.steps(0)] + [time.time()]
    return max(later - earlier for earlier, later in itertools.pairwise(times))
