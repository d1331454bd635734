"""A failing plan made shorter while it breaks the same promise: fewer faults, workers, shards, steps, tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.simulation.protocol.plan import Plan
from tests.simulation.protocol.run import Outcome, run

TRIES = 150


def shrink(outcome: Outcome, told: Callable[[str], None] = lambda text: None) -> Outcome:
    """The smallest failing run that was found, with its trace."""
    best, tries = outcome, 0
    progress = True
    while progress and tries < TRIES:
        progress = False
        for smaller in _smaller(best.plan):
            tries += 1
            made = run(smaller)
            if made.broken == outcome.broken:
                best, progress = made, True
                told(f"still breaks ({made.broken}): {smaller.words()}")
                break
            if tries >= TRIES:
                break
    return run(best.plan, traced=True)


def _smaller(plan: Plan) -> Iterator[Plan]:
    for position in range(len(plan.faults)):
        yield replace(plan, faults=plan.faults[:position] + plan.faults[position + 1 :])
    if plan.workers > 2:
        yield replace(plan, workers=2, steps=plan.steps[:2])
        yield replace(plan, workers=plan.workers - 1, steps=plan.steps[:-1])
    if plan.shards > 2:
        yield replace(plan, shards=2)
        yield replace(plan, shards=plan.shards - 1)
    if plan.tables:
        yield replace(plan, tables=0)
    if plan.blocks > plan.shards:
        yield replace(plan, blocks=plan.shards)
    if max(plan.steps) > 4:
        yield replace(plan, steps=tuple(max(2, steps // 2) for steps in plan.steps))
    if len(set(plan.steps)) > 1:
        yield replace(plan, steps=(max(plan.steps),) * plan.workers)
    for position, fault in enumerate(plan.faults):
        if fault.seconds > 1.0:
            shorter = replace(fault, seconds=fault.seconds / 2)
            yield replace(plan, faults=(*plan.faults[:position], shorter, *plan.faults[position + 1 :]))
