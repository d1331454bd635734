"""Hardware that some machines lack: tests have a variant for it where it is there, and the run says so where it is not.

A variant for a GPU is marked `gpu`, and `make test-gpu` runs all of these.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

GPU = Path("/dev/nvidiactl").exists()
NO_GPU = "needs an NVIDIA GPU, and this machine has none"


def gpu(*values: Any) -> Any:
    """One set of parameters for `make test-gpu`."""
    return pytest.param(*values, marks=(pytest.mark.gpu, pytest.mark.skipif(not GPU, reason=NO_GPU)))


def gpus() -> int:
    """NVIDIA GPUs of this machine."""
    return sum(path.name.removeprefix("nvidia").isdecimal() for path in Path("/dev").glob("nvidia*"))


def on_devices(*more: Any) -> list[Any]:
    """Sets of parameters, for `pytest.mark.parametrize`: a device and `more`. The one for a GPU is there where that is."""
    return [pytest.param("cpu", *more), *([gpu("cuda", *more)] if GPU else [])]


DEVICES = on_devices()


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
