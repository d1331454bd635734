"""Logs of processes on their way to the user: those of chosen workers as they grow, another's end when it failed."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path

from psjob_client.local import regular
from psjob_client.local.errors import BadInput

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
            yield from map(_last_drawn, lines)
            if not whole or not part:
                break
        if whole and self._rest:
            yield _last_drawn(self._rest)
            self._rest = ""

    @property
    def drawn(self) -> str:
        """A line that the script draws again and again, such as tqdm's, in its newest form; empty if there is none."""
        return _last_drawn(self._rest) if "\r" in self._rest else ""

    def _read(self) -> bytes:
        try:
            with regular.opened(self.path) as file:
                file.seek(self._at)
                part = file.read(LARGEST_PART)
        except OSError:
            return b""
        self._at += len(part)
        return part


def _last_drawn(line: str) -> str:
    """What a terminal would show of a line with carriage returns."""
    return next((part for part in reversed(line.split("\r")) if part), "")


def parse_logs(text: str, workers: int) -> frozenset[int]:
    """The workers whose lines are shown: of `all`, `none`, or their numbers such as `0,2`. Raises BadInput."""
    if text in ("all", "none"):
        return frozenset(range(workers) if text == "all" else ())
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() for word in words):
        raise BadInput(f"--logs {text}: must be all, none, or numbers of workers such as 0,2")
    if above := [word for word in words if int(word) >= workers]:
        raise BadInput(f"--logs {text}: there is no worker {above[0]}; this job has {workers}, numbered from 0")
    return frozenset(map(int, words))
