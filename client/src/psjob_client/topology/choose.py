"""Picks a strategy for a machine and says why."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from psjob_client.topology.estimate import STRATEGIES, Estimate, Unfit, estimate
from psjob_client.topology.machine import Machine, Routes, show_rate, show_seconds

HYSTERESIS = 0.10
"""A strategy in use is left only where it takes more than a tenth longer than the best."""
TIE = 0.005
"""What takes so little longer takes as long."""
BAD = 0.5
"""A pair is bad whose link has less than this share of the median of its kind (inside hosts, or across)."""


@dataclass(frozen=True)
class Choice:
    """What was picked. `estimates` are in order of time, `unfit` says why the rest cannot run."""

    pick: Estimate
    estimates: tuple[Estimate, ...]
    unfit: Mapping[str, str]
    reason: str
    """Two sentences."""


def choose(machine: Machine, size: float, current: str | None = None) -> Choice:
    """The strategy of the least time for `size` bytes, or `current` while that takes at most HYSTERESIS longer.

    Raises NoWay, and ValueError where `current` cannot run.
    """
    routes = Routes(machine)
    routes.check((*machine.devices, *machine.servers))
    fit: list[Estimate] = []
    unfit: dict[str, str] = {}
    for strategy in STRATEGIES:
        try:
            fit.append(estimate(strategy, routes, size))
        except Unfit as why:
            unfit[strategy] = str(why)
    if current is not None and current in unfit:
        raise ValueError(f"{current} cannot run on {machine.name}: {unfit[current]}")
    least = min(given.seconds for given in fit)
    ranked = sorted(fit, key=lambda given: max(given.seconds, (1 + TIE) * least))  # stable: those that tie stay in order
    best = ranked[0]
    used = next((given for given in ranked if given.strategy == current), None)
    pick = used if used is not None and used.seconds <= (1 + HYSTERESIS) * least else best
    return Choice(pick, tuple(ranked), unfit, f"{_compared(pick, ranked, used)} {_because(pick, routes)}")


def _compared(pick: Estimate, ranked: list[Estimate], used: Estimate | None) -> str:
    others = [given for given in ranked if given is not pick]
    best = ranked[0]
    if used is not None and used is pick and pick is not best:
        more = 100 * (pick.seconds / best.seconds - 1)
        return (
            f"{pick.strategy} stays: {best.strategy} would take {show_seconds(best.seconds)} instead of {show_seconds(pick.seconds)}, "
            f"and {more:.0f} % are not more than the {100 * HYSTERESIS:.0f} % that a change must be worth."
        )
    text = f"{pick.strategy} takes {show_seconds(pick.seconds)}"
    if used is not None and used is not pick:
        text += f", {used.strategy} that is in use {used.seconds / pick.seconds:.2f} times as long"
    if others:
        runner = others[0]
        ratio = runner.seconds / pick.seconds
        text += f"; the runner-up {runner.strategy} takes {'as long' if ratio <= 1 + TIE else f'{ratio:.2f} times as long'}"
    return f"{text}."


_WHY = {
    "ps": "All links between workers and shards carry bytes at once, pushes one way and weights the other",
    "ps-split": "Every device sums one part, so that all ports work at once",
    "ring": "Each device passes 2(n-1)/n of the bytes to one neighbour, however many devices there are",
    "both-ways-ring": "Half of the bytes go each way around, so that both directions of every link work",
    "double-ring": "Rings that share no lane carry the bytes between them, so that no link idles",
    "tree": "A tree has the fewest messages one after the other, which counts where bytes are few",
    "pipelined-tree": "Chunks follow each other through a tree of few levels, so that both messages and bytes cost little",
    "double-tree": "Two mirrored trees share the chunks, so that leaves of one work as inner devices of the other",
    "hierarchical": "Only one sum a host crosses between hosts, whatever devices it has",
    "ps-one-device": "One device gathers everything, and nothing else is in its way",
    "ps-cpu": "The CPU's link is the widest of all",
}


def _because(pick: Estimate, routes: Routes) -> str:
    text = _WHY[pick.strategy]
    used = {frozenset(flow) for flow in pick.flows}
    avoided = [pair for pair in bad_pairs(routes) if frozenset(pair) not in used]
    if avoided:
        named = " and ".join(f"{one}:{other} ({show_rate(routes.width(one, other))})" for one, other in avoided[:3])
        text += f"; it goes round the slow {named}"
    return f"{text}."


def bad_pairs(routes: Routes) -> list[tuple[str, str]]:
    """Pairs of devices whose link is far below the median of its kind, slowest first."""
    home = {device: host.name for host in routes.machine.hosts for device in host.devices}
    devices = routes.machine.devices
    pairs = [(one, other) for i, one in enumerate(devices) for other in devices[i + 1 :]]
    found = []
    for kind in (True, False):
        widths = {pair: routes.width(*pair) for pair in pairs if (home[pair[0]] == home[pair[1]]) is kind}
        if widths:
            middle = statistics.median(widths.values())
            found += [(width, pair) for pair, width in widths.items() if width < BAD * middle]
    return [pair for _, pair in sorted(found)]
