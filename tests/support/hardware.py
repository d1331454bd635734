"""Hardware that some machines lack: tests have a variant for it where it is there, and the run says so where it is not.

`pytest -k cuda` runs all variants for a GPU.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

GPU = Path("/dev/nvidiactl").exists()
DEVICES = ["cpu", "cuda"] if GPU else ["cpu"]
"""For `pytest.mark.parametrize`."""


def repeatable(device: str) -> torch.device:
    """The device. Its kernels make the same bits each time in this process from here on; call it before the first one runs."""
    import torch  # not for the tests of the plan

    if device != "cpu":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    return torch.device(device)


def left_out(tests: Path) -> list[str]:
    """Test files with variants that this machine cannot run."""
    if GPU:
        return []
    asking = (file for file in tests.rglob("test_*.py") if "tests.support.hardware import" in file.read_text())
    return sorted(str(file.relative_to(tests.parent)) for file in asking)
