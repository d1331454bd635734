"""Holds a script at a place until a fault has struck there: after an epoch's last step, as it prints, or as it begins to evaluate.

A script that a test runs calls `hold` or `hold_steps` in its first line. It knows nothing of it otherwise.
"""

from __future__ import annotations

import builtins
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

SECONDS = 60.0
SLACK = 2
"""Steps that rank 0 may make past that of a fault before the fault is told."""


def hold(place: str, step: int, words: Sequence[str], told: str) -> None:
    """At the first `tail` or `evaluation` after so many steps rank 0 waits until the file `told` has all these words."""
    if os.environ.get("PSJOB_INDEX") != "0":
        return
    if place == "tail":
        say = builtins.print

        def held(*values: Any, **options: Any) -> None:
            say(*values, **options)
            if values and str(values[0]).startswith("line"):
                _wait(step, words, told)

        builtins.print = held
    else:
        evaluate = torch.nn.Module.eval

        def held_first(model: torch.nn.Module) -> torch.nn.Module:
            _wait(step, words, told)
            return evaluate(model)

        torch.nn.Module.eval = held_first  # type: ignore[method-assign]


def hold_steps(faults: Mapping[str, int], told: str) -> None:
    """Rank 0 begins no step more than SLACK after that of a fault before the file `told` has the fault's word: a step may take 1 ms."""
    if os.environ.get("PSJOB_INDEX") != "0":
        return
    zero_grad = torch.optim.Optimizer.zero_grad

    def held_first(*values: Any, **options: Any) -> None:
        for word, step in faults.items():
            _wait(step + SLACK, (word,), told)
        zero_grad(*values, **options)

    torch.optim.Optimizer.zero_grad = held_first  # type: ignore[method-assign]


def _wait(step: int, words: Sequence[str], told: str) -> None:
    import psjob

    if psjob.step() < step:
        return
    Path("held").touch()
    until = time.monotonic() + SECONDS
    while not all(word in Path(told).read_text() for word in words):
        if time.monotonic() > until:
            raise TimeoutError(f"none of {words} was told at step {psjob.step()}")
        time.sleep(0.01)
