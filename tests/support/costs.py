"""Inputs that are grown by what they cost: the dearest of those that were made are changed further. Costs are found, not crashes."""

from __future__ import annotations

import functools
import math
import time
import tracemalloc
from collections.abc import Callable, Sequence
from random import Random
from statistics import median
from typing import TypeVar

from hack.testing.cost import slowness
from tests.support.fuzzing import byte_changes, changed_bytes
from tests.support.heaps import small_heap

LIMIT_SECONDS = 0.1
"""Of one shard's processor, for one input, on the machine of the tests' budgets."""
MOST_BYTES = 1 << 20
MOST_MEMORY = 64 << 20
"""Bytes that one input may make a process allocate: of JSON two bytes become an object of 64."""
KEPT = 6
TRIES = 3
"""An input counts by its cheapest run: others on the machine make one slower, and never quicker."""
MORE_TRIES, APART = 40, 0.25
"""Runs of an input whose cost is above its limit, and seconds between two: what else runs here slows a machine for seconds."""
PARTS = (1, 2, 8, 64, 1024, 1 << 16)
T = TypeVar("T")


def dearest(
    seeds: Sequence[T],
    change: Callable[[Random, T, T], T],
    size: Callable[[T], int],
    cost: Callable[[T], float],
    rounds: int,
    seed: int,
    limit: float = math.inf,
) -> tuple[float, T]:
    """(cost, input) of what costs most after so many rounds, of inputs of at most MOST_BYTES. `change` makes an input of two.

    A cost above `limit` is measured up to MORE_TRIES times before it counts.
    """
    random = Random(seed)
    with small_heap():
        found = [(cost(value), value) for value in seeds]
        for _ in range(rounds):
            found.sort(key=lambda pair: pair[0], reverse=True)
            del found[KEPT:]
            made = change(random, random.choice(found)[1], random.choice(found)[1])
            if size(made) <= MOST_BYTES:
                found.append((cost(made), made))
        while True:
            most, worst = max(found, key=lambda pair: pair[0])
            again = min(most, *(cost(worst) for _ in range(TRIES - 1)))
            for _ in range(MORE_TRIES):
                if again <= limit:
                    break
                time.sleep(APART)
                again = min(again, cost(worst))
            if again >= most * 0.9:
                return again, worst
            found[found.index((most, worst))] = (again, worst)


@functools.cache
def slower() -> float:
    """How many times as long this machine needs as that of the budgets; 1 where it is quicker."""
    return max(1.0, median(slowness() for _ in range(9)))


def since(began: float) -> float:
    """Seconds of this thread's processor since `began` (`time.thread_time`), as they are on the machine of the budgets."""
    return (time.thread_time() - began) / slower()


def seconds(read: Callable[[T], object]) -> Callable[[T], float]:
    """What an input costs of this thread's processor. `read` may raise ValueError or what else it promises: a refusal costs time too."""

    def cost(value: T) -> float:
        began = time.thread_time()
        _try(value, read)
        return since(began)

    return cost


def memory(read: Callable[[T], object]) -> Callable[[T], float]:
    """The most bytes that an input makes Python allocate."""

    def cost(value: T) -> float:
        tracemalloc.start()
        try:
            _try(value, read)
            return float(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()

    return cost


def slowest(
    seeds: Sequence[T], change: Callable[[Random, T, T], T], size: Callable[[T], int], read: Callable[[T], object], rounds: int, seed: int
) -> tuple[float, T]:
    """As `dearest`, by time."""
    return dearest(seeds, change, size, seconds(read), rounds, seed, LIMIT_SECONDS)


def _try(value: T, read: Callable[[T], object]) -> None:
    try:
        read(value)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        pass
    except Exception as error:
        if type(error).__name__ not in ("WireError", "Malformed", "CheckpointProblem", "Damage"):
            raise


def more(random: Random, one: bytes, other: bytes) -> bytes:
    """More of what is there: a part once more, many times; parts of two; a part of JSON; a few bytes."""
    if random.random() < 0.15:
        return changed_bytes(one, byte_changes(random))
    begin = random.randrange(len(one) + 1)
    part = one[begin : begin + random.choice(PARTS)]
    if random.random() < 0.7 and (comma := part.find(b",")) >= 0:  # from one comma to another it stays JSON
        end = part.rfind(b",")
        begin, part = begin + comma, part[comma:end] if end > comma else part[comma : comma + 1]
    times = random.choice((1, 2, 10, 100, MOST_BYTES)) if part else 1
    made = one[:begin] + part * min(times, max(1, (MOST_BYTES - len(one)) // max(1, len(part)))) + one[begin:]
    return made[: len(made) // 2] + other[len(other) // 2 :] if random.random() < 0.1 else made
