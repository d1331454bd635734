"""What a peer says, as it may stand in a log or an error: one line, without escapes of terminals."""

from __future__ import annotations

from typing import Final

STRANGER_LETTERS: Final = 200
"""Most letters of what somebody says who has proven nothing."""


def one_line(said: object, most: int) -> str:
    """`said` as text of at most `most` letters; a space stands for each one that is not printable."""
    return "".join(letter if letter.isprintable() else " " for letter in str(said)[:most])
