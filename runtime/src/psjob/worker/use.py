"""In which order a forward pass uses the blocks, and which blocks each module must wait for. Pure.

A module that was seen to run waits for its own parameters. Another one may never run: its parent reads its weights, as attention
does with its output projection. Then the nearest module around it that runs waits for them. What no module waits for is waited
for before the step ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from psjob.layout.blocks import Layout


@dataclass(frozen=True)
class Tree:
    """`rows` of the table that each module holds itself, by the module's path; one module under two paths is there twice."""

    rows: Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Use:
    """`rank`: by block, 0 for the one that is used first. `waits`: by module path, the blocks it waits for. `at_once`: nobody does."""

    rank: tuple[int, ...]
    waits: Mapping[str, frozenset[int]]
    at_once: frozenset[int]


def learned(layout: Layout, tree: Tree, ran: Sequence[str]) -> Use:
    """`ran` are the paths of the modules that ran in one forward pass, in the order in which each began first."""
    waits: dict[str, set[int]] = {path: set() for path in ran}
    at_once: set[int] = set()
    for path, rows in tree.rows.items():
        blocks = {block.index for row in rows for block, _ in layout.pieces_of(row)}
        waiter = next((around for around in _around(path) if around in waits), None)
        (at_once if waiter is None else waits[waiter]).update(blocks)
    first: dict[int, int] = dict.fromkeys(at_once, -1)
    for position, path in enumerate(ran):
        for block in waits[path]:
            first.setdefault(block, position)
    order = sorted(range(len(layout.blocks)), key=lambda block: (first.get(block, len(ran)), block))
    rank = [0] * len(order)
    for position, block in enumerate(order):
        rank[block] = position
    return Use(tuple(rank), {path: frozenset(blocks) for path, blocks in waits.items()}, frozenset(at_once))


def nothing_learned(layout: Layout) -> Use:
    """Before the first forward pass: the layout's order, and everything is waited for at once."""
    blocks = range(len(layout.blocks))
    return Use(tuple(blocks), {}, frozenset(blocks))


def _around(path: str) -> list[str]:
    """The module itself, then those around it up to the root, whose path is empty."""
    found = [path]
    while path:
        path = path.rpartition(".")[0]
        found.append(path)
    return found
