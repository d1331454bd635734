"""Nodes of several devices: sum inside each node, then across the nodes' first devices, then back.

Only one sum a node crosses between nodes, whatever devices it has. Time: that inside (twice a tree one way) and that across, added."""

from __future__ import annotations

from collections.abc import Callable

from psjob.collectives.ring import ring
from psjob.collectives.schedule import Schedule, at_once, in_turn, relabelled
from psjob.collectives.tree import broadcast_from_first, reduce_to_first


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
