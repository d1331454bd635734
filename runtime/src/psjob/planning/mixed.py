"""FTPipe's mixed pipe: a device may run blocks of the model that are not neighbours, each a stage of its own.

S. Eliad et al., *Fine-tuning giant neural networks on commodity hardware with automatic pipeline model parallelism*, USENIX ATC 2021;
`partition_mixed_pipe_v2.py` of its repository. Coarsen the model to L blocks, 2P ≤ L ≤ 8P for P devices. Put the heaviest block on the
least loaded device that has the memory. Un-coarsen and refine, and take the best L. Here refinement is by the formulas of `bounds`, and the
best straight pipeline is one more place to begin at. No stage has replicas.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from psjob.planning import bounds
from psjob.planning.bounds import Case
from psjob.planning.coarsen import blocks
from psjob.planning.partition import partition
from psjob.planning.plan import Plan, Stage

LEVELS = (2, 3, 4, 6, 8)
"""L over P."""
TRIES = 3
"""Coarsenings of each L, each with a seed of its own."""
MOST_SWAPPED = 24
"""Blocks up to which any two change devices; of more, those of neighbouring stages."""
MOST_TRIED = 800
"""Plans that one refinement looks at."""
MOST_DEVICES = 16


def mixed_pipe(case: Case, seed: int = 0) -> list[Plan]:
    """Plans that fit, the quickest by the formulas first; none where none was found. The same `seed` gives the same plans."""
    devices = min(case.grid.count, case.work.count, MOST_DEVICES)
    found: dict[Plan, float] = {}
    for plan in partition(case, replicated=False)[:TRIES]:
        _keep(found, case, _refined(case, _modules(plan), devices))
    for level in LEVELS:
        for attempt in range(TRIES):
            cut = blocks(case.work, min(level * devices, case.work.count), TRIES * seed + attempt)
            homes = _refined(case, _best_fit(case, cut, devices), devices, cut)
            _keep(found, case, _refined(case, homes, devices))
    return sorted(found, key=lambda plan: found[plan])


def _keep(found: dict[Plan, float], case: Case, homes: Sequence[int]) -> None:
    plan = _plan(homes)
    if bounds.fits(case, plan):
        found[plan] = bounds.bound(case, plan).seconds(case.way)


def _modules(plan: Plan) -> list[int]:
    """The device of each module."""
    return [stage.devices[0] for stage in plan for _ in range(stage.first, stage.end)]


def _plan(homes: Sequence[int]) -> Plan:
    """Neighbouring modules of one device are one stage."""
    firsts = [i for i, home in enumerate(homes) if i == 0 or homes[i - 1] != home]
    return tuple(Stage(first, end, (homes[first],)) for first, end in zip(firsts, [*firsts[1:], len(homes)], strict=True))


def _best_fit(case: Case, cut: Sequence[int], devices: int) -> list[int]:
    """The heaviest block onto the least loaded device that has the memory; onto the least loaded one where none has."""
    work, limit = case.work, case.memory if case.memory is not None else float("inf")
    load, used = [0.0] * devices, [0.0] * devices
    homes = [0] * work.count
    ranges = sorted(itertools.pairwise(cut), key=lambda pair: -case.seconds(*pair))
    for first, end in ranges:
        size = case.held(first, end, 1)
        roomy = [d for d in range(devices) if used[d] + size <= limit] or list(range(devices))
        home = min(roomy, key=lambda d: (load[d], d))
        load[home] += case.seconds(first, end)
        used[home] += size
        homes[first:end] = [home] * (end - first)
    return homes


def _refined(case: Case, homes: Sequence[int], devices: int, cut: Sequence[int] | None = None) -> list[int]:
    """`homes` after every move of a block and every swap of two that makes it better; blocks are modules where no `cut` is given."""
    edges = list(cut) if cut is not None else list(range(case.work.count + 1))
    ranges = list(itertools.pairwise(edges))
    best, score = list(homes), _score(case, homes)
    tried, better = 0, True
    while better and tried < MOST_TRIED:
        better = False
        for other in _moves(best, ranges, devices):
            tried += 1
            now = _score(case, other)
            if now < score:
                best, score, better = other, now, True
            if tried >= MOST_TRIED:
                break
    return best


def _moves(homes: list[int], ranges: Sequence[tuple[int, int]], devices: int) -> Iterator[list[int]]:
    def put(*moves: tuple[tuple[int, int], int]) -> list[int]:
        made = list(homes)
        for (first, end), home in moves:
            made[first:end] = [home] * (end - first)
        return made

    for block in ranges:
        for device in range(devices):
            if device != homes[block[0]]:
                yield put((block, device))
    near = len(ranges) if len(ranges) <= MOST_SWAPPED else 2
    for i, one in enumerate(ranges):
        for other in ranges[i + 1 : i + 1 + near]:
            if homes[one[0]] != homes[other[0]]:
                yield put((one, homes[other[0]]), (other, homes[one[0]]))
    for i in range(len(ranges)):  # a whole run of blocks
        for j in range(i + 2, min(len(ranges), i + 8) + 1):
            for device in range(devices):
                if any(homes[first] != device for first, _ in ranges[i:j]):
                    yield put(((ranges[i][0], ranges[j - 1][1]), device))


def _score(case: Case, homes: Sequence[int]) -> tuple[float, float, float]:
    """Stages or bytes too many, then seconds, then latency."""
    plan = _plan(homes)
    over = 0.0 if bounds.way_fits(case.way, len(plan)) else float(len(plan))
    if case.memory is not None:
        over += sum(max(0.0, size / case.memory - 1) for size in bounds.memory(case, plan).values())
    found = bounds.bound(case, plan)
    return over, found.seconds(case.way), found.latency
