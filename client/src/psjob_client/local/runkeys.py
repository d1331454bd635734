"""The keys of a run on this machine: made once, in a file that only their owner may read; each process is handed a file with its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from psjob_operator import keys
from psjob_operator.api.spec import JobSpec
from psjob_operator.plan import pods

ONE_HOST = "none"
"""What `training.encryption: auto` means where nothing leaves this machine's memory."""


@dataclass(frozen=True, repr=False)
class RunKeys:
    """`folder` holds the file of each seat."""

    folder: Path
    named: Mapping[str, bytes]

    @property
    def questions(self) -> bytes:
        """What a question to a status port is proven with."""
        return self.named["questions"]

    def hand(self, role: str, index: int, number: int) -> Path:
        """The file of the process that sits there from now on. Raises OSError where it cannot be written."""
        path = self.folder / f"{role}-{index}"
        # In place, where the file before has as many bytes: a full disk keeps no process from being started again.
        _write(path, keys.written(self.named, role, index, number))
        return path


def encryption(spec: JobSpec) -> str:
    """Which streams of a run on this machine are encrypted, one of contract.ENCRYPTION."""
    return pods.encryption(spec, ONE_HOST)


def make(folder: Path, shards: int, workers: int, encrypted: bool = False, listening: int = 0) -> RunKeys:
    """Fresh keys of a run, and the files of all its seats: its own is `folder`/run. `encrypted`: with certificates, also of `listening`
    workers.

    Raises OSError where they cannot be made.
    """
    made = RunKeys(folder, keys.fresh())
    folder.mkdir(mode=0o700)
    _write(folder / "run", keys.lines(made.named))
    for role, count in (("shard", shards), ("worker", workers)):
        for index in range(count):
            made.hand(role, index, 1)
    if encrypted:
        from psjob_operator.authority import certificates  # most runs on one machine need none

        for name, text in certificates(shards, listening).items():
            _write(folder / name, text.decode())
    return made


def _write(path: Path, text: str) -> None:
    """A file that only its owner may read, with room of its own on the disk."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, len(text))
        os.pwrite(handle, text.encode(), 0)
    finally:
        os.close(handle)
