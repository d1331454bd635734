"""The cost models: seconds until every device has the sum of all gradients, by the α-β model.

A message of b bytes keeps a port for α + b/B seconds, B in bytes a second and each direction (R. Thakur, R. Rabenseifner, W. Gropp,
*Optimization of Collective Communication Operations in MPICH*, 2005); adding numbers costs nothing. The founding text is *Dive into Deep
Learning*, "Parameter Servers"; it has α = 0. Every function takes M > 0 bytes of one gradient, n ≥ 2 devices, B > 0 and α ≥ 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

SMALLEST_CHUNK = 64 * 1024
"""Bytes: a pipeline is not cut finer, since a message's own work then costs more than its bytes."""


def one_device_seconds(size: float, n: int, bandwidth: float, latency: float = 0.0) -> float:
    """All gradients to one device and the sum back: 2(n-1)(α + M/B). The chapter's 30 + 30 ms. B: that device's port."""
    return 2 * (n - 1) * (latency + size / bandwidth)


def one_cpu_seconds(size: float, n: int, bandwidth: float, latency: float = 0.0) -> float:
    """All gradients to the CPU and the sum back: 2n(α + M/B). The chapter's 40 + 40 ms. B: the CPU's link, which all share."""
    return 2 * n * (latency + size / bandwidth)


def split_seconds(size: float, n: int, bandwidth: float, latency: float = 0.0) -> float:
    """Part i of n is summed on device i, all at once: 2(n-1)(α + M/(nB)). The chapter's 7.5 + 7.5 ms. B: each device's port."""
    return 2 * (n - 1) * (latency + size / (n * bandwidth))


def ring_seconds(size: float, n: int, bandwidth: float, latency: float = 0.0) -> float:
    """Reduce-scatter and all-gather around a ring: 2(n-1)/n·M/B + 2(n-1)α. B: the slowest link of the ring.

    P. Patarasu, X. Yuan, *Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations*, 2009. The bandwidth term hardly grows
    with n; the latency term does.
    """
    return 2 * (n - 1) * (latency + size / (n * bandwidth))


def ring_of_many(size: float, bandwidth: float) -> float:
    """What the bandwidth term of `ring` comes to for many devices: 2M/B. The chapter's "approximately 6 ms"."""
    return 2 * size / bandwidth


def both_ways_ring_seconds(size: float, n: int, bandwidth: float, latency: float = 0.0) -> float:
    """Half of the bytes each way around: (n-1)/n·M/B + 2(n-1)α. The chapter's first exercise. B: each direction, both at once."""
    return ring_seconds(size / 2, n, bandwidth, latency)


def double_ring_seconds(size: float, n: int, bandwidths: Sequence[float], latency: float = 0.0) -> float:
    """Rings that share no link, each with its share of the bytes in proportion to its bandwidth: one ring over the sum of them.

    The chapter's NVLink decomposition (after Wang et al., *Blink*, 2018): 36 and 18 GB/s, payload 2:1.
    """
    return ring_seconds(size, n, sum(bandwidths), latency)


def tree_seconds(size: float, n: int, bandwidth: float, latency: float = 0.0) -> float:
    """A binary tree up and down, the whole gradient at each of ⌊log₂ n⌋ levels: 2⌊log₂ n⌋(α + M/B). B: of each link to a child."""
    return 2 * tree_depth(n) * (latency + size / bandwidth)


def tree_below(n: int, tree_bandwidth: float, ring_bandwidth: float, latency: float) -> float:
    """The bytes below which `tree` is quicker than `ring`: α(n-1-d)/(d/B_tree - (n-1)/(n·B_ring)), d = ⌊log₂ n⌋; inf where it always is."""
    depth = tree_depth(n)
    steeper = depth / tree_bandwidth - (n - 1) / (n * ring_bandwidth)
    return latency * (n - 1 - depth) / steeper if steeper > 0 else math.inf


def tree_one_way(size: float, n: int, bandwidth: float, latency: float = 0.0, *, chunks: int = 1) -> float:
    """Up a binary tree to its root, or down from it, in c chunks one behind the other: (d + c - 1)(α + M/(cB)), d = ⌊log₂ n⌋."""
    return (tree_depth(n) + chunks - 1) * (latency + size / (chunks * bandwidth))


def pipelined_tree_seconds(
    size: float, n: int, bandwidth: float, latency: float = 0.0, *, chunks: int | None = None, ports: int = 3
) -> float:
    """A binary tree, c chunks one behind the other, sums still rising while the first ones come down: (2d + c - 1)(α + M/(cB))·k/p.

    d = ⌊log₂ n⌋ is the tree's depth. k/p is at least 1. A device with two children and a parent sends k = 3 chunks a step, and receives
    as many. With n of 3 or 4 k is 2, with n of 2 it is 1. `ports` is how many it can at once. `chunks=None` takes `best_chunks`.

    Source of two mirrored trees: Sanders, Speck, Träff, *Two-tree algorithms for full bandwidth broadcast, reduction and scan*, 2009.
    Each carries half of the bytes. Inner devices of one are leaves of the other, so a port holds 3 + 1 links: M/2 at B/4.
    """
    count = best_chunks(size, n, bandwidth, latency) if chunks is None else chunks
    crowd = max(1.0, tree_edges(n) / ports)
    return (2 * tree_depth(n) + count - 1) * (latency + size / (count * bandwidth)) * crowd


def tree_depth(n: int) -> int:
    """Of the binary tree in which device i has the children 2i+1 and 2i+2: ⌊log₂ n⌋."""
    return n.bit_length() - 1


def tree_edges(n: int) -> int:
    """Links of the busiest device of that tree."""
    return 1 if n == 2 else 2 if n <= 4 else 3


def best_chunks(size: float, n: int, bandwidth: float, latency: float) -> int:
    """The c that makes `pipelined_tree_seconds` least, √((2d-1)M/(αB)), in chunks of at least SMALLEST_CHUNK bytes."""
    most = max(1.0, size // SMALLEST_CHUNK)
    busy = latency * bandwidth
    return round(min(most, max(1.0, math.sqrt((2 * tree_depth(n) - 1) * size / busy)))) if busy > 0 else int(most)


def sharded_seconds(size: float, workers: int, shards: int, worker: float, shard: float, latency: float = 0.0) -> float:
    """A parameter server of its own machines: max(M/B_worker, m·M/(n·B_shard)) + 2·max(m, n)·α for m workers and n shards.

    Push and pull go both ways at once, block by block (Li et al., *Scaling Distributed Machine Learning with the Parameter Server*,
    2014; `python -m bench sharding` measures it).
    """
    return max(size / worker, workers * size / (shards * shard)) + 2 * max(workers, shards) * latency


def colocated_seconds(size: float, n: int, bandwidth: float, latency: float = 0.0) -> float:
    """A shard beside each of n workers: 2(1-1/n)·M/B + 2(n-1)·α, since 1/n of the keys is at home. B: each machine's port, each way."""
    return 2 * (n - 1) * (latency + size / (n * bandwidth))


def chain_seconds(size: float, n: int, bandwidth: float, latency: float = 0.0, *, chunks: int = 1) -> float:
    """Added from the first machine to the last and sent back, each of c chunks behind the one before: (2(n-1)+c-1)(M/(cB) + α)."""
    return (2 * (n - 1) + chunks - 1) * (latency + size / (chunks * bandwidth))


def levels(inside: float, across: float, *, overlapped: bool = False) -> float:
    """Two levels, such as a tree inside each host and a ring across: their sum, or the longer one where buckets overlap."""
    return max(inside, across) if overlapped else inside + across
