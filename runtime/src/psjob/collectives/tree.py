"""Trees: chunks climb to the root and are added on the way; each goes down again as soon as it is whole.

Time of a tree of height h in c chunks: (2h + c - 1)(α + M/(cB)), where each link carries both ways at once. A rank of a binary tree has
at most three neighbours. h is ⌊log2 n⌋ for the binary tree and n-1 for the chain.
"""

from __future__ import annotations

from collections.abc import Sequence

from psjob.collectives.schedule import Move, Schedule, relabelled, shared_out


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
    steps: list[list[Move]] = [[] for _ in range(height * (up + down) + chunks - 1 if height else 0)]
    for rank, parent in enumerate(parents):
        if parent is None:
            continue
        for chunk in range(chunks):
            if up:
                steps[height - depths[rank] + chunk].append(Move(rank, parent, chunk, True))
            if down:
                steps[height * up + depths[parent] + chunk].append(Move(parent, rank, chunk, False))
    return Schedule(len(parents), (1,) * chunks, tuple(tuple(step) for step in steps))


def _depth(parents: Sequence[int | None], rank: int) -> int:
    parent = parents[rank]
    return 0 if parent is None else 1 + _depth(parents, parent)
