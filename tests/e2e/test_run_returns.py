"""What returns after a loss has imported torch already, and trains on to the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.workloads.running import Ran, faults, manifest, train


def run(folder: Path, *what: str) -> Ran:
    folder.mkdir()
    return train(folder, manifest(folder, ["returning.py"], checkpoint={"everySteps": 10, "interval": "1h"}), *faults(*what))


def test_workers_return_as_forks_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time too, when they are forks already."""
    monkeypatch.setenv("PS_FORK_SERVER", "0")
    hit = run(tmp_path / "hit", "kill:ps-1@step=22", "kill:ps-0@step=100")
    assert hit.code == 0 and hit.summary["attempts"] == [2, 2], hit.err
    for rank in (0, 1):
        log = hit.log(f"job-worker-{rank}")
        assert log.count("begins with torch") == 3 and "begins without torch" not in log and "ends after 150 steps" in log
    monkeypatch.setenv("PS_FORK_SERVER", "never")
    undisturbed = run(tmp_path / "undisturbed")
    assert hit.sha == undisturbed.sha and undisturbed.summary["restarts"] == {}
