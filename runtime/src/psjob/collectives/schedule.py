"""A collective as data: the steps in which chunks of every rank's vector move between ranks, and sums of such schedules.

Times are for M bytes on links of B bytes a second and a latency of α:

- `ring`: each rank passes a chunk on and adds the one that comes, until every rank has one whole sum; then the sums go round.
  2(n-1)(α + M/(nB)) (Patarasuk and Yuan 2009).
- `double_ring`: two rings that share no link carry at once, in the proportion of what their links bear.
- `tree`, `double_tree`: chunks climb to the root and are added on the way; each goes down again as soon as it is whole. The
  time of a tree of height h in c chunks is (2h + c - 1)(α + M/(cB)). Each link carries both ways at once. A rank of a binary tree has
  at most three neighbours. h is ⌊log2 n⌋ for the binary tree and n-1 for the chain.
- `hierarchical`: nodes of several devices sum inside each node, then across the nodes' first devices, then back. Only one sum per node
  crosses between nodes. The time is that inside (twice a tree one way) and that across, added.
- `servers`: every rank is the parameter server of a share of the vector (Li et al. 2014). 2(α + M/(nB)) where each pair of n ranks has a
  link of its own. 2(n-1)(α + M/(nB)) where B is all that a rank can send, as many bytes as in a ring.

`schedule_of` makes one by the name with which a plan or a script asks for it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise, zip_longest

Link = tuple[int, int]
"""Sender and receiver."""


EIGHT_GPUS = ((0, 1, 2, 3, 4, 5, 6, 7), (0, 3, 5, 2, 4, 7, 1, 6))
"""The rings of a machine with eight V100 (d2l chapter 13.7; Blink, Wang et al. 2020): one on pairs of NVLinks, one on single ones."""
CHUNK_BYTES = 1 << 20
MOST_CHUNKS = 64
STRATEGIES = ("mirrored", "ring", "both-ways-ring", "double-ring", "tree", "pipelined-tree", "double-tree", "servers",
              "hierarchical", "hierarchical-servers")  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChunkTransfer:
    """`receiver` gets the sender's chunk: added to its own, or in the place of it."""

    sender: int
    receiver: int
    chunk: int
    add: bool


Step = tuple[ChunkTransfer, ...]


