"""What the user asked of `psjob run`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

STANDARD_INPUT = "-"
FIRST = "0"
"""Of --logs: the worker that evaluates and prints in most scripts."""


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
    run: str | None = None
    """Name of the run; None: one is made."""
    logs: str = FIRST
    """Workers whose lines are shown: `all`, `none`, or their numbers."""
    work_folder: Path | None = None
    """Where workers start; None: in the manifest's folder."""
    text: str | None = None
    """The manifest, if psjob has made it of the script `manifest`."""
    options: tuple[str, ...] = ()
    """Of a script: what the user has typed beside it."""
    arguments: tuple[str, ...] = ()
    """Those of the script."""

    @property
    def from_input(self) -> bool:
        """The manifest comes from standard input, and workers start in the folder that psjob is started in."""
        return str(self.manifest) == STANDARD_INPUT

    def words(self, *more: str) -> list[str]:
        """What a user types for the same job and `more` options, without those that say where to write."""
        laid = [word for setting in self.settings for word in ("--set", setting)]
        arguments = ["--", *self.arguments] if self.arguments else []
        return ["psjob", "run", *self.options, str(self.manifest), *laid, *more, *arguments]
