"""Sides on the simulator's virtual clock: `psjob simulate compare`, with the words of this machine's runtime."""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from psjob_client.compare.outcome import LOSS, SideOutcome
from psjob_client.local.children import die_with
from psjob_client.local.errors import BadInput

ACCURACY = "accuracy"


def simulate(modes: Sequence[str], options: Sequence[str], deadline: float) -> list[SideOutcome]:
    """An outcome for each of `modes`, in the simulator's words. Raises BadInput with its sentence, or when it takes too long."""
    asked = ["simulate", "compare", "-o", "json", *options, *(word for mode in modes for word in ("--mode", mode))]
    argv = [sys.executable, "-m", "psjob_client.cli.main", *asked]
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, preexec_fn=die_with(os.getpid()), text=True) as process:
        try:
            said, _ = process.communicate(timeout=deadline)
        except subprocess.TimeoutExpired:
            raise BadInput(f"--deadline {deadline:g}: the simulator did not finish; give it more seconds, or fewer --pushes") from None
        finally:
            process.kill()
    if process.returncode:
        raise BadInput("the simulator made no comparison; its own message is above")
    return [_outcome(found, options) for found in json.loads(said)]


def _outcome(found: Mapping[str, Any], options: Sequence[str]) -> SideOutcome:
    curves: dict[str, list[tuple[float, float, float]]] = {LOSS: [], ACCURACY: []}
    for at, step, loss, score in found["points"]:
        for name, value in ((LOSS, loss), (ACCURACY, score)):
            if value is not None and math.isfinite(value):
                curves[name].append((at, step, value))
    final = {name: curve[-1][2] for name, curve in curves.items() if curve} | {ACCURACY: found["score"]}
    command = shlex.join(["psjob", "simulate", "compare", *options, "--mode", found["mode"]])
    return SideOutcome(
        found["mode"], command, "Complete", found["elapsed"], found["steps"], curves, final, [tuple(entry) for entry in found["lags"]],
        [tuple(entry) for entry in found["gaps"]], found["idle"], found["dropped"] / found["pushes"],
    )  # fmt: skip
