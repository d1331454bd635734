"""Cuts that psjob has chosen for a job, as worker 0 tells them, shard 0 keeps them and the other workers hear them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

ASKS: Final = "cuts"
"""What the hello of a stream asks for that is about them."""
MOST_LETTERS: Final = 512
"""Of the name of a module."""
MOST_CUTS: Final = 255


@dataclass(frozen=True)
class ChosenCuts:
    """The module with which each stage after the first begins, and the predicted seconds of a step."""

    cuts: tuple[str, ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """As it is sent and kept."""
        return {"cuts": list(self.cuts), "seconds": self.seconds}

    def told(self, names: Sequence[str]) -> str:
        """For a log: what was chosen, and how to write it into the manifest. `names`: of all stages."""
        pins = ", ".join(f"{{name: {name}, cut: {json.dumps(cut)}}}" for name, cut in zip(names[1:], self.cuts, strict=False))
        pin = f"; to pin that, spec.stages: {pins}" if pins else ""
        return f"cuts: auto cuts the model at {', '.join(self.cuts)}; a step is predicted to take {1e3 * self.seconds:.4g} ms{pin}"

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], stages: int) -> ChosenCuts:
        """Read what `to_json` wrote, of a job of so many stages. Raises ValueError for anything else."""
        cuts, seconds = raw.get("cuts"), raw.get("seconds")
        named = isinstance(cuts, list) and all(isinstance(cut, str) and 0 < len(cut) <= MOST_LETTERS and cut.isprintable() for cut in cuts)
        if not named or not isinstance(cuts, list) or len(cuts) > MOST_CUTS or len(set(cuts)) != len(cuts):
            raise ValueError(f"cuts are {str(cuts)[:80]}, expected a list of different names of modules")
        if len(cuts) != stages - 1:
            raise ValueError(f"{len(cuts)} cuts were chosen, and a job of {stages} stages has {stages - 1}")
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not math.isfinite(seconds) or seconds < 0:
            raise ValueError(f"the predicted step takes {str(seconds)[:40]} s, expected a number from 0")
        return cls(tuple(cuts), float(seconds))
