"""Hardware that some machines lack: tests have a variant for it where it is there, and the run says so where it is not."""

from __future__ import annotations

from pathlib import Path

GPU = Path("/dev/nvidiactl").exists()
DEVICES = ["cpu", "cuda"] if GPU else ["cpu"]
"""For `pytest.mark.parametrize`."""


def left_out(tests: Path) -> list[str]:
    """Test files with variants that this machine cannot run."""
    if GPU:
        return []
    asking = (file for file in tests.rglob("test_*.py") if "tests.hardware import" in file.read_text())
    return sorted(str(file.relative_to(tests.parent)) for file in asking)
