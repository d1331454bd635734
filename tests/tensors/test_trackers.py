"""What a script reports is written to the TensorBoard files that it has open."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from psjob.api import trackers


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "_looked", 0)
    monkeypatch.setattr(trackers, "_told", 0)
    monkeypatch.setattr(trackers, "_broken", set())
    trackers._writers.clear()


def test_an_open_summary_writer_is_told(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    closed, writer = SummaryWriter(str(tmp_path / "closed")), SummaryWriter(str(tmp_path / "open"))
    closed.close()
    for step in range(4):
        trackers.tell({"loss": 1.0 / (step + 1)}, step)
    late = SummaryWriter(str(tmp_path / "late"))
    for step in range(4, 12):
        trackers.tell({"loss": 1.0}, step)
    writer.close()
    late.close()
    events = EventAccumulator(str(tmp_path / "open"))
    events.Reload()
    assert [(event.step, round(event.value, 3)) for event in events.Scalars("psjob/loss")][:3] == [(0, 1.0), (1, 0.5), (2, 0.333)]
    other = EventAccumulator(str(tmp_path / "late"))
    other.Reload()
    assert other.Scalars("psjob/loss"), "one that is opened later is found"
    assert len(list((tmp_path / "closed").iterdir())) == 1, "a closed one is not opened again"
    del closed, writer, late
    gc.collect()
