"""What every shard has counted, added up for the job: bytes that came with pushes, and updates lost. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psjob.shard.phase import Counters

WORDS = {"pushBytes": "bytes", "updatesLost": "lost"}
"""What is told -> the counter of a shard."""


def word(counters: Counters, attempt: int) -> dict[str, Any]:
    """What goes to the coordinator of a shard's counters."""
    return {"did": "counts", "attempt": attempt, **{said: getattr(counters, name) for said, name in WORDS.items()}}


class JobCounts:
    """Counts begin at 0 with this coordinator and never fall: what a shard counted in an attempt before stays."""

    def __init__(self) -> None:
        self._total = dict.fromkeys(WORDS, 0)
        self._heard: dict[int, tuple[int, dict[str, int]]] = {}
        """By shard: its attempt, and what it has told in it."""

    def heard(self, shard: int, body: Mapping[str, Any]) -> None:
        """A shard tells of its counters, as `word` writes it. Raises ValueError, KeyError or TypeError for anything else."""
        attempt, told = int(body["attempt"]), {said: int(body[said]) for said in WORDS}
        known = self._heard.get(shard, (0, dict.fromkeys(WORDS, 0)))
        if attempt < known[0]:
            return
        before = known[1] if attempt == known[0] else dict.fromkeys(WORDS, 0)
        if any(told[said] < before[said] for said in WORDS):
            raise ValueError(f"shard {shard} counts {told} after {before}; counters never fall")
        self._total = {said: count + told[said] - before[said] for said, count in self._total.items()}
        self._heard[shard] = attempt, told

    def told(self) -> dict[str, int]:
        """The job's counts, as contract.STATUS_KEYS has them."""
        return dict(self._total)
