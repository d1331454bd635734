"""Which runs lie below a folder, of which job each is, and which of a job's is the newest."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from psjob_client.local import record, regular

LARGEST_OBJECT = 64 << 20
"""Bytes of a JSON file of a run."""


def runs_in(runs: Path) -> Sequence[Path]:
    """Folders of runs, by name; none where `runs` cannot be read."""
    try:
        return [path for path in sorted(runs.iterdir()) if is_run(path)]
    except OSError:
        return []


def newest_of(paths: Sequence[Path], job: str) -> Path | None:
    """The run of this job that was made last; None if there is none."""
    return max((path for path in paths if job_of(path) == job), key=_created, default=None)


def is_run(path: Path) -> bool:
    """Is this the folder of a run?"""
    return (path / "config.json").is_file() or (path / record.RUN).is_file()


def job_of(path: Path) -> str:
    """Name of the job of which this is a run."""
    told = json_object(path / record.RUN) or json_object(path / "config.json")
    return str(told.get("job") or path.name)


def modified(path: Path) -> float:
    """Unix time of its last change; 0 where that is not known."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def json_object(path: Path, most: int = LARGEST_OBJECT) -> Mapping[str, Any]:
    """The object that this file of at most `most` bytes holds; empty where it holds none."""
    try:
        read = json.loads(regular.content(path, most))
    except (OSError, ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}


def _created(path: Path) -> float:
    created = json_object(path / record.RUN).get("created")
    return float(created) if isinstance(created, int | float) else modified(path)
