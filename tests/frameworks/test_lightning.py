"""Lightning's own callbacks and logs in a job: what one process gives that has all workers' batches."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.frameworks import IMPORTS, OFFLINE
from tests.frameworks.runs import HERE, SECONDS, Run
from tests.support import warm

pytestmark = [pytest.mark.timeout(600), pytest.mark.rotating]
SCRIPT = "tuned.py"


def told(output: str) -> list[dict[str, Any]]:
    return [json.loads(found) for found in re.findall(r"told (\{.*\})", output)]


def test_a_backbone_that_is_unfrozen_trains_and_logs_are_those_of_all_workers(tmp_path: Path) -> None:
    """`trainer.test(ckpt_path="best")` too: the file is rank 0's."""
    run = Run(tmp_path / "job", [SCRIPT])
    assert run.code == 0, run.output[-4000:]
    workers = [path.read_text() for path in sorted((tmp_path / "job").glob(".psjob/*/logs/*worker*"))]
    found = [one for text in workers for one in told(text)]
    alone = tmp_path / "alone"
    alone.mkdir()
    words = [str(HERE / SCRIPT), "strategy=auto", "size=4"]
    code, output = warm.call(alone, "tests.frameworks.alone", words, OFFLINE, SECONDS, IMPORTS)
    assert code == 0, output[-4000:]
    (wanted,) = told(output)
    assert len(wanted["groups"]) == 2 and len(found) == 2
    for each in found:
        assert each.keys() >= wanted.keys() >= {"train_loss_step", "train_loss_epoch", "val_loss", "tested"}
        for name, value in wanted.items():
            assert each[name] == pytest.approx(value, abs=2e-5), name
    for one in ("train_loss_epoch", "val_loss"):
        assert run.summary["metrics"][one] == pytest.approx(wanted[one], abs=2e-5)


def test_fabric_trains_as_one_process_with_all_workers_batches(tmp_path: Path) -> None:
    run = Run(tmp_path / "job", ["fabricated.py"])
    assert run.code == 0, run.output[-4000:]
    workers = [path.read_text() for path in sorted((tmp_path / "job").glob(".psjob/*/logs/*worker*"))]
    alone = tmp_path / "alone"
    alone.mkdir()
    code, output = warm.call(alone, "tests.frameworks.alone", [str(HERE / "fabricated.py"), "size=4"], OFFLINE, SECONDS, IMPORTS)
    assert code == 0, output[-4000:]
    (wanted,) = told(output)
    for rank, text in enumerate(workers):
        (found,) = told(text)
        assert found["sums"] == pytest.approx(wanted["sums"], abs=2e-5)
        assert [pytest.approx(row, abs=2e-5) for row in wanted["means"]] == found["means"]
        assert f"first {rank == 0} {rank}" in text, "rank 0 saves"


@pytest.mark.parametrize("fault", ["kill:worker-1@step=27", "kill:shard-0@step=15"])
def test_an_unfrozen_backbone_goes_on_after_a_kill(tmp_path: Path, fault: str) -> None:
    whole = Run(tmp_path / "whole", [SCRIPT])
    killed = Run(tmp_path / "killed", [SCRIPT], [fault], {"checkpoint": {"periodSeconds": 3600, "everySteps": 4}})
    assert whole.code == 0 and killed.code == 0, killed.output[-4000:]
    assert killed.summary["restarts"], killed.output[-4000:]
    assert killed.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert told(killed.output)[-1]["groups"] == told(whole.output)[-1]["groups"]


@pytest.mark.parametrize("fault", ["kill:worker-1@step=9", "kill:shard-0@step=15"])
def test_fabric_goes_on_after_a_kill(tmp_path: Path, fault: str) -> None:
    whole = Run(tmp_path / "whole", ["fabricated.py"])
    killed = Run(tmp_path / "killed", ["fabricated.py"], [fault], {"checkpoint": {"periodSeconds": 3600, "everySteps": 4}})
    assert whole.code == 0 and killed.code == 0, killed.output[-4000:]
    assert killed.summary["restarts"], killed.output[-4000:]
    assert killed.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert told(killed.output)[-1]["sums"] == told(whole.output)[-1]["sums"]


def test_the_mean_of_kept_epochs_is_that_of_one_process(tmp_path: Path) -> None:
    """What the refusal of StochasticWeightAveraging names."""
    run = Run(tmp_path / "job", ["kept_epochs.py"])
    assert run.code == 0, run.output[-4000:]
    alone = tmp_path / "alone"
    alone.mkdir()
    words = [str(HERE / "kept_epochs.py"), "strategy=auto", "size=4"]
    code, output = warm.call(alone, "tests.frameworks.alone", words, OFFLINE, SECONDS, IMPORTS)
    assert code == 0, output[-4000:]
    found, wanted = (mean_of_the_last(folder) for folder in (run.folder, alone))
    assert all(torch.allclose(found[name], wanted[name], atol=2e-5) for name in wanted)


def mean_of_the_last(folder: Path) -> dict[str, torch.Tensor]:
    """Of two of four epochs."""
    files = sorted(folder.rglob("kept/*.ckpt"))
    assert [path.name for path in files] == [f"epoch={epoch}.ckpt" for epoch in range(4)]
    held = [torch.load(path, weights_only=True)["state_dict"] for path in files[-2:]]
    return {name: (held[0][name] + held[1][name]) / 2 for name in held[0]}
