"""How a job ends: the word, the reason and the sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Ending:
    """A terminal phase. The first that a policy names holds."""

    phase: Literal["Complete", "Failed"]
    reason: str
    message: str
