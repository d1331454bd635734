"""Which blocks a checkpoint names where they already lie, and which are written again. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

MAX_FILES: Final = 8
"""So many older files a shard's part of a manifest names at most: each is another that may be damaged."""


@dataclass(frozen=True)
class Lies:
    """A block of a checkpoint: its file, its bytes there, and the mark of what they were (the same object: the same bytes)."""

    file: str
    bytes: int
    content: object


@dataclass(frozen=True)
class Base:
    """What a shard has in one checkpoint: its blocks, and the size of each file they lie in."""

    blocks: Mapping[int, Lies]
    files: Mapping[str, int]


EMPTY: Final = Base({}, {})


def staying(base: Base, contents: Mapping[int, object]) -> frozenset[int]:
    """The blocks whose bytes are still those of `base`, and that the next checkpoint names there; all others are written.

    A file of which no more than half is still needed is given up, and so are the least needed ones beyond MAX_FILES. So a checkpoint
    names less than twice what it needs.
    """
    needed: dict[str, int] = {}
    same = {index: lies for index, lies in base.blocks.items() if index in contents and contents[index] is lies.content}
    for lies in same.values():
        needed[lies.file] = needed.get(lies.file, 0) + lies.bytes
    worth = sorted((file for file, size in needed.items() if 2 * size > base.files[file]), key=lambda file: -needed[file])
    named = frozenset(worth[:MAX_FILES])
    return frozenset(index for index, lies in same.items() if lies.file in named)
