"""TensorBoard, Weights & Biases and MLflow, themselves, over a restart of the script in place: one run of each, with every step."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.frameworks.runs import Run

pytestmark = pytest.mark.timeout(600)
STEPS = set(range(1, 101))


@pytest.mark.soak
def test_a_rewind_opens_no_second_run_and_loses_no_number(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    kept = tmp_path / "kept"
    kept.mkdir()
    environment = {"MLFLOW_TRACKING_URI": f"file://{kept}/mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"}
    ended = Run(tmp_path / "job", ["trackers.py", str(kept)], ["kill:shard-1@step=30"], environment=environment)
    assert ended.code == 0, ended.output[-4000:]
    opened = re.findall(r"tracked by (\S+) (\S+)", ended.output)
    assert len(opened) >= 2 and len(set(opened)) == 1, opened
    told = EventAccumulator(str(kept / "events"))
    told.Reload()
    assert {event.step for event in told.Scalars("psjob/loss")} == STEPS, "of TensorBoard"
    assert _of_wandb(kept) == STEPS
    (metric,) = kept.glob(f"mlruns/*/{opened[0][1]}/metrics/psjob/loss")
    assert {int(line.split()[2]) for line in metric.read_text().splitlines()} == STEPS, "of MLflow"


def _of_wandb(kept: Path) -> set[int]:
    """Steps in the files of the offline run, one a start."""
    from wandb.proto.wandb_internal_pb2 import Record

    files = sorted(kept.glob("wandb/offline-run-*/run-*.wandb"))
    assert len({file.name for file in files}) == 1
    found = set()
    for file in files:
        for data in _records(file.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if "psjob/step" in items:
                found.add(int(items["psjob/step"]))
    return found


def _records(raw: bytes) -> Iterator[bytes]:
    """Of a W&B file: LevelDB's log format (blocks of 32 KiB, parts of records with checksum, length and kind) after 7 bytes."""
    at, whole = 7, b""
    while at + 7 <= len(raw):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _sum, length, kind = struct.unpack_from("<IHB", raw, at)
        whole += raw[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # all of a record, or its last part
            yield whole
            whole = b""
