"""Texts of others, as they may stand on a terminal, a page, a log or an Event: of a job's author, a pod, a node, an API message. Pure.

An escape code in such a text could move the cursor, set a title, fill the clipboard or hide what follows. A mark of writing direction
shows words in another order than they have.
"""

from __future__ import annotations

import re
import unicodedata

MOST = 1 << 16
"""Letters of one text."""
LINE_ENDS = "\n\t"
_COLOUR = re.compile(r"(\x1b\[[0-9;:]{0,32}m)")
_RESET = "\x1b[0m"


def _stays(letter: str) -> bool:
    return letter.isprintable() or unicodedata.category(letter) == "Zs"


def printable(text: object, keep: str = "", most: int = MOST) -> str:
    """`text` of at most `most` letters. What is not printable stands as in Python's source, such as `\\x1b`; but for what is in `keep`."""
    whole = str(text)
    if not whole[:most].isprintable():
        whole = "".join(letter if _stays(letter) or letter in keep else ascii(letter)[1:-1] for letter in whole[: most + 1])
    return whole if len(whole) <= most else whole[: most - 1] + "…"


def coloured(line: str) -> str:
    """A line that a process printed: colours and weights of letters stay, and end with it."""
    if "\x1b" not in line:
        return printable(line, "\t")
    parts = _COLOUR.split(line[:MOST])
    kept = "".join(part if place % 2 else printable(part, "\t") for place, part in enumerate(parts))
    return kept + _RESET if len(parts) > 1 else kept
