"""A script of a test goes slowly until a checkpoint is committed, so that no fault comes too early on a busy machine."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

STEPS, SECONDS = 12, 4.0
"""A gate is this many steps wide. At each it waits so long: in async a worker must come to a step's edge for a cut to be made."""


class Gates:
    """`text` is `STEP:MANIFEST,…`: from STEP on wait at each step until a manifest of step MANIFEST or later lies in the run's folder.

    With `STEP:NAME` it is a file of that name, which the test makes there.
    """

    def __init__(self, text: str) -> None:
        pairs = [gate.split(":") for gate in text.split(",") if gate]
        self._gates = {int(step): what for step, what in pairs}
        self._folder = Path(os.environ.get("PSJOB_CONFIG", ".")).parent

    def pass_at(self, step: int) -> None:
        """Wait here if `step` is in a gate."""
        wanted = next((what for begin, what in self._gates.items() if begin <= step < begin + STEPS), None)
        deadline = time.monotonic() + SECONDS
        while wanted is not None and not self._open(wanted) and time.monotonic() < deadline:
            time.sleep(0.05)

    def _open(self, wanted: str) -> bool:
        if wanted.isdecimal():
            return max(steps_of(self._folder), default=0) >= int(wanted)
        return (self._folder / wanted).exists()


def steps_of(folder: Path) -> list[int]:
    """Steps of the manifests that lie in a run's folder, ascending."""
    found = (re.fullmatch(r"manifest-v\d+-s(\d+)\.json", path.name) for path in folder.glob("manifest-*.json"))
    return sorted(int(match[1]) for match in found if match)
