"""Scripts as people have them go on after a restart: rank 0 prints the lines of the undisturbed run, and weights and buffers are its bits.

Each script of `scripts/` loops over `ps.epochs` and keeps in `ps.state` what it carries. The same script with plain loops and variables is
equal too, or it is not Complete and says why.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import warm
from tests.quick import rest_rotates

pytestmark = pytest.mark.timeout(900)
HERE = Path(__file__).parent / "scripts"
SCRIPTS = sorted(path.stem for path in HERE.glob("*.py"))
SECONDS = 280.0
STEPS = 4
"""Of a pass of one of two workers."""
FAULTS = {
    "shard 0 in a pass": ("kill:ps-0@step=14",),
    "shard 1 at the end of a pass": ("kill:ps-1@step=16",),
    "a worker in a pass": ("kill:worker-0@step=14",),
    "a worker at the end of a pass": ("kill:worker-1@step=12",),
    "before the first checkpoint": ("kill:ps-0@step=3",),
    "twice": ("kill:ps-1@step=10", "kill:ps-0@step=18"),
}
QUICK = ["early_stopping: shard 0 in a pass", "phases: a worker in a pass"]
SENTENCE = "the script ended before it stood where it was"
UNKEPT = "nobody keeps it"


@dataclass(frozen=True)
class Ran:
    """A job that has ended."""

    code: int
    output: str
    weights: dict[str, torch.Tensor]

    @property
    def lines(self) -> list[str]:
        """What rank 0 printed, without what came again."""
        return list(dict.fromkeys(line for line in self.output.splitlines() if line.startswith("line ")))


def plain(source: str) -> str:
    """A script without `ps.epochs` and `ps.state`."""
    source = source.replace("ps.epochs()", "itertools.count()").replace("ps.epochs(", "range(").replace("ps.state(", "SimpleNamespace(")
    return source.replace("import torch\n", "import itertools\nfrom types import SimpleNamespace\n\nimport torch\n", 1)


def run(folder: Path, source: str, *faults: str, mode: str = "sync") -> Ran:
    folder.mkdir()
    (folder / "train.py").write_text(source)
    container = {"name": "worker", "image": "none", "command": ["python", "train.py"]}
    spec = {
        "training": {"mode": mode, "seed": 0},
        "ps": {"shards": 2},
        "workers": {"replicas": 2, "template": {"spec": {"containers": [container]}}},
        "checkpoint": {"everySteps": 3, "interval": "1h"},
    }
    job = {"apiVersion": "psjob.dev/v1alpha1", "kind": "PSTrainingJob", "metadata": {"name": "job"}, "spec": spec}
    (folder / "job.yaml").write_text(json.dumps(job))
    words = ["run", "job.yaml", "--no-progress", *(word for fault in faults for word in ("--fault", fault))]
    code, output = warm.run(folder, words, seconds=SECONDS, preloaded=warm.COMPILING)
    finals = list(folder.glob(".psjob/*/final.safetensors"))
    return Ran(code, output, load_file(finals[0]) if finals else {})


@cache
def undisturbed(name: str, folder: Path) -> Ran:
    ran = run(folder / name, (HERE / f"{name}.py").read_text())
    assert ran.code == 0, ran.output[-3000:]
    assert len(ran.lines) > STEPS
    return ran


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the undisturbed runs."""
    return tmp_path_factory.mktemp(f"undisturbed{os.getpid()}")


def equal(ran: Ran, wanted: Ran) -> None:
    assert ran.code == 0, ran.output[-4000:]
    assert ran.weights.keys() == wanted.weights.keys()
    for name, tensor in wanted.weights.items():
        assert ran.weights[name].equal(tensor), f"{name}: {ran.output[-3000:]}"


CASES = [f"{name}: {fault}" for name in SCRIPTS for fault in FAULTS]


@pytest.mark.parametrize("case", rest_rotates(CASES, QUICK))
def test_a_restart_changes_no_line_and_no_bit(tmp_path: Path, once: Path, case: str) -> None:
    name, fault = case.split(": ")
    wanted = undisturbed(name, once)
    ran = run(tmp_path / "hit", (HERE / f"{name}.py").read_text(), *FAULTS[fault])
    equal(ran, wanted)
    assert ran.lines == wanted.lines, ran.output[-4000:]


@pytest.mark.parametrize("case", rest_rotates(CASES, ["early_stopping: shard 1 at the end of a pass"]))
def test_a_plain_loop_is_equal_or_says_why_it_is_not(tmp_path: Path, once: Path, case: str) -> None:
    name, fault = case.split(": ")
    wanted = undisturbed(name, once)
    ran = run(tmp_path / "hit", plain((HERE / f"{name}.py").read_text()), *FAULTS[fault])
    if ran.code == 0:
        equal(ran, wanted)
    else:
        assert SENTENCE in ran.output or UNKEPT in ran.output, ran.output[-4000:]
