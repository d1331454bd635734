"""What the user asked of `psjob run`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Request:
    """The command line, typed."""

    manifest: Path
    settings: tuple[str, ...] = ()
    """Each `path=value`."""
    faults: tuple[str, ...] = ()
    summary: Path | None = None
    resume: Path | None = None
    """Folder of a former run."""
    progress: bool = True
    history: Path | None = None
    """Where the job's numbers are written while it runs."""
