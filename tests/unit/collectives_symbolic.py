"""A schedule carried out on symbols: which sums, in which order, every rank holds in the end; and what a step asks of links and ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from psjob.collectives.schedule import Link, Schedule

Sum = int | frozenset["Sum"] | None
"""A rank's own contribution, two sums added (which of them first changes no bit), or nothing yet."""


def carried_out(schedule: Schedule, first: Callable[[int], Sum] = lambda rank: rank) -> list[list[Sum]]:
    """What each rank holds of each chunk in the end, if rank r begins with `first(r)`. AssertionError where one sends what it has not."""
    held = [[first(rank) for _ in schedule.weights] for rank in range(schedule.ranks)]
    for step in schedule.steps:
        before = [list(chunks) for chunks in held]
        for move in step:
            sent = before[move.sender][move.chunk]
            assert sent is not None, f"rank {move.sender} sends chunk {move.chunk}, of which it has nothing"
            own = held[move.receiver][move.chunk]
            assert not move.add or own != sent, f"rank {move.receiver} adds to chunk {move.chunk} what it has"
            held[move.receiver][move.chunk] = frozenset({own, sent}) if move.add else sent
    return held


def contributions(value: Sum) -> Counter[int]:
    """How often each rank's contribution is in a sum."""
    if value is None:
        return Counter()
    if isinstance(value, int):
        return Counter([value])
    return sum((contributions(part) for part in value), Counter())


def busiest(schedule: Schedule) -> tuple[int, int]:
    """The most sends or receives of a rank in a step, and the most moves on a link in a step."""
    ports, links = 0, 0
    for step in schedule.steps:
        ends = Counter((end, place) for move in step for place, end in enumerate((move.sender, move.receiver)))
        ports = max(ports, *ends.values())
        links = max(links, *Counter((move.sender, move.receiver) for move in step).values())
    return ports, links


def seconds(schedule: Schedule, nbytes: int, rate: Callable[[Link], float], latency: float) -> float:
    """How long the steps take where a step lasts as long as its slowest link, and a link carries its moves one after the other."""
    sizes = [span.stop - span.start for span in schedule.spans(nbytes)]
    whole = 0.0
    for step in schedule.steps:
        took: Counter[Link] = Counter()
        for move in step:
            took[move.sender, move.receiver] += latency + sizes[move.chunk] / rate((move.sender, move.receiver))  # type: ignore[assignment]
        whole += max(took.values())
    return whole
