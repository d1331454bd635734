"""A stage that waits says for whom, and each stage what it holds, on the status port of real shards."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from psjob.modes.stages import Stages
from psjob.shard.status_server import status
from tests.live.live_shards import SECONDS, eventually, serving
from tests.live.stage_oracle import compare
from tests.live.stage_workers import Cluster, StageWorker


def test_who_waits_for_a_stage_that_stands_still_says_so_until_it_goes_on(tmp_path: Path) -> None:
    go, stands = threading.Event(), threading.Event()

    def before(worker: StageWorker, what: str, step: int, micro: int) -> None:
        if (worker.rank, what, step, micro) == (0, "give ACTIVATION", 2, 1):
            stands.set()
            assert go.wait(SECONDS)
        if (worker.rank, what, step) == (2, "push", 4) and go.is_set():
            assert eventually(lambda: told()["waiting"] is None)

    with serving(tmp_path, workers=3, shards=2, stages=Stages((1, 1, 1))) as shards:

        def told() -> dict[str, Any]:
            found = status(shards.servers[0])["coordinator"]
            assert isinstance(found, dict)
            return found

        cluster = Cluster(shards, 4, before)
        training = threading.Thread(target=cluster.run)
        training.start()
        try:
            assert stands.wait(SECONDS)
            assert eventually(lambda: all(stage["waiting"] and (stage["idle"] or 0) > 0.5 for stage in told()["stages"][1:]))
            found = told()
            wanted = "worker 1 (stage 1) waits for activations of micro-batch 1 of step 2 from worker 0 (stage 0), for "
            assert found["waiting"].startswith(wanted), found["waiting"]
            first, second, third = found["stages"]
            assert first["waiting"] is None, "its script stands still, it does not wait"
            assert second["waiting"].startswith("activations of micro-batch 1 of step 2 from worker 0 (stage 0), for ")
            assert third["waiting"].startswith("activations of micro-batch 1 of step 2 from worker 1 (stage 1), for ")
            assert 0.5 < second["idle"] <= 1 and 0.5 < third["idle"] <= 1
            for stage in found["stages"]:
                assert (stage["desired"], stage["ready"], stage["delay"]) == (1, 1, 0.0)
            assert second["peakBytes"] >= 0.9 * second["rssBytes"] > 0
        finally:
            go.set()
            training.join(SECONDS)
        assert not cluster.problems
        assert told()["waiting"] is None and [stage["waiting"] for stage in told()["stages"]] == [None] * 3
        assert [stage["step"] for stage in told()["stages"]] == [5, 5, 5] and [stage["ready"] for stage in told()["stages"]] == [1, 1, 1]
        compare(cluster, 4)
