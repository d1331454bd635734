"""A terminal of a given size: what a program writes to it, as a person would see it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pyte
from rich.style import Style
from rich.text import Text

LINES = 40
HEXADECIMAL = re.compile("[0-9a-f]{6}")


class Terminal:
    """Reads what is written to the terminal `theirs`, and keeps the screen, in which pyte carries out its control sequences."""

    def __init__(self, columns: int, lines: int = LINES) -> None:
        self._screen = pyte.HistoryScreen(columns, lines, history=2000)
        self._stream = pyte.ByteStream(self._screen)
        self.ours, self.theirs = pty.openpty()
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.environment = {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": str(lines)}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            while part := os.read(self.ours, 65536):
                with self._lock:
                    self._stream.feed(part)
        except OSError:
            pass  # Linux says EIO when the last writer is gone

    def settle(self, seconds: float = 5.0) -> None:
        """Wait until everything that was written has been read."""
        termios.tcdrain(self.theirs)
        mark = f"\x1b]0;settled {time.monotonic()}\x07"  # a title, which no line shows
        os.write(self.theirs, mark.encode())
        until = time.monotonic() + seconds
        while self._screen.title != mark[4:-1] and time.monotonic() < until:
            time.sleep(0.001)
        assert self._screen.title == mark[4:-1], "the terminal was not read"

    def end(self) -> None:
        """Let the program's end be the end of what is read, and wait for that."""
        if self.theirs >= 0:
            os.close(self.theirs)
            self.theirs = -1
        self._thread.join(10)

    def shown(self) -> list[str]:
        """The lines on the screen, without those that are empty at its end."""
        with self._lock:
            lines = [line.rstrip() for line in self._screen.display]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def styled(self) -> list[Text]:
        """The lines on the screen with their colours."""
        with self._lock:
            rows = [[self._screen.buffer[line][column] for column in range(self._screen.columns)] for line in range(self._screen.lines)]
        return [Text.assemble(*((char.data, _style(char)) for char in row)) for row in rows]

    def all(self) -> list[str]:
        """The same after all lines that have scrolled out of it."""
        with self._lock:
            gone = ["".join(row[column].data for column in range(self._screen.columns)).rstrip() for row in self._screen.history.top]
        return gone + self.shown()


def _style(char: pyte.screens.Char) -> Style:
    return Style(color=_colour(char.fg), bgcolor=_colour(char.bg), bold=char.bold, italic=char.italics, reverse=char.reverse)


def _colour(name: str) -> str | None:
    """pyte's name of a colour as rich has it: hexadecimal digits, or one of eight names, of which pyte has brown for yellow."""
    if name == "default":
        return None
    return f"#{name}" if HEXADECIMAL.fullmatch(name) else {"brown": "yellow"}.get(name, name)


@contextmanager
def terminal(columns: int, lines: int = LINES) -> Iterator[Terminal]:
    """A `Terminal` that is closed at the end."""
    made = Terminal(columns, lines)
    try:
        yield made
    finally:
        made.end()
        os.close(made.ours)
