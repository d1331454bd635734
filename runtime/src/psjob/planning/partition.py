"""PipeDream's dynamic programme: cuts, replicas and hosts of the stages that take the least time and fit the memory.

D. Narayanan et al., *PipeDream: Generalized Pipeline Parallelism for DNN Training*, SOSP 2019 (arXiv 1806.03377 §3.3, §3.4). The best
pipeline of some modules on some machines is one last stage and the best pipeline of what is before it. Here it is one first stage and
the best pipeline behind it. How many micro-batches a stage holds depends on the devices behind it, so memory is then exact. The
paper's `optimizer_graph_hierarchical.py` has ⌈(n-(m+1))/m'⌉·(activations + weights).

Two levels: stages are made of groups. A group takes some hosts and lines up a pipeline on the devices of each. A stage of the group
has its replicas on all its hosts, so what passes inside a group stays inside hosts. That is PipeDream's hierarchy for two levels.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from psjob.planning.bounds import Case, way_fits
from psjob.planning.coarsen import blocks
from psjob.planning.plan import Plan, Stage

MOST_LABELS = 24
"""Of the Pareto front of a state so many are kept, spread over it."""
FIRST_BLOCKS, MOST_BLOCKS = 12, 64
"""Places to cut that are looked at."""
MANY_DEVICES, FEWER_BLOCKS = 16, 32
"""On more devices there are fewer places, so that the answer is there in seconds."""


@dataclass(frozen=True, slots=True)
class Label:
    """The best of the modules [first, count) on some hosts, as far as these numbers say. `behind`: the stages after this one."""

    latency: float
    pace: float
    update: float
    stages: int
    first: int
    inner: int
    """Replicas on each host of the group."""
    hosts: int
    """Hosts of the group."""
    opens: bool
    """It is the first stage of its group."""
    behind: Label | None

    def seconds(self, case: Case) -> float:
        """As Bound.seconds."""
        return self.latency + self.pace + self.update if case.way.flushes else self.pace


Shape = tuple[int, ...]
"""Replicas of each stage."""
State = tuple[int, int, int]
"""Hosts of closed groups, hosts of the open group (0: none is open), devices that it uses on each of them."""


def partition(case: Case, *, replicated: bool = True, shape: Shape | None = None) -> list[Plan]:
    """Plans that no other one beats in latency, pace and update time at once, the quickest first; none where nothing fits.

    `replicated` False: every stage is one device. `shape`: plans have exactly these stages; every host of the case has one device.
    Of more than `most_blocks` modules the smallest neighbours are not cut apart.
    """
    found: list[tuple[float, Plan]] = []
    limit = float("inf")
    for most in (FIRST_BLOCKS, most_blocks(case.grid.count)):  # the first answer is a limit for the second
        bounds = blocks(case.work, most if shape is None else max(most, 2 * len(shape)))
        for each in range(case.grid.each, 0, -1):
            for label in _Programme(case, each, replicated, limit, bounds, shape).run():
                found.append((label.seconds(case), _placed(case, label)))
                limit = min(limit, found[-1][0])
        if len(bounds) > case.work.count:
            break
    plans = {plan: seconds for seconds, plan in found}
    return sorted(plans, key=lambda plan: plans[plan])


def least_memory(case: Case) -> float:
    """Bytes of a device with which some plan fits, within a twentieth; of at most FIRST_BLOCKS places to cut."""
    bounds = blocks(case.work, FIRST_BLOCKS)

    def fits(size: float) -> bool:
        sized = replace(case, memory=size)
        return any(_Programme(sized, each, True, float("inf"), bounds).run() for each in range(case.grid.each, 0, -1))

    most = 2 * case.held(0, case.work.count, case.way.in_flight(1, 1)) + 1
    least = most / 2**20
    while most > 1.05 * least:
        middle = (most * least) ** 0.5
        least, most = (least, middle) if fits(middle) else (middle, most)
    return most


def most_blocks(devices: int) -> int:
    """Places to cut that are looked at with so many devices."""
    return MOST_BLOCKS if devices <= MANY_DEVICES else FEWER_BLOCKS


class _Programme:
    """With `each` devices of every host; nothing that is known to take longer than `limit` is followed."""

    def __init__(self, case: Case, each: int, replicated: bool, limit: float, bounds: list[int], shape: Shape | None = None) -> None:
        self.case, self.each, self.replicated = case, each, replicated
        self.limit, self.bounds = limit, bounds
        self.next = None if shape is None else dict(zip(itertools.accumulate(reversed(shape), initial=0), reversed(shape), strict=False))
        """Where the shape is given: the replicas of the stage before so many devices."""
        self.counts = not way_fits(case.way, case.grid.count + 1)
        count = case.work.count
        self.fronts: list[dict[State, list[Label]]] = [{} for _ in range(count + 1)]

    def run(self) -> list[Label]:
        """Labels of the whole model."""
        case, count = self.case, self.case.work.count
        start = Label(0.0, 0.0, 0.0, 0, count, 0, 0, True, None)
        self.fronts[count][0, 0, 0] = [start]
        for i in range(len(self.bounds) - 2, -1, -1):
            first = self.bounds[i]
            for end in self.bounds[i + 1 :]:
                for state, labels in self.fronts[end].items():
                    for hosts, inner, after in self._choices(state):
                        if not (first == 0 and after[1]) and self._shaped(first, after):
                            self._extend(first, end, state, labels, hosts, inner, after)
            self.fronts[first] = {state: self._front(labels) for state, labels in self.fronts[first].items()}
        whole = [label for labels in self.fronts[0].values() for label in labels]
        return sorted(whole, key=lambda label: label.seconds(case))

    def _choices(self, state: State) -> Iterator[tuple[int, int, State]]:
        """Hosts and replicas on each of them for a stage before `state`, and the state then."""
        closed, opened, used = state
        if self.next is not None:
            if many := self.next.get(closed):
                yield many, 1, (closed + many, 0, 0)
            return
        hosts = (
            [opened]
            if opened
            else range(1, self.case.grid.hosts - closed + 1)
            if self.replicated
            else [1] * (closed < self.case.grid.hosts)
        )
        for many in hosts:
            for inner in range(1, self.each - used + 1) if self.replicated else [1]:
                full = used + inner == self.each
                yield many, inner, (closed + many, 0, 0) if full else (closed, many, used + inner)

    def _shaped(self, first: int, after: State) -> bool:
        """Where the shape is given: the first stage of it begins at the first module, and no other one does."""
        return self.next is None or (first == 0) == (after[0] not in self.next)

    def _extend(self, first: int, end: int, state: State, labels: list[Label], hosts: int, inner: int, after: State) -> None:
        case, work, way = self.case, self.case.work, self.case.way
        closed, opened, used = state
        replicas = hosts * inner
        behind = closed * self.each + hosts * (used + inner)
        flight = way.in_flight(behind, replicas)
        if case.memory is not None and case.held(first, end, flight) > case.memory:
            return
        seconds = case.seconds(first, end)
        pace = way.paced(seconds, replicas)
        wires = [(first, after[1] == 0)] if first else []
        wires += [(end, opened == 0)] if end < work.count else []
        loads = [0.0, 0.0]
        for cut, far in wires:
            loads[far] += work.crossing[cut] / case.wire(far).bandwidth
        for far in (False, True):
            if loads[far]:
                pace = max(pace, way.paced(loads[far], case.ports(hosts, replicas, far)))
        late = case.grid.update(work.weights(first, end)) / way.accumulate
        if not way.flushes:
            pace = max(pace, way.paced(late, replicas))
        passing = 2 * case.wire(opened == 0).seconds(work.crossing[end]) if end < work.count else 0.0
        rest = work.forward(0, first) + work.backward(0, first)
        ahead = self._ahead(rest, case.grid.count - behind)
        kept = self.fronts[first].setdefault(after, [])
        for label in labels:
            latency = label.latency + seconds + passing
            total = max(label.pace, pace, way.paced(latency, replicas * flight))
            update = max(label.update, late) if way.flushes else 0.0
            stages = label.stages + 1
            least = max(total, ahead)
            if (latency + rest + least + update if way.flushes else least) > self.limit * (1 + 1e-12):
                continue
            if self.counts and not way_fits(way, stages):
                continue
            kept.append(Label(latency, total, update, stages, first, inner, hosts, after[1] == 0, label))

    def _ahead(self, seconds: float, devices: int) -> float:
        """Way.paced cannot be less for stages that take so long and share so many devices."""
        if not seconds:
            return 0.0
        if devices < 1:
            return float("inf")
        if not self.case.way.flushes:
            return seconds / devices
        return seconds * max(0, self.case.way.microbatches - devices) / devices

    def _front(self, labels: list[Label]) -> list[Label]:
        """Those that no other one beats in every number."""
        front: list[Label] = []
        for label in sorted(labels, key=lambda one: (one.latency, one.pace, one.update, one.stages)):
            if not any(
                one.pace <= label.pace and one.update <= label.update and (not self.counts or one.stages <= label.stages) for one in front
            ):
                front.append(label)
        if len(front) > MOST_LABELS:
            best = sorted(front, key=lambda one: one.seconds(self.case))
            front = best[: MOST_LABELS // 2] + best[MOST_LABELS // 2 :: -(-len(best) // (MOST_LABELS // 2))]
        return front


def _placed(case: Case, label: Label) -> Plan:
    """Groups on hosts in order; replica q of a stage of h hosts on the q mod h-th of them, so that m mod r meets on one host."""
    chain = [label]
    while chain[-1].behind is not None:
        chain.append(chain[-1].behind)
    stages: list[Stage] = []
    host = used = group = 0
    for at, behind in itertools.pairwise(chain):
        if at.opens:
            host, used, group = host + group, 0, at.hosts
        devices = tuple((host + q % at.hosts) * case.grid.each + used + q // at.hosts for q in range(at.hosts * at.inner))
        stages.append(Stage(at.first, behind.first, devices))
        used += at.inner
    return tuple(stages)
