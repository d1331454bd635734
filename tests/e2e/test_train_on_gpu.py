"""Scripts as GPU users write them, each with two kills: the weights are the bits of the undisturbed run.

On the CPU the same script is run with blocks that are staged and lent as those of a GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.workloads.gpu_cases import CASES, WORKER
from tests.e2e.workloads.running import Ran, faults, manifest, train
from tests.support.hardware import gpu, gpus
from tests.support.soaking import rotating, soak

CHECKPOINTS = {"everySteps": 10, "periodSeconds": 3600, "keep": 100}
QUICK = ("scaled",)
"""On the CPU in `make test`; the others rotate, but for those whose kernels take a minute to compile there."""


def on_the_cpu(name: str) -> object:
    """The case as the CPU's tiers take it."""
    if name in QUICK:
        return "cpu", name
    return (soak if "compile" in name or "overhead" in name else rotating)("cpu", name)


FIRST, SECOND, LEAST = 18, 40, 58
"""Steps (in mode local: rounds) of the kills, and of a whole run at least."""


def run(folder: Path, name: str, device: str, *what: str) -> Ran:
    case = CASES[name]
    epochs = 3 if case.training["mode"] == "local" else 1
    words = ["gpu_cases.py", name, device, str(epochs), "13:10,33:30" if what else ""]
    spec = {"workers": case.workers, "shards": 2, "checkpoint": CHECKPOINTS, "training": {**case.training, "seed": 3}}
    return train(folder, manifest(folder, words, **spec), *faults(*what))


@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    ("device", "name"),
    [*map(on_the_cpu, CASES), *(gpu("cuda", name) for name in CASES)],
)
def test_two_kills_change_no_bit(tmp_path: Path, device: str, name: str) -> None:
    case = CASES[name]
    if device == "cuda" and gpus() < case.devices:
        pytest.skip(f"needs {case.devices} NVIDIA GPUs, and this machine has {gpus()}")
    what = [f"{fault}@step={step}" for fault, step in zip(case.faults, (FIRST, SECOND), strict=True)]
    undisturbed = run(tmp_path / "undisturbed", name, device)
    hit = run(tmp_path / "hit", name, device, *what)
    assert undisturbed.summary["restarts"] == {} and undisturbed.summary["steps"] >= LEAST
    assert [recovery["fault"] for recovery in hit.summary["recoveries"]] == what
    assert sum(hit.summary["restarts"].values()) == 2 and hit.summary["updates_lost"] == 0
    assert hit.summary["attempts"] == ([1, 1] if case.faults == (WORKER, WORKER) else [1, 2])
    assert hit.summary["steps"] == undisturbed.summary["steps"] and hit.sha == undisturbed.sha
    if case.workers == 1:
        return
    mine, theirs = hit.weights(), undisturbed.weights()
    assert mine.keys() == theirs.keys() and all(tensor.equal(theirs[part]) for part, tensor in mine.items())
