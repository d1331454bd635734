"""The README's change of a DDP script: both sides train, and the plain one of a single process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.finding import ALL

AROUND = """
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.manual_seed(0)
x = torch.randn(512, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))
model, loss_fn = torch.nn.Linear(4, 1), torch.nn.functional.mse_loss
"""
ENV = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}


def side(without: str) -> str:
    """The script before (`without` is "+") or after ("-") the change."""
    (shown,) = (block.text for block in ALL if block.page == "README.md" and block.kind == "diff")
    lines = shown.splitlines()
    return "\n".join(line[1:] for line in lines if not line.startswith(without)) + "\n"


@pytest.mark.rotating
@pytest.mark.parametrize("without", ["+", "-"], ids=["before", "after"])
def test_the_change_of_a_script(tmp_path: Path, without: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{AROUND}{side(without)}print('learned', loss.item() < 0.05)\n")
    done = subprocess.run([sys.executable, str(script)], env=ENV, capture_output=True, text=True, timeout=100)
    assert done.stdout == "learned True\n", done.stderr[-2000:]
