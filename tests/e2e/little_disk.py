"""A job whose checkpoints do not fit on its volume."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.workloads.running import manifest

MEGABYTES, STEPS, PACE = 8.0, 300, 0.3
INTERVAL = 8.0
VOLUME_BYTES = 96_000_000
LITTLE = 3_000_000
"""Room for all that shard 0 writes, and too little for shard 1."""
COMES = 90.0
"""Seconds for what a busy machine does in a few."""


def job_of(folder: Path, *words: str) -> Path:
    command = ["bulky.py", str(MEGABYTES), str(STEPS), "--uneven", *words]
    return manifest(folder, command, checkpoint={"periodSeconds": round(INTERVAL), "keep": 2})
