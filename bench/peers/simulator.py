"""The simulator on one core: pushes a second of schedules only, by mode; of a fixed gradient; of digits-64's own gradients.

The best of several calls, by the core's time that this process had: it does nothing except compute, so that all else only adds to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import clock
import numpy as np

from psjob import rules
from psjob.modes import Async, LocalSGD, Mode
from psjob.simulate import digits64
from psjob.simulate.comparison import usual
from psjob.simulate.engine import WorkerSpeeds, simulate
from psjob.simulate.training import Digits, Fixed, SimulatedTraining
from psjob.simulate.words import label

WORKERS = 32
INNER = 50
LEAST = {"schedule": 200.0, "fixed": 20.0, "digits": 8.0}
"""Thousands a second."""


def main() -> None:
    clock.asked(__doc__)

    def row(what: str, least: float, pushes: int, once: Callable[[], object], note: str = "") -> dict[str, object]:
        found = pushes / min(spent(once) for _ in range(clock.ROUNDS)) / 1000
        return clock.row(what, found, "k/s", least=least, note=note)

    rows = []
    for mode in usual(WORKERS):
        rows.append(row(f"schedule, {label(mode)}", LEAST["schedule"], 40_000, lambda mode=mode: schedule(mode, 40_000)))
    local = LocalSGD(INNER)
    what = f"schedule, {label(local)}, in steps"
    rows.append(row(what, LEAST["schedule"], 4000 * INNER, lambda: schedule(local, 4000), f"{INNER} steps a push"))
    for rule in ("plain", "dana-zero"):
        rows.append(row(f"5,000 parameters, {rule}", LEAST["fixed"], 4000, lambda rule=rule: fixed(rule, 4000)))
    for rule in ("plain", "dana-zero"):
        rows.append(row(f"digits, {rule}", LEAST["digits"], 2640, lambda rule=rule: digits(rule)))
    clock.answer_rows(rows)


def spent(once: Callable[[], object]) -> float:
    """Seconds of a core that one call takes."""
    start = time.process_time()
    once()
    return time.process_time() - start


def schedule(mode: Mode, pushes: int) -> None:
    simulate(mode, WORKERS, WorkerSpeeds(), pushes)


def fixed(name: str, pushes: int) -> None:
    rule = rules.named(name)
    hyperparameters = {**rule.hyperparameters, "lr": 1e-4}
    simulate(Async(), WORKERS, WorkerSpeeds(), pushes, work=SimulatedTraining(Fixed(5000), rule, lambda batches: hyperparameters))


def digits(name: str) -> None:
    rule = rules.named(name)
    with np.errstate(all="ignore"):
        hyperparameters = digits64.rate_schedule(digits64.protocol_hyperparameters(rule, {}), WORKERS)
        simulate(Async(), WORKERS, WorkerSpeeds(), digits64.PUSHES, work=SimulatedTraining(Digits(), rule, hyperparameters))


if __name__ == "__main__":
    main()
