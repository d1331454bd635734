"""The keys of a run on this machine: made once, in a file that only its owner may read; each process is handed a file with its own."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from psjob_operator import keys

NAMES = ("workers", "shards", "questions")


@dataclass(frozen=True, repr=False)
class RunKeys:
    """`folder` holds the file of each process."""

    folder: Path
    named: Mapping[str, bytes]

    @property
    def questions(self) -> bytes:
        """What a question to a status port is proven with."""
        return self.named["questions"]

    def hand(self, name: str, role: str, index: int, number: int) -> Path:
        """The file of the process of that name. Raises OSError where it cannot be written."""
        path = self.folder / name
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        write_private(path, keys.written(self.named, role, index, number))
        return path


def make(folder: Path) -> RunKeys:
    """Fresh keys of a run: its own file is `folder`/run. Raises OSError where that cannot be made."""
    made = {name: secrets.token_bytes(keys.SIZE) for name in NAMES}
    folder.mkdir(mode=0o700)
    write_private(folder / "run", keys.lines(made))
    return RunKeys(folder, made)


def write_private(path: Path, text: str) -> None:
    """A new file that only its owner may read. Raises OSError, also where it is there already."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
        file.write(text)
