"""The best plan for a model and a grid.

Fewer places to cut: neighbouring modules become one block where that costs least.

PipeDream's dynamic programme: cuts, replicas and hosts of the stages that take the least time and fit the memory.

D. Narayanan et al., *PipeDream: Generalized Pipeline Parallelism for DNN Training*, SOSP 2019 (arXiv 1806.03377 §3.3, §3.4). The best
pipeline of some modules on some machines is one last stage and the best pipeline of what is before it. Here it is one first stage and
the best pipeline behind it. How many micro-batches a stage holds depends on the devices behind it, so memory is then exact. The
paper's `optimizer_graph_hierarchical.py` has ⌈(n-(m+1))/m'⌉·(activations + weights).

Two levels: stages are made of groups. A group takes some hosts and lines up a pipeline on the devices of each. A stage of the group
has its replicas on all its hosts, so what passes inside a group stays inside hosts. That is PipeDream's hierarchy for two levels.

FTPipe's mixed pipe: a device may run blocks of the model that are not neighbours, each a stage of its own.

S. Eliad et al., *Fine-tuning giant neural networks on commodity hardware with automatic pipeline model parallelism*, USENIX ATC 2021;
`partition_mixed_pipe_v2.py` of its repository. Coarsen the model to L blocks, 2P ≤ L ≤ 8P for P devices. Put the heaviest block on the
least loaded device that has the memory. Un-coarsen and refine, and take the best L. Here refinement is by formulas, and the
best straight pipeline is one more place to begin at. No stage has replicas.

The last choice is made by playing schedules: of the plans that the formulas like best, and of what is one step away from the winner.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from psjob.planning.plan import ModelWork, Plan, PlannedStage
from psjob.planning.predict import Case, Prediction, bound_of_plan, fits, memory, predict, way_fits


def block_bounds(work: ModelWork, most: int, seed: int = 0) -> list[int]:
    """The bounds of at most so many blocks, from 0 to the number of modules.

    The two neighbours that together take the least time become one, as often as needed. Another `seed` blurs those times by a fifth.
    """
    bounds = list(range(work.count + 1))

    def size(i: int) -> float:
        first, end = bounds[i - 1], bounds[i + 1]
        blur = 1 + 0.2 * noise(seed, first * work.count + end) if seed else 1.0
        return (work.forward(first, end) + work.backward(first, end)) * blur

    while len(bounds) - 1 > most:
        del bounds[min(range(1, len(bounds) - 1), key=size)]
    return bounds


def noise(seed: int, number: int) -> float:
    """A number from 0 to 1 that follows from these two, by the finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    mask = 2**64 - 1
    word = (seed * 0x9E3779B97F4A7C15 + number * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15) & mask
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & mask
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & mask
    return (word ^ (word >> 31)) / 2**64


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
        bounds = block_bounds(case.work, most if shape is None else max(most, 2 * len(shape)))
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
    bounds = block_bounds(case.work, FIRST_BLOCKS)

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
    stages: list[PlannedStage] = []
    host = used = group = 0
    for at, behind in itertools.pairwise(chain):
        if at.opens:
            host, used, group = host + group, 0, at.hosts
        devices = tuple((host + q % at.hosts) * case.grid.each + used + q // at.hosts for q in range(at.hosts * at.inner))
        stages.append(PlannedStage(at.first, behind.first, devices))
        used += at.inner
    return tuple(stages)


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
            cut = block_bounds(case.work, min(level * devices, case.work.count), TRIES * seed + attempt)
            homes = _refined(case, _best_fit(case, cut, devices), devices, cut)
            _keep(found, case, _refined(case, homes, devices))
    return sorted(found, key=lambda plan: found[plan])


def _keep(found: dict[Plan, float], case: Case, homes: Sequence[int]) -> None:
    plan = _plan(homes)
    if fits(case, plan):
        found[plan] = bound_of_plan(case, plan).seconds(case.way)


def _modules(plan: Plan) -> list[int]:
    """The device of each module."""
    return [stage.devices[0] for stage in plan for _ in range(stage.first, stage.end)]


def _plan(homes: Sequence[int]) -> Plan:
    """Neighbouring modules of one device are one stage."""
    firsts = [i for i, home in enumerate(homes) if i == 0 or homes[i - 1] != home]
    return tuple(PlannedStage(first, end, (homes[first],)) for first, end in zip(firsts, [*firsts[1:], len(homes)], strict=True))


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
    over = 0.0 if way_fits(case.way, len(plan)) else float(len(plan))
    if case.memory is not None:
        over += sum(max(0.0, size / case.memory - 1) for size in memory(case, plan).values())
    found = bound_of_plan(case, plan)
    return over, found.seconds(case.way), found.latency


FIRST_PLAYED, MOST_PLAYED = 40, 200
"""Plans that are played first, and next to the quickest."""


SOLVERS = ("pipedream", "mixed")


def solve(case: Case, solver: str = "pipedream", seed: int = 0, shape: Shape | None = None) -> Prediction | None:
    """The best plan that one of SOLVERS finds, or None where it finds none that fits.

    `shape`: the replicas of each stage, where they are given and only cuts are looked for; each host of the case has one device then.
    """
    if shape is not None:
        return quickest(case, partition(case, shape=shape), shape=shape)
    if solver == "mixed":
        return quickest(case, [*mixed_pipe(case, seed), *partition(case, replicated=False)], near=False)
    return quickest(case, partition(case))


def quickest(case: Case, plans: Sequence[Plan], *, near: bool = True, shape: Shape | None = None) -> Prediction | None:
    """The quickest of `plans` and, where `near`, of what lies near them; None where none fits.

    Stages that share a device have no neighbours.
    What is a step away from the quickest is played next, then what is a step away from the second, until so many were played.
    """
    played: dict[Plan, Prediction] = {}
    for plan in plans[:FIRST_PLAYED]:
        if fits(case, plan):
            played[plan] = predict(case, plan)
    order = sorted((one.step, number, one) for number, one in enumerate(played.values()))
    left = MOST_PLAYED if near else 0
    while order and left > 0:
        _, _, best = heapq.heappop(order)
        for plan in _near(best.plan, case):
            if left > 0 and shape in (None, tuple(stage.replicas for stage in plan)) and plan not in played and fits(case, plan):
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
                yield (
                    *plan[: k - 1],
                    PlannedStage(one.first, cut, one.devices),
                    PlannedStage(cut, other.end, other.devices),
                    *plan[k + 1 :],
                )
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
        stages.append(PlannedStage(first, end, tuple(range(at, at + many))))
        at += many
    return tuple(stages)
