"""The last choice is made by playing schedules: of the plans that the formulas like best, and of what is one step away from the winner."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from psjob.planning import bounds
from psjob.planning.bounds import Case
from psjob.planning.mixed import mixed_pipe
from psjob.planning.partition import Shape, partition
from psjob.planning.plan import Plan, Stage
from psjob.planning.predict import Prediction, predict

FIRST_PLAYED, MOST_PLAYED = 40, 200
"""Plans that are played first, and next to the quickest."""


SOLVERS = ("pipedream", "mixed")


def solve(case: Case, solver: str = "pipedream", seed: int = 0, shape: Shape | None = None) -> Prediction | None:
    """The best plan that one of SOLVERS finds, or None where it finds none that fits.

    `shape`: the replicas of each stage, where they are given and only cuts are looked for; each host of the case has one device then.
    """
    if shape is not None:
        return choose(case, partition(case, shape=shape), shape=shape)
    if solver == "mixed":
        return choose(case, [*mixed_pipe(case, seed), *partition(case, replicated=False)], near=False)
    return choose(case, partition(case))


def choose(case: Case, plans: Sequence[Plan], *, near: bool = True, shape: Shape | None = None) -> Prediction | None:
    """The quickest of `plans` and, where `near`, of what lies near them; None where none fits.

    Stages that share a device have no neighbours.
    What is a step away from the quickest is played next, then what is a step away from the second, until so many were played.
    """
    played: dict[Plan, Prediction] = {}
    for plan in plans[:FIRST_PLAYED]:
        if bounds.fits(case, plan):
            played[plan] = predict(case, plan)
    order = sorted((one.step, number, one) for number, one in enumerate(played.values()))
    left = MOST_PLAYED if near else 0
    while order and left > 0:
        _, _, best = heapq.heappop(order)
        for plan in _near(best.plan, case):
            if left > 0 and shape in (None, tuple(stage.replicas for stage in plan)) and plan not in played and bounds.fits(case, plan):
                played[plan] = other = predict(case, plan)
                heapq.heappush(order, (other.step, len(played), other))
                left -= 1
    return min(played.values(), key=lambda one: one.step, default=None)


def _near(plan: Plan, case: Case) -> Iterator[Plan]:
    """One cut moved by a module, one replica given to another stage or to nobody before, two stages made one, one made two."""
    for k in range(1, len(plan)):
        one, other = plan[k - 1], plan[k]
        for cut in (other.first - 1, other.first + 1):
            if one.first < cut < other.end:
                yield (*plan[: k - 1], Stage(one.first, cut, one.devices), Stage(cut, other.end, other.devices), *plan[k + 1 :])
    shape = [(stage.first, stage.replicas) for stage in plan]
    spare = case.grid.count - sum(many for _, many in shape)
    for k, (first, many) in enumerate(shape):
        ends = plan[k].end
        for to in range(len(shape)):
            if to != k and many > 1:
                yield _laid(case, [(at, r + (i == to) - (i == k)) for i, (at, r) in enumerate(shape)])
        if spare:
            yield _laid(case, [(at, r + (i == k)) for i, (at, r) in enumerate(shape)])
        if k + 1 < len(shape):
            yield _laid(case, [*shape[:k], (first, many + shape[k + 1][1]), *shape[k + 2 :]])
        for cut in range(first + 1, ends):
            for mine in range(1, many) if many > 1 else [1] * (spare > 0):
                yield _laid(case, [*shape[:k], (first, mine), (cut, max(1, many - mine)), *shape[k + 1 :]])


def _laid(case: Case, shape: list[tuple[int, int]]) -> Plan:
    """Stages of these first modules and replicas, on devices in order."""
    ends = [first for first, _ in shape[1:]] + [case.work.count]
    at, stages = 0, []
    for (first, many), end in zip(shape, ends, strict=True):
        stages.append(Stage(first, end, tuple(range(at, at + many))))
        at += many
    return tuple(stages)
