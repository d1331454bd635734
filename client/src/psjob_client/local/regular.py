"""Files that somebody else may have put into a run's folder: regular ones only, opened without following a link, read with a limit."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

MOST = 256 << 20
"""Bytes of a file that is read whole."""


def opened(path: Path) -> BinaryIO:
    """The file, for reading. Raises OSError for a link, a folder, a pipe, a socket or a device."""
    # Without O_NONBLOCK a pipe would be waited for.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is no regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def content(path: Path, most: int = MOST) -> bytes:
    """What it holds. Raises OSError as `opened` does, and for more than `most` bytes."""
    with opened(path) as file:
        found = file.read(most + 1)
    if len(found) > most:
        raise OSError(errno.EFBIG, f"has more than {most} bytes", str(path))
    return found
