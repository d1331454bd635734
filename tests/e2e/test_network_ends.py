"""Processes that end while their connections are lost unheard: the job ends all the same."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest

from tests.e2e import network_faults as faults
from tests.e2e.workloads import ledger
from tests.support.netjob import members
from tests.support.netns import Network, require
from tests.support.soaking import soak

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(600)]
REST = 2.0
"""Seconds between a worker's last step and its end."""


@pytest.mark.parametrize("mode", ["sync", soak("async")])
@pytest.mark.parametrize("parted", [0.0, soak(27.0)])
def test_a_worker_that_leaves_on_a_lost_connection_is_heard(tmp_path: Path, mode: str, parted: float) -> None:
    """Its connection is half-open, or for `parted` seconds nothing passes."""
    require()
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Network(members(faults.SHARDS, faults.WORKERS)))
        going = stack.enter_context(faults.job(network, tmp_path, mode, "--rest", str(REST)))
        going.wait_for("training", lambda: going.least() > 0)
        last = going.end_soon()
        going.wait_for("the last step", lambda: going.least() >= last, every=0.02)
        left = max(at for step, at in going.steps(0) if step == last) + REST
        fault = network.partition("worker-0", "shard-0") if parted else network.no_ends("shard-0")
        with contextlib.ExitStack() as holding:
            holding.enter_context(fault)
            assert parted or network.abort("shard-0", "worker-0") > 0
            assert time.time() < left, "the worker was faster than the fault"
            going.wait_for("the fault's end", lambda: time.time() > left + parted)
            if parted:
                holding.close()
            began = time.time()
            going.wait_for("the final weights", (going.run_folder / "final.safetensors").exists, faults.GOES_ON * 4)
            took = time.time() - began
            ran = going.finish()
    print(f"{mode}: the final weights came {took:.1f} s after the worker's end, or after healing")
    assert ran.summary["steps"] == last
    assert took <= faults.GOES_ON


@pytest.mark.soak
def test_a_worker_that_holds_its_pushes_on_a_lost_connection_goes_on(tmp_path: Path) -> None:
    require()
    ran = faults.run(tmp_path, "async", [faults.half_open_while_held(0, 1, other=1)])
    assert ran.summary["updates_lost"] == 0


@pytest.mark.soak
def test_what_a_shard_that_was_killed_unheard_lost_is_what_is_missing(tmp_path: Path) -> None:
    require()
    ran = faults.run(tmp_path, "async", [faults.killed(1)])
    table = ledger.counted(ran.weights(), faults.WORKERS, faults.SHARDS)
    steps = ran.summary["steps"]
    assert all(count == steps for block in table[0] for count in block), f"the shard that lived has lost something: {table}"
    assert all(count <= steps for block in table[1] for count in block), f"a push counted twice: {table}"
    assert {sum(steps - count for count in block) for block in table[1]} == {ran.summary["updates_lost"]}, table
