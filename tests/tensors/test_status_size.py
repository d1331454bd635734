"""The status of the largest job that a manifest may ask for is read whole, with every name and number at its longest."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import yaml

from psjob.protocol.coordinator.members import State
from psjob.protocol.coordinator.report import MAX_METRICS, JobProgress
from psjob.shard.status_server import status
from psjob_operator.api.load import load_job
from psjob_operator.cluster.observe import parse_status
from psjob_operator.contract import STATUS_BYTES
from tests.tensors.desk import Clerk, Desk
from tests.unit.api_manifest import GOOD

WORKERS = 4000


def accepted(workers: int) -> bool:
    manifest: dict[str, Any] = copy.deepcopy(GOOD)
    manifest["spec"]["workers"]["replicas"] = workers
    return load_job(yaml.safe_dump(manifest))[0] is not None


def test_the_status_of_the_largest_job_is_read_whole(tmp_path: Path) -> None:
    assert accepted(WORKERS) and not accepted(WORKERS + 1)
    desk = Desk(tmp_path, workers=WORKERS, mode="async")
    server, coordinator = desk.servers[0], desk.c
    long = -1.2345678901234567e-300
    for rank, member in coordinator.members.all.items():
        member.clock, member.incarnation, member.state, member.idle = 2**63 - 1, (2**32 - 1, 2**32 - 1), State.JOINED, 0.9999
        server.store.admission.rows[rank].complete = 2**63 - 1
        server.sessions[rank] = Clerk(server, rank, 1, 0, {})
    coordinator.progress.report(0, {"\u6743" * 60 + f"{number:04d}": long for number in range(2 * MAX_METRICS)})
    for step in range(64):
        coordinator.progress.passed(2**63 - step, time.time())
    server.job.waiting_for = f"workers {list(range(WORKERS))} have not pushed step {2**63 - 1} (block 100000), for 100000 s"
    raw = json.dumps(status(server)).encode()
    assert STATUS_BYTES / 2 < len(raw) < STATUS_BYTES
    found = parse_status(raw)
    assert found is not None
    told = found["coordinator"]
    assert [worker["rank"] for worker in told["workers"]] == list(range(WORKERS)) and len(told["metrics"]) == MAX_METRICS
    assert len(found["counters"]["acknowledged"]) == len(found["transports"]) == WORKERS


def test_names_that_are_never_told_again_make_room() -> None:
    progress = JobProgress()
    for step in range(1000):
        progress.report(0, {"loss": 1.0 / (step + 1), f"loss at {step}": float(step)})
    assert len(progress.metrics) == MAX_METRICS
    assert progress.metrics["loss"] == 0.001 and progress.metrics["loss at 999"] == 999.0 and "loss at 0" not in progress.metrics
