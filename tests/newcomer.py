"""A machine on which nothing of psjob is installed, and the packages that psjob needs are."""

from __future__ import annotations

import sysconfig
from pathlib import Path

OURS = "psjob"


def third_party(folder: Path) -> Path:
    """A folder for PYTHONPATH with all that this environment has installed, but for psjob: links, so that pip finds torch there already."""
    folder.mkdir()
    for place in Path(sysconfig.get_path("purelib")).iterdir():
        if not place.name.lstrip("_").startswith(OURS) and place.suffix != ".pth" and place.name != "__pycache__":
            (folder / place.name).symlink_to(place)
    return folder
