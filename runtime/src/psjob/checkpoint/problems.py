"""What can be wrong with a checkpoint, as exceptions whose text a user can act on."""

from __future__ import annotations

import errno
from pathlib import Path


class CheckpointProblem(Exception):
    """Something could not be written or read. Training can continue; the text says what to change.

    `full`: for want of room, so that the same may succeed later.
    """

    full = False


class Damage(CheckpointProblem):
    """A file is not what was written. `file`, `expected` and `found` are in the text."""

    def __init__(self, file: str, expected: str, found: str) -> None:
        super().__init__(f"checkpoint file {file} is damaged: expected {expected}, found {found}")
        self.file, self.expected, self.found = file, expected, found


FULL = (errno.ENOSPC, errno.EDQUOT)
_REMEDIES = {
    errno.ENOSPC: "the volume is full: free space or ask for a larger one",
    errno.EDQUOT: "the quota is used up: free space or ask for more",
    errno.EROFS: "the volume is mounted read-only",
    errno.EACCES: "this user may not write there: set fsGroup or the folder's owner",
    errno.EPERM: "this user may not write there: set fsGroup or the folder's owner",
    errno.EIO: "the disk reported an error",
    errno.ENOENT: "the folder is gone",
}


def explain(error: OSError, doing: str, folder: Path) -> CheckpointProblem:
    """The sentence for an OSError met while `doing` something in `folder`."""
    name = errno.errorcode.get(error.errno or 0, "error")
    remedy = _REMEDIES.get(error.errno or 0, error.strerror or str(error))
    problem = CheckpointProblem(f"cannot {doing} in {folder}: {name}, {remedy}")
    problem.full = error.errno in FULL
    return problem
