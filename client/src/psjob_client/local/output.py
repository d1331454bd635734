"""Logs of processes on their way to the user: rank 0's as it grows, another's end when it failed."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path

LARGEST_PART = 256 * 1024
"""Bytes taken at once, so that a script that prints without end leaves the display alive."""


class Follow:
    """Reads one growing file, line by line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""

    def lines(self, *, whole: bool = False) -> Iterator[str]:
        """What was written since the last call, without line ends; with `whole`, all of it, and a last line that has no end."""
        while True:
            part = self._read()
            self._rest += self._decoder.decode(part)
            *lines, self._rest = self._rest.split("\n")
            yield from lines
            if not whole or not part:
                break
        if whole and self._rest:
            yield self._rest
            self._rest = ""

    def _read(self) -> bytes:
        try:
            with self.path.open("rb") as file:
                file.seek(self._at)
                part = file.read(LARGEST_PART)
        except OSError:
            return b""
        self._at += len(part)
        return part
