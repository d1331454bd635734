"""The edit of a program: lines that take the place of others, as the docs say it. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

SEED = "import torch; torch.manual_seed(0)\n"
"""The line that a program begins with which seeds no generator: two runs of it could not be compared."""


def edited(text: str, edits: Sequence[Sequence[str]], name: str) -> str:
    """The program with each `old` replaced by its `new`. Raises ValueError if an old one is not there exactly once."""
    for old, new in edits:
        if text.count(old) != 1:
            raise ValueError(f"{name} has {old!r} {text.count(old)} times and not once: the package has changed, edit programs.toml")
        text = text.replace(old, new)
    return text


def seeded(text: str) -> str:
    """With `SEED` before its first line that runs."""
    lines = text.splitlines(keepends=True)
    after = max((number for number, line in enumerate(lines, 1) if line.startswith("from __future__")), default=0)
    return "".join([*lines[:after], SEED, *lines[after:]])


def changed(before: str, after: str) -> int:
    """Lines of `after` that differ from those of `before`, or that are gone, whichever is more."""
    ours = difflib.SequenceMatcher(a=before.splitlines(), b=after.splitlines(), autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in ours if kind != "equal")
