"""Inputs that are grown by what they cost: the slowest of those that were made are changed further. Costs are found, not crashes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

from tests.heaps import small_heap

LIMIT_SECONDS = 0.1
"""Of one shard's processor, for one input."""
MOST_BYTES = 1 << 20
KEPT = 6
TRIES = 3
"""An input counts by its quickest run: others on the machine make one slower, and never quicker."""
T = TypeVar("T")


def slowest(
    seeds: Sequence[T], change: Callable[[Random, T, T], T], size: Callable[[T], int], read: Callable[[T], object], rounds: int, seed: int
) -> tuple[float, T]:
    """(seconds, input) of what costs most of `read` after so many rounds, of inputs of at most MOST_BYTES.

    `change` makes an input of two. `read` may raise ValueError or what else it promises: a refusal costs time too.
    """
    random = Random(seed)
    with small_heap():
        found = [(_seconds(value, read), value) for value in seeds]
        for _ in range(rounds):
            found.sort(key=lambda pair: pair[0], reverse=True)
            del found[KEPT:]
            made = change(random, random.choice(found)[1], random.choice(found)[1])
            if size(made) <= MOST_BYTES:
                found.append((_seconds(made, read), made))
        took, worst = max(found, key=lambda pair: pair[0])
        for _ in range(TRIES):
            took = min(took, _seconds(worst, read))
    return took, worst


def _seconds(value: T, read: Callable[[T], object]) -> float:
    began = time.thread_time()
    try:
        read(value)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        pass
    except Exception as error:
        if type(error).__name__ not in ("WireError", "Malformed", "CheckpointProblem"):
            raise
    return time.thread_time() - began