@dataclass(frozen=True, eq=False)
class Schedule:
    """What `ranks` processes do with a vector each, cut into chunks of these relative sizes.

    All moves of a step begin with what the step before left. No rank sends and receives one chunk in one step. What is added to one
    chunk in one step is added in the order of the moves, so that the bits of a sum follow only from the schedule.
    """

    ranks: int
    weights: tuple[int, ...]
    steps: tuple[Step, ...]

    def spans(self, numel: int) -> list[slice]:
        """Where each chunk lies in a vector of `numel` elements; a chunk of a short vector may be empty."""
        whole = sum(self.weights)
        edges = [numel * before // whole for before in accumulate(self.weights, initial=0)]
        return [slice(begin, end) for begin, end in pairwise(edges)]

    def link_elements(self, numel: int) -> Counter[Link]:
        """How many elements of a vector of `numel` pass each link."""
        sizes = [span.stop - span.start for span in self.spans(numel)]
        passed: Counter[Link] = Counter()
        for move in (move for step in self.steps for move in step if sizes[move.chunk]):
            passed[move.sender, move.receiver] += sizes[move.chunk]
        return passed


@lru_cache(maxsize=64)
def part_of_rank(schedule: Schedule, rank: int) -> tuple[Step, ...]:
    """The moves of each step that `rank` takes part in; steps without any are left out."""
    mine = (tuple(move for move in step if rank in (move.sender, move.receiver)) for step in schedule.steps)
    return tuple(step for step in mine if step)


def relabelled(schedule: Schedule, names: Sequence[int], ranks: int) -> Schedule:
    """The same among `ranks`, where `names[r]` does what rank r did."""
    steps = (tuple(ChunkTransfer(names[m.sender], names[m.receiver], m.chunk, m.add) for m in step) for step in schedule.steps)
    return Schedule(ranks, schedule.weights, tuple(steps))


def at_once(parts: Sequence[Schedule]) -> Schedule:
    """Schedules of different ranks on the same chunks, side by side."""
    return Schedule(parts[0].ranks, parts[0].weights, _zipped([part.steps for part in parts]))


def in_turn(parts: Sequence[Schedule]) -> Schedule:
    """Schedules on the same chunks, one after the other."""
    return Schedule(parts[0].ranks, parts[0].weights, tuple(step for part in parts for step in part.steps))


def shared_out(parts: Sequence[Schedule], payload: Sequence[int]) -> Schedule:
    """Schedules of the same ranks side by side, each with its own share of the vector, in the proportion of `payload`."""
    whole = math.lcm(*(sum(part.weights) for part in parts))
    weights: list[int] = []
    moved: list[tuple[Step, ...]] = []
    for part, share in zip(parts, payload, strict=True):
        first = len(weights)
        moved.append(tuple(tuple(ChunkTransfer(m.sender, m.receiver, first + m.chunk, m.add) for m in step) for step in part.steps))
        weights += [share * weight * whole // sum(part.weights) for weight in part.weights]
    return Schedule(parts[0].ranks, tuple(weights), _zipped(moved))


def _zipped(steps: Iterable[tuple[Step, ...]]) -> tuple[Step, ...]:
    return tuple(tuple(move for step in row for move in step) for row in zip_longest(*steps, fillvalue=()))


def ring(ranks: int, order: Sequence[int] | None = None) -> Schedule:
    """All-reduce around `order` (rank order if not given), in as many chunks as ranks."""
    reduce = [
        tuple(ChunkTransfer(r, (r + 1) % ranks, (r - turn) % ranks, True) for r in range(ranks))
        for turn in range(ranks - 1)
    ]  # fmt: skip
    spread = [
        tuple(ChunkTransfer(r, (r + 1) % ranks, (r + 1 - turn) % ranks, False) for r in range(ranks))
        for turn in range(ranks - 1)
    ]  # fmt: skip
    plain = Schedule(ranks, (1,) * ranks, tuple(reduce + spread))
    return plain if order is None else relabelled(plain, order, ranks)


def both_ways_ring(ranks: int) -> Schedule:
    """Half of the vector around each way: half the ring's time on links that carry both ways at once; two ranks gain nothing."""
    return shared_out([ring(ranks), ring(ranks, range(ranks)[::-1])], (1, 1))


def double_ring(ranks: int) -> Schedule:
    """All-reduce on two rings without a link in common, for 5 ranks or more.

    Eight ranks take the rings of the eight-GPU machine, 2:1; others two even rings of links that are all alike. Raises ValueError for
    fewer than 5, among which no two such rings exist.
    """
    first, second = disjoint_rings(ranks)
    return shared_out([ring(ranks, first), ring(ranks, second)], (2, 1) if ranks == 8 else (1, 1))


def disjoint_rings(ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two orders of all ranks; no two neighbours of one are neighbours in the other. Raises ValueError for fewer than 5 ranks."""
    if ranks < 5:
        raise ValueError(f"double-ring with {ranks} ranks: two rings without a common link need at least 5; take both-ways-ring")
    return EIGHT_GPUS if ranks == 8 else (_zigzag(ranks, 0), _zigzag(ranks, 1))


def _zigzag(ranks: int, turn: int) -> tuple[int, ...]:
    """Walecki's decomposition: 0, 1, -1, 2, -2, … on a circle of all ranks but the last, turned on by `turn`; the last one closes it."""
    circle = ranks - 1
    return (*(((step + 1) // 2 * (1 if step % 2 else -1) + turn) % circle for step in range(circle)), circle)


def tree(ranks: int, chunks: int = 1) -> Schedule:
    """All-reduce on a binary tree with rank 0 as its root."""
    return _climb(binary(ranks), chunks, up=True, down=True)


def double_tree(ranks: int, chunks: int = 1) -> Schedule:
    """Half of the vector on the binary tree and half on its mirror image, where leaves are inner nodes (Sanders, Speck and Träff 2009)."""
    return shared_out([tree(ranks, chunks), relabelled(tree(ranks, chunks), range(ranks)[::-1], ranks)], (1, 1))


def rank_order(ranks: int, chunks: int = 1) -> Schedule:
    """All-reduce along a chain: each sum is added from rank 0 to the last, left to right, as `mean_in_rank_order` adds it."""
    return _climb([*range(1, ranks), None], chunks, up=True, down=True)


def reduce_to_first(ranks: int, chunks: int = 1) -> Schedule:
    """The sum is rank 0's in the end; what the others hold is then of no use."""
    return _climb(binary(ranks), chunks, up=True, down=False)


def broadcast_from_first(ranks: int, chunks: int = 1) -> Schedule:
    """All have what rank 0 has."""
    return _climb(binary(ranks), chunks, up=False, down=True)


def binary(ranks: int) -> list[int | None]:
    """By rank its parent in the binary tree; None for the root, rank 0."""
    return [None, *((rank - 1) // 2 for rank in range(1, ranks))]


def _climb(parents: Sequence[int | None], chunks: int, up: bool, down: bool) -> Schedule:
    depths = [_depth(parents, rank) for rank in range(len(parents))]
    height = max(depths)
    steps: list[list[ChunkTransfer]] = [[] for _ in range(height * (up + down) + chunks - 1 if height else 0)]
    for rank, parent in enumerate(parents):
        if parent is None:
            continue
        for chunk in range(chunks):
            if up:
                steps[height - depths[rank] + chunk].append(ChunkTransfer(rank, parent, chunk, True))
            if down:
                steps[height * up + depths[parent] + chunk].append(ChunkTransfer(parent, rank, chunk, False))
    return Schedule(len(parents), (1,) * chunks, tuple(tuple(step) for step in steps))


def _depth(parents: Sequence[int | None], rank: int) -> int:
    parent = parents[rank]
    return 0 if parent is None else 1 + _depth(parents, parent)


def hierarchical(ranks: int, devices: int, across: Callable[[int], Schedule] = ring) -> Schedule:
    """All-reduce of `ranks` ranks, where ranks i·devices … i·devices + devices-1 are those of node i.

    A binary tree inside each node, a ring or servers across them; in as many chunks as nodes. Raises ValueError for an incomplete node.
    """
    if devices < 1 or ranks % devices:
        raise ValueError(f"hierarchical with {ranks} ranks, {devices} to a node: every node must have the same number")
    nodes = ranks // devices

    def inside(make: Callable[[int, int], Schedule]) -> Schedule:
        return at_once([relabelled(make(devices, nodes), range(node * devices, (node + 1) * devices), ranks) for node in range(nodes)])

    between = relabelled(across(nodes), range(0, ranks, devices), ranks)
    return in_turn([inside(reduce_to_first), between, inside(broadcast_from_first)])


def servers(ranks: int) -> Schedule:
    """All-reduce in as many chunks as ranks; rank r serves chunk r, and adds what comes in the order r-1, r-2, …"""
    pairs = [(r, (r + away) % ranks) for away in range(1, ranks) for r in range(ranks)]
    push = tuple(ChunkTransfer(worker, server, server, True) for worker, server in pairs)
    pull = tuple(ChunkTransfer(server, worker, server, False) for server, worker in pairs)
    return Schedule(ranks, (1,) * ranks, (push, pull) if pairs else ())


@lru_cache(maxsize=64)
def schedule_of(strategy: str, ranks: int, chunks: int = 1, devices: int = 1) -> Schedule:
    """The schedule of an all-reduce by name. `chunks`: of those that pipeline; `devices`: ranks of a node, for the hierarchical ones.

    Raises ValueError for an unknown name and for numbers that the strategy cannot do.
    """
    if ranks < 1 or chunks < 1:
        raise ValueError(f"{strategy} with {ranks} ranks and {chunks} chunks: at least 1 of each")
    makers = {
        "mirrored": lambda: rank_order(ranks, chunks),
        "ring": lambda: ring(ranks),
        "both-ways-ring": lambda: both_ways_ring(ranks),
        "double-ring": lambda: double_ring(ranks),
        "tree": lambda: tree(ranks),
        "pipelined-tree": lambda: tree(ranks, chunks),
        "double-tree": lambda: double_tree(ranks, chunks),
        "servers": lambda: servers(ranks),
        "hierarchical": lambda: hierarchical(ranks, devices),
        "hierarchical-servers": lambda: hierarchical(ranks, devices, servers),
    }
    return makers[known_strategy(strategy)]()


def known_strategy(strategy: str) -> str:
    """The name itself. Raises ValueError for one that is none."""
    if strategy not in STRATEGIES:
        raise ValueError(f"no strategy {strategy!r}; there are {', '.join(STRATEGIES)}")
    return strategy


Planner = Callable[[int], Schedule]
"""By the bytes of a vector, its schedule."""


def planner(strategy: str, ranks: int, devices: int = 1, order: Sequence[int] | None = None) -> Planner:
    """The schedules of a strategy in which `order[i]` does what rank i would. Raises ValueError as `schedule_of`, and for a wrong order."""
    if order is not None and sorted(order) != list(range(ranks)):
        raise ValueError(f"order {list(order)} is not one of the ranks 0 to {ranks - 1}, each once")

    @lru_cache(maxsize=64)
    def ordered(chunks: int) -> Schedule:
        plain = schedule_of(strategy, ranks, chunks, devices)
        return plain if order is None else relabelled(plain, order, ranks)

    ordered(1)  # or refuse it here
    return lambda nbytes: ordered(chunks_for(nbytes))


def chunks_for(nbytes: int) -> int:
    """Into how many chunks a pipeline cuts so many bytes: about a MiB each, 64 at most."""
    return max(1, min(MOST_CHUNKS, nbytes // CHUNK_BYTES))
