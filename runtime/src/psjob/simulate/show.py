"""Tables that read well and pipe well, and a progress bar on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

WIDTH = 30
EVERY = 0.1


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns with two spaces between; the first is text, the others are numbers to the right."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            word.ljust(width) if i == 0 else word.rjust(width) for i, (word, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


class Bar:
    """How much of `total` is done, on standard error; nothing where that is no terminal."""

    def __init__(self, total: int, unit: str) -> None:
        self._total, self._unit, self._shown = total, unit, 0.0
        self._began = time.monotonic()
        self._live = sys.stderr.isatty()

    def at(self, done: int) -> None:
        now = time.monotonic()
        if not self._live or now - self._shown < EVERY:
            return
        self._shown = now
        part = min(1.0, done / self._total)
        left = f", {(now - self._began) * (1 / part - 1):.0f} s left" if part else ""
        bar = "█" * round(WIDTH * part)
        print(f"\r{bar:░<{WIDTH}} {done:,}/{self._total:,} {self._unit}{left}\x1b[K", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Take it off the terminal."""
        if self._live and self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
