"""One seed: the world is run until the job is complete, a promise is broken, or nothing has come of it for too long."""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass, field

from tests.simulation.protocol.plan import Plan
from tests.simulation.protocol.promises import Broken
from tests.simulation.protocol.world import World

MOST_EVENTS = 2_000_000


@dataclass
class Outcome:
    """What became of a run. `broken` None: every promise held."""

    plan: Plan
    broken: str | None
    detail: str = ""
    seconds: float = 0.0
    events: int = 0
    pairs: set[tuple[str, str]] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    trace: list[str] = field(default_factory=list)


def run(plan: Plan, traced: bool = False) -> Outcome:
    """Run a plan to its end."""
    world = World(plan, traced)
    broken, detail = None, ""
    try:
        world.begin()
        kernel, planner, patience = world.kernel, world.planner, plan.patience

        def over() -> bool:
            late = kernel.now > world.quiet_at + patience or kernel.steps > MOST_EVENTS
            return late or planner.complete or planner.failed is not None

        kernel.run(over, 1e9)
        if planner.failed is not None:
            broken, detail = "the job failed", planner.failed
        elif not planner.complete:
            broken, detail = "the job hangs", f"not complete {plan.patience:.0f} s after the last fault; " + standing(world)
        else:
            world.promises.complete()
    except Broken as problem:
        broken, detail = problem.promise, str(problem)
    except Exception as error:
        broken, detail = type(error).__name__, traceback.format_exc(limit=-5)
    kernel = world.kernel
    return Outcome(plan, broken, detail, kernel.now, kernel.steps, world.pairs, world.promises.counts, kernel.traced or [])


def standing(world: World) -> str:
    """Where everybody stands."""
    told = [f"phase {world.phase}"]
    told += [f"{p.pod}: {p.standing()}" for p in (*world.shards.values(), *world.workers.values())]
    return "; ".join(told)
