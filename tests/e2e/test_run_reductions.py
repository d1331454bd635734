"""`training.sync.reduction` of a job's own, imported by the shards' processes from the manifest's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.local_job import Ended, run

pytestmark = pytest.mark.timeout(600)
TRAIN = """
import torch
import psjob as ps

model = torch.nn.Linear(3, 1, bias=False)
torch.nn.init.zeros_(model.weight)
model, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=1.0))
for step in range(20):
    model.weight.grad = torch.full((1, 3), -1.0 if ps.rank() else -1000.0)
    optimizer.step()
"""
OWN = """
import torch

def highest(pushes):
    return torch.stack(pushes).amax(0)

def breaks(pushes):
    if float(pushes[0][0]) < -900:
        raise RuntimeError("a push of nonsense")
    return pushes[0]
"""


def trained(folder: Path, reduction: str) -> Ended:
    (folder / "train.py").write_text(TRAIN)
    (folder / "own.py").write_text(OWN)
    container = {"name": "worker", "image": "none", "command": ["python", "train.py"]}
    spec = {
        "training": {"sync": {"reduction": reduction}},
        "shards": {"replicas": 1},
        "workers": {"replicas": 2, "template": {"spec": {"containers": [container]}}},
    }
    job = {"apiVersion": "psjob.dev/v1alpha1", "kind": "PSTrainingJob", "metadata": {"name": "own"}, "spec": spec}
    (folder / "job.yaml").write_text(json.dumps(job))
    return run(folder, folder / "job.yaml", timeout=120)


@pytest.mark.rotating
def test_a_module_beside_the_manifest_reduces(tmp_path: Path) -> None:
    ended = trained(tmp_path, "own:highest")
    assert ended.code == 0, ended.told
    assert ended.weights["weight"].tolist() == [[20.0] * 3]


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("reduction", "words"),
    [
        ("nowhere:f", "training.sync.reduction nowhere:f cannot be imported: ModuleNotFoundError"),
        (
            "own:breaks",
            "step 0 of block 0: training.sync.reduction own:breaks failed on 2 pushes of float32 [3]: RuntimeError: a push of nonsense",
        ),
    ],
)
def test_a_function_that_cannot_serve_fails_the_job_with_one_sentence(tmp_path: Path, reduction: str, words: str) -> None:
    ended = trained(tmp_path, reduction)
    assert ended.code != 0 and ended.summary["result"] == "Failed" and ended.summary["restarts"] == {}
    assert words in ended.told and "Traceback" not in ended.told
