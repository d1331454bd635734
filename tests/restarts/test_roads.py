"""The roads of a gradient and of a lost shard, followed through the processes of a real job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import roads

pytestmark = pytest.mark.timeout(240)
GRADIENT = "From a gradient to a reply: a push"
LOST = "From a lost shard to the next push"
SCRIPT = """
import time
import torch
import psjob as ps

torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
model, opt = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(4 * 40, 64)), batch_size=4)
for (x,) in ps.shard(data):
    opt.zero_grad()
    model(x).pow(2).mean().backward()
    time.sleep(0.03)  # what ran before is another window of the trace
    began = time.monotonic_ns()
    opt.step()
    with open("steps", "a") as out:
        out.write(f"{began} {time.monotonic_ns()}\\n")
    time.sleep(0.03)
"""


def started(folder: Path, section: str, *options: str) -> subprocess.Popen[bytes]:
    (folder / "train.py").write_text(SCRIPT)
    words = [str(Path(sys.executable).parent / "psjob"), "run", "train.py", "--workers", "1", "--no-progress", *options]
    return subprocess.Popen(words, cwd=folder, env=roads.traced(folder / "trace", section))


def steps(folder: Path) -> list[tuple[int, int]]:
    """When each step that was over began and ended."""
    path = folder / "steps"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(line.split()[0]), int(line.split()[1])) for line in lines if line.count(" ") == 1]


def processes(index: int, folder: Path) -> list[int]:
    """The processes of this shard of the job in `folder`: the one that serves, and the one that keeps its memory."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            mine = b"psjob.shard" in (entry / "cmdline").read_bytes() and f"PSJOB_INDEX={index}".encode() in environment
        except OSError:
            continue
        if mine and f"PSJOBTRACE={folder / 'trace'}".encode() in environment:
            found.append(int(entry.name))
    return found


@pytest.mark.rotating
def test_a_gradient_goes_through_the_files_of_the_walk(tmp_path: Path) -> None:
    job = started(tmp_path, GRADIENT)
    assert job.wait(120) == 0
    assert len(steps(tmp_path)) == 40
    roads.compare("gradient", GRADIENT, tmp_path / "trace", steps(tmp_path)[5:])


@pytest.mark.soak
def test_a_lost_shard_comes_back_through_the_files_of_the_walk(tmp_path: Path) -> None:
    job = started(tmp_path, LOST, "--shards", "2", "--checkpoint-every", "5")
    deadline = time.monotonic() + 120
    while len(steps(tmp_path)) < 12:
        assert time.monotonic() < deadline and job.poll() is None
        time.sleep(0.02)
    lost = processes(1, tmp_path)
    assert len(lost) == 2
    began = time.monotonic_ns()
    for pid in lost:
        os.kill(pid, signal.SIGKILL)
    killed = time.monotonic_ns()
    assert job.wait(120) == 0
    first = next(end for start, end in steps(tmp_path) if start > killed)
    roads.compare("lost shard", LOST, tmp_path / "trace", [(began, first)])
