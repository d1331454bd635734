"""Lightning's own callbacks and logs in a job: what one process gives that has all workers' batches."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.frameworks.runs import HERE, Run, alone, resumed

pytestmark = [pytest.mark.timeout(600), pytest.mark.rotating]
SCRIPT = "tuned.py"


def told(output: str) -> list[dict[str, Any]]:
    return [json.loads(found) for found in re.findall(r"told (\{.*\})", output)]


def test_a_backbone_that_is_unfrozen_trains_and_logs_are_those_of_all_workers(tmp_path: Path) -> None:
    """`trainer.test(ckpt_path="best")` too: the file is rank 0's."""
    run = Run(tmp_path / "job", [SCRIPT])
    assert run.code == 0, run.output[-4000:]
    found = [one for text in run.workers() for one in told(text)]
    (wanted,) = told(alone(tmp_path / "alone", str(HERE / SCRIPT), "strategy=auto", "size=4"))
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
    (wanted,) = told(alone(tmp_path / "alone", str(HERE / "fabricated.py"), "size=4"))
    for rank, text in enumerate(run.workers()):
        (found,) = told(text)
        assert found["sums"] == pytest.approx(wanted["sums"], abs=2e-5)
        assert [pytest.approx(row, abs=2e-5) for row in wanted["means"]] == found["means"]
        assert f"first {rank == 0} {rank}" in text, "rank 0 saves"


@pytest.mark.parametrize(
    ("script", "number", "fault"),
    [
        (SCRIPT, "groups", "kill:worker-1@step=27"),
        (SCRIPT, "groups", "kill:shard-0@step=15"),
        ("fabricated.py", "sums", "kill:worker-1@step=9"),
        ("fabricated.py", "sums", "kill:shard-0@step=15"),
    ],
)
def test_an_unfrozen_backbone_and_fabric_go_on_after_a_kill(tmp_path: Path, script: str, number: str, fault: str) -> None:
    whole, killed = resumed(tmp_path, [script], fault)
    assert told(killed.output)[-1][number] == told(whole.output)[-1][number]


def test_the_mean_of_kept_epochs_is_that_of_one_process(tmp_path: Path) -> None:
    """What the refusal of StochasticWeightAveraging names."""
    run = Run(tmp_path / "job", ["kept_epochs.py"])
    assert run.code == 0, run.output[-4000:]
    alone(tmp_path / "alone", str(HERE / "kept_epochs.py"), "strategy=auto", "size=4")
    found, wanted = (mean_of_the_last(folder) for folder in (run.folder, tmp_path / "alone"))
    assert all(torch.allclose(found[name], wanted[name], atol=2e-5) for name in wanted)


def mean_of_the_last(folder: Path) -> dict[str, torch.Tensor]:
    """Of two of four epochs."""
    files = sorted(folder.rglob("kept/*.ckpt"))
    assert [path.name for path in files] == [f"epoch={epoch}.ckpt" for epoch in range(4)]
    held = [torch.load(path, weights_only=True)["state_dict"] for path in files[-2:]]
    return {name: (held[0][name] + held[1][name]) / 2 for name in held[0]}
