"""Picks a strategy for a machine and says why, by what each strategy takes on it.

An estimate is the flows that a strategy has side by side, their pace, and the cost model (costs.py) with that pace. B of a model is the
pace of one flow times the flows that the model thinks of as one port, so contention for shared links is in it. `widest_ring` is the ring
whose slowest link is fastest; `disjoint_rings` share no lane.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from psjob_client.topology import costs
from psjob_client.topology.machine import Flow, Machine, Pace, Routes, show_bytes, show_rate, show_seconds

HYSTERESIS = 0.10
"""A strategy in use is left only if it takes more than a tenth longer than the best."""
TIE = 0.005
"""What takes so little longer takes as long."""
BAD = 0.5
"""A pair is bad whose link has less than this share of the median of its kind (inside hosts, or across)."""
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
MOST_STEPS = 20_000
"""Of a search for one ring: exact for a handful of devices, the best found for more."""
MOST_RINGS = 8
"""That are looked for; a V100 has six lanes in all."""
Width = Callable[[int, int], float]
MOST_SWAPPED = 16
"""Devices up to which a tree has every root tried and its order improved by swaps; of more, so many roots."""


@dataclass(frozen=True)
class Choice:
    """What was picked. `estimates` are in order of time, `unfit` says why the rest cannot run."""

    pick: Estimate
    estimates: tuple[Estimate, ...]
    unfit: Mapping[str, str]
    reason: str
    """Two sentences."""


def choose_strategy(machine: Machine, size: float, current: str | None = None) -> Choice:
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


@dataclass(frozen=True)
class DeviceRing:
    """Devices by number, each once, and the lanes that each link of the ring has for it."""

    order: tuple[int, ...]
    lanes: int

    @property
    def edges(self) -> tuple[frozenset[int], ...]:
        """Its links, from the last device back to the first too."""
        return tuple(frozenset(pair) for pair in zip(self.order, self.order[1:] + self.order[:1], strict=True))


def widest_ring(n: int, width: Width) -> tuple[int, ...] | None:
    """All of n devices in the order whose narrowest neighbours are widest; None where no ring has a width above 0.

    `width(i, j)` is that of a pair. Among rings of one width, near devices (wide pairs, then low numbers) stand together.
    """
    table = [[width(i, j) if i != j else 0.0 for j in range(n)] for i in range(n)]
    widths = sorted({each for row in table for each in row if each > 0})
    found = None
    low, high = 0, len(widths)
    while low < high:
        middle = (low + high) // 2
        ring = _cycle(table, widths[middle])
        if ring is None:
            high = middle
        else:
            found, low = ring, middle + 1
    return found


def lane_disjoint_rings(n: int, lanes: Mapping[frozenset[int], int]) -> tuple[DeviceRing, ...]:
    """Rings of all n devices that share no lane, those of the most lanes first, until those that are left make none.

    `lanes` counts those between each pair. Eight V100 with 24 NVLinks give a ring of 2 lanes and one of 1: the payload is divided 2:1.
    Source: *Dive into Deep Learning*, "Parameter Servers", after Wang et al., *Blink*, 2018.
    """
    if n < 3:
        return ()  # out and back over one link is no ring
    left = dict(lanes)
    rings: list[DeviceRing] = []
    while len(rings) < MOST_RINGS and (order := widest_ring(n, lambda i, j: left.get(frozenset((i, j)), 0))) is not None:
        ring = DeviceRing(order, 0)
        ring = DeviceRing(order, min(left[edge] for edge in ring.edges))
        for edge in ring.edges:
            left[edge] -= ring.lanes
        rings.append(ring)
    return tuple(rings)


def _cycle(table: list[list[float]], least: float) -> tuple[int, ...] | None:
    """Any ring whose pairs all have `least` or more, found depth first."""
    near = [[j for _, j in sorted((-width, j) for j, width in enumerate(row) if width >= least)] for row in table]
    path, used, todo = [0], {0}, [iter(near[0])]
    for _ in range(MOST_STEPS):
        if len(path) == len(table) and table[path[-1]][0] >= least:
            return tuple(path)
        step = next((j for j in todo[-1] if j not in used), None)
        if step is not None:
            path.append(step)
            used.add(step)
            todo.append(iter(near[step]))
            continue
        todo.pop()
        used.discard(path.pop())
        if not path:
            return None
    return None


@dataclass(frozen=True)
class Estimate:
    """Seconds of one synchronisation of `size` bytes, and what they come from."""

    strategy: str
    seconds: float
    bandwidth: float
    """B of the formula, bytes a second."""
    latency: float
    """α of the formula, seconds."""
    formula: str
    order: tuple[str, ...]
    """Devices in the order that the strategy counts them; the first is the root of a tree or the one device."""
    flows: tuple[Flow, ...]
    """Pairs that exchange bytes."""
    note: str = ""


class Unfit(Exception):
    """A strategy that the machine cannot run; the message says why."""


def estimate(strategy: str, routes: Routes, size: float) -> Estimate:
    """Of one of STRATEGIES. Raises Unfit, and NoWay where devices are not joined."""
    return STRATEGIES[strategy](routes, size)


def _ps(routes: Routes, size: float) -> Estimate:
    machine, devices = routes.machine, routes.machine.devices
    n = len(devices)
    shards = machine.servers or (machine.cpus if len(machine.cpus) == len(machine.hosts) > 1 else ())
    if len(machine.hosts) == 1 and not shards:
        raise Unfit("one host and no servers: ps-cpu and ps-one-device are its parameter servers")
    if not shards:
        flows = _both([(i, j) for i in devices for j in devices if i != j])
        pace = routes.pace(flows)
        port = 2 * (n - 1) * pace.bandwidth
        seconds = costs.colocated_seconds(size, n, port, pace.latency)
        return Estimate("ps", seconds, port, pace.latency, "2(1-1/n)·M/B + 2(n-1)α", devices, flows, "a shard beside each worker")
    flows = _both([(device, shard) for device in devices for shard in shards])
    pace = routes.pace(flows)
    worker, shard = len(shards) * pace.bandwidth, n * pace.bandwidth
    seconds = costs.sharded_seconds(size, n, len(shards), worker, shard, pace.latency)
    where = "servers" if machine.servers else "hosts' CPUs"
    note = f"{len(shards)} shard{'s' if len(shards) > 1 else ''} on {where}, push and pull both at once"
    return Estimate("ps", seconds, worker, pace.latency, "max(M/B, mM/(nB')) + 2max(m,n)α", devices, flows, note)


def _ps_one_device(routes: Routes, size: float) -> Estimate:
    devices = routes.machine.devices
    n = len(devices)
    found = []
    for root in devices:
        flows = tuple((device, root) for device in devices if device != root)
        pace = routes.pace(flows)
        port = (n - 1) * pace.bandwidth
        order = (root, *(device for device in devices if device != root))
        seconds = costs.one_device_seconds(size, n, port, pace.latency)
        found.append(Estimate("ps-one-device", seconds, port, pace.latency, "2(n-1)(M/B + α)", order, flows, f"all to {root}"))
    return min(found, key=lambda given: given.seconds)


def _ps_cpu(routes: Routes, size: float) -> Estimate:
    machine = routes.machine
    if len(machine.hosts) > 1 or not machine.cpus:
        raise Unfit("it needs one host whose CPU is described")
    n = len(machine.devices)
    flows = tuple((device, machine.cpus[0]) for device in machine.devices)
    pace = routes.pace(flows)
    link = n * pace.bandwidth
    seconds = costs.one_cpu_seconds(size, n, link, pace.latency)
    return Estimate("ps-cpu", seconds, link, pace.latency, "2n(M/B + α)", machine.devices, flows, f"all to {machine.cpus[0]}")


def _ps_split(routes: Routes, size: float) -> Estimate:
    devices = routes.machine.devices
    n = len(devices)
    flows = tuple((i, j) for i in devices for j in devices if i != j)
    pace = routes.pace(flows)
    port = (n - 1) * pace.bandwidth
    return Estimate("ps-split", costs.split_seconds(size, n, port, pace.latency), port, pace.latency, "2(n-1)(M/(nB) + α)", devices, flows)


def _ring(routes: Routes, size: float) -> Estimate:
    order = _ring_order(routes)
    flows = _around(order)
    pace = routes.pace(flows)
    seconds = costs.ring_seconds(size, len(order), pace.bandwidth, pace.latency)
    return Estimate("ring", seconds, pace.bandwidth, pace.latency, "2(n-1)/n·M/B + 2(n-1)α", order, flows)


def _both_ways_ring(routes: Routes, size: float) -> Estimate:
    order = _ring_order(routes)
    flows = _both(_around(order))
    pace = routes.pace(flows)
    note = ""
    rings = _lane_rings(routes)
    if len(rings) > 1 and all(ring.full for ring in rings) and (many := _together(routes, rings, 2)).bandwidth > pace.bandwidth:
        pace, order, note = many, rings[0].order, f"{len(rings)} rings, each both ways"
        flows = _both([flow for ring in rings for flow in _around(ring.order)])
    seconds = costs.both_ways_ring_seconds(size, len(order), pace.bandwidth, pace.latency)
    return Estimate("both-ways-ring", seconds, pace.bandwidth, pace.latency, "(n-1)/n·M/B + 2(n-1)α", order, flows, note)


def _double_ring(routes: Routes, size: float) -> Estimate:
    rings = _lane_rings(routes)
    if len(rings) < 2:
        raise Unfit("direct links between devices make no two rings that share no lane")
    pace = _together(routes, rings, 1)
    whole = sum(ring.bandwidth for ring in rings)
    order = rings[0].order
    seconds = costs.double_ring_seconds(size, len(order), [pace.bandwidth * ring.bandwidth / whole for ring in rings], pace.latency)
    many = show_seconds(costs.ring_of_many(size, pace.bandwidth))
    payload = ":".join(f"{ring.bandwidth / min(ring.bandwidth for ring in rings):.3g}" for ring in rings)
    note = f"2M/B: {many}; payload {payload}; rings {' and '.join('-'.join(ring.order) for ring in rings)}"
    flows = tuple(flow for ring in rings for flow in _around(ring.order))
    return Estimate("double-ring", seconds, pace.bandwidth, pace.latency, "2(n-1)/n·M/ΣB + 2(n-1)α", order, flows, note)


def _tree(routes: Routes, size: float) -> Estimate:
    found = _best_order(routes, lambda order: _levels(routes, size, order))
    below = costs.tree_below(len(found.order), found.bandwidth, _ring(routes, size).bandwidth, found.latency)
    note = f"root {found.order[0]}" + (f"; quicker than a ring below {show_bytes(below)}" if 1 <= below < math.inf else "")
    return replace(found, note=note)


def _levels(routes: Routes, size: float, order: tuple[str, ...]) -> Estimate:
    edges = _climbing(order)
    levels = [edges[(1 << depth) - 2 : (1 << depth + 1) - 2] for depth in range(1, costs.tree_depth(len(order)) + 1)]
    paces = [routes.pace(level) for level in levels]
    # The formula has one B and one α for all levels: the means that give the sum over them.
    bandwidth = len(paces) / sum(1 / pace.bandwidth for pace in paces)
    latency = sum(pace.latency for pace in paces) / len(paces)
    return Estimate("tree", costs.tree_seconds(size, len(order), bandwidth, latency), bandwidth, latency, "2⌊log₂n⌋(M/B + α)", order, edges)


def _pipelined_tree(routes: Routes, size: float) -> Estimate:
    return _best_order(routes, lambda order: _pipelined(routes, size, order, "pipelined-tree", _both(_climbing(order))))


def _double_tree(routes: Routes, size: float) -> Estimate:
    def of(order: tuple[str, ...]) -> Estimate:
        return _pipelined(routes, size / 2, order, "double-tree", _both(_climbing(order) + _climbing(order[::-1])))

    return _best_order(routes, of)


def _pipelined(routes: Routes, size: float, order: tuple[str, ...], strategy: str, flows: tuple[Flow, ...]) -> Estimate:
    pace = routes.pace(flows)
    chunks = costs.best_chunks(size, len(order), pace.bandwidth, pace.latency)
    seconds = costs.pipelined_tree_seconds(size, len(order), pace.bandwidth, pace.latency, chunks=chunks)
    formula = f"(2⌊log₂n⌋+c-1)(M/({'2cB' if strategy == 'double-tree' else 'cB'}) + α)"
    return Estimate(strategy, seconds, pace.bandwidth, pace.latency, formula, order, flows, f"c = {chunks}, root {order[0]}")


def _hierarchical(routes: Routes, size: float) -> Estimate:
    machine = routes.machine
    groups = [host.devices for host in machine.hosts]
    hosts, near = len(groups), max(map(len, groups))
    if hosts < 2 or near < 2:
        raise Unfit("it needs two hosts, and a host with two devices")
    inside_flows = tuple(flow for group in groups for flow in _climbing(group))
    pace = routes.pace(inside_flows)
    inside = 2 * costs.tree_one_way(size, near, pace.bandwidth, pace.latency, chunks=hosts)
    leaders = tuple(group[0] for group in groups)
    if machine.servers:
        n = len(machine.servers)
        flows = _both([(leader, server) for leader in leaders for server in machine.servers])
        pace = routes.pace(flows)
        bandwidth = n * pace.bandwidth
        across = costs.sharded_seconds(size, hosts, n, bandwidth, hosts * pace.bandwidth, pace.latency)
    else:
        flows = _around(_ring_order(routes, leaders))
        pace = routes.pace(flows)
        bandwidth = pace.bandwidth
        across = costs.ring_seconds(size, hosts, bandwidth, pace.latency)
    hidden = show_seconds(costs.levels(inside, across, overlapped=True))
    note = f"{show_seconds(inside)} inside + {show_seconds(across)} across; {hidden} where they overlap"
    formula = f"trees inside + {'ps' if machine.servers else 'ring'} across"
    seconds = costs.levels(inside, across)
    return Estimate("hierarchical", seconds, bandwidth, pace.latency, formula, machine.devices, inside_flows + flows, note)


STRATEGIES: Final[Mapping[str, Callable[[Routes, float], Estimate]]] = {
    "ps": _ps,
    "ps-split": _ps_split,
    "ring": _ring,
    "both-ways-ring": _both_ways_ring,
    "double-ring": _double_ring,
    "tree": _tree,
    "pipelined-tree": _pipelined_tree,
    "double-tree": _double_tree,
    "hierarchical": _hierarchical,
    "ps-one-device": _ps_one_device,
    "ps-cpu": _ps_cpu,
}
"""By name; of two that take the same time the earlier one is taken."""


def _both(flows: Sequence[Flow]) -> tuple[Flow, ...]:
    return (*flows, *((target, source) for source, target in flows))


def _around(order: Sequence[str]) -> tuple[Flow, ...]:
    return tuple(zip(order, (*order[1:], order[0]), strict=True))


def _climbing(order: Sequence[str]) -> tuple[Flow, ...]:
    """Each to its parent in the binary tree, in the order of the tree's levels."""
    return tuple((order[i], order[(i - 1) // 2]) for i in range(1, len(order)))


def _ring_order(routes: Routes, devices: tuple[str, ...] | None = None) -> tuple[str, ...]:
    devices = devices or routes.machine.devices
    found = widest_ring(len(devices), lambda i, j: routes.width(devices[i], devices[j]))
    return devices if found is None else tuple(devices[i] for i in found)


def _best_order(routes: Routes, of: Callable[[tuple[str, ...]], Estimate]) -> Estimate:
    """The least over the devices as described and as in the widest ring, from several roots, and, of a few devices, what swaps better."""
    bases = dict.fromkeys((routes.machine.devices, _ring_order(routes)))
    n = len(routes.machine.devices)
    roots = range(0, n, -(-n // MOST_SWAPPED))
    best = min((of(base[i:] + base[:i]) for base in bases for i in roots), key=lambda given: given.seconds)
    swaps = list(itertools.combinations(range(n), 2)) if n <= MOST_SWAPPED else []
    while swaps:
        other = min((of(_swapped(best.order, *swap)) for swap in swaps), key=lambda given: given.seconds)
        if other.seconds >= best.seconds * 0.999:
            break
        best = other
    return best


def _swapped(order: tuple[str, ...], i: int, j: int) -> tuple[str, ...]:
    new = list(order)
    new[i], new[j] = new[j], new[i]
    return tuple(new)


@dataclass(frozen=True)
class _LaneRing:
    """One of the rings that share no lane: bytes a second each way, and the longest latency of its links."""

    order: tuple[str, ...]
    bandwidth: float
    latency: float
    full: bool


def _lane_rings(routes: Routes) -> tuple[_LaneRing, ...]:
    devices = routes.machine.devices
    number = {device: i for i, device in enumerate(devices)}
    direct = {frozenset(link.between): link for link in routes.machine.links if all(end in number for end in link.between)}
    lanes = {frozenset(number[end] for end in pair): link.lanes for pair, link in direct.items()}
    found = []
    for ring in lane_disjoint_rings(len(devices), lanes):
        order = tuple(devices[i] for i in ring.order)
        links = [link for flow in _around(order) if (link := routes.direct(*flow)) is not None]
        bandwidth = min(link.bandwidth for link in links) * ring.lanes
        found.append(_LaneRing(order, bandwidth, max(link.latency for link in links), all(link.duplex == "full" for link in links)))
    return tuple(found)


def _together(routes: Routes, rings: Sequence[_LaneRing], ways: int) -> Pace:
    """Of all rings at once, one way or both: the sum of their bandwidths, held to the machine's total."""
    bandwidth = sum(ring.bandwidth for ring in rings)
    if routes.machine.total is not None:
        bandwidth = min(bandwidth, routes.machine.total / (ways * len(rings[0].order)))
    return Pace(bandwidth, max(ring.latency for ring in rings))
