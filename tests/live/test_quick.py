"""A worker's start does not load torch's compiler, and torch is as it was once the compiler is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm

STARTS = """
import sys, torch, psjob
"""
STARTS_AGAIN = """
import importlib, sys, torch, psjob
importlib.reload(psjob)
"""
STEPS = """
model = torch.nn.Linear(2, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
opt.zero_grad(); opt.state_dict()
print("torch._dynamo" in sys.modules)
"""
COMPILES = """
import torch._dynamo
opt.zero_grad()
print(torch.optim.Optimizer.zero_grad.__wrapped__.__dynamo_disable.__module__.startswith("torch."))
step = torch.compile(lambda x: x * 2, backend="eager")
print(step(torch.ones(1)).item())
"""


def test_a_worker_that_begins_loads_no_compiler(tmp_path: Path) -> None:
    """A fork of a process that has imported torch, in which psjob is imported again."""
    words = ("-c", STARTS_AGAIN + STEPS)
    process = warm.start_python(tmp_path, words, {"PSJOB_ROLE": "worker"}, tmp_path / "printed", tmp_path / "told")
    assert process.communicate(100) == ("False\n", "")


@pytest.mark.rotating
def test_the_compiler_is_loaded_only_when_it_is_asked_for() -> None:
    env = {**os.environ, "PSJOB_ROLE": "worker"}
    done = subprocess.run([sys.executable, "-c", STARTS + STEPS + COMPILES], env=env, capture_output=True, text=True, timeout=240)
    assert done.stdout.split() == ["False", "True", "2.0"], done.stdout + done.stderr
