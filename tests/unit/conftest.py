"""What unit tests share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a shard or a refused worker that runs in the test's own process leaves its sentence; kernels have one thread."""
    import torch  # not for the tests of the plan

    torch.set_num_threads(1)
    monkeypatch.setenv("PSJOB_TERMINATION_LOG", str(tmp_path / "last-words"))
    return tmp_path / "last-words"
