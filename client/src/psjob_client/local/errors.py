"""The sentence that `psjob run` ends with when it is asked for what it cannot do."""

from __future__ import annotations

from collections.abc import Sequence


class BadInput(Exception):
    """A manifest, option or folder that cannot be used. `lines`: one sentence a problem, each with its remedy."""

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(lines))
        self.lines: Sequence[str] = lines
