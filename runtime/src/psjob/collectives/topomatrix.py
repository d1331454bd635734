"""How the GPUs of a machine are joined, from what `nvidia-smi topo -m` prints. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_STYLE = re.compile(r"\x1b\[[0-9;]*m")
"""The tool underlines its first line, wherever that goes."""
_GPU = re.compile(r"GPU(\d+)")
_KIND = re.compile(r"X|SYS|NODE|PHB|PXB|PIX|PSB|NV(\d+)")
LANE = "NV"


@dataclass(frozen=True)
class TopoMatrix:
    """`kinds` by pair of GPU numbers: `NV4` for four NVLinks, else the tool's word for the way over PCIe (PIX, PXB, PHB, NODE, SYS)."""

    gpus: tuple[int, ...]
    kinds: Mapping[frozenset[int], str]

    def lanes(self, one: int, other: int) -> int:
        """NVLinks between two GPUs."""
        kind = self.kinds[frozenset((one, other))]
        return int(kind[len(LANE) :]) if kind.startswith(LANE) else 0


def parse(text: str) -> TopoMatrix:
    """The matrix in `text`. Columns that are no GPU (network cards, affinities) are left out.

    Raises ValueError with the line that is not as expected.
    """
    lines = [_STYLE.sub("", line) for line in text.splitlines()]
    head = next((at for at, line in enumerate(lines) if _GPU.match(line.strip()) and not _KIND.fullmatch(_second(line))), None)
    if head is None:
        raise ValueError("nvidia-smi topo -m: there is no line with the names of GPUs")
    columns = [int(found[1]) for word in lines[head].split() if (found := _GPU.fullmatch(word))]
    kinds: dict[frozenset[int], str] = {}
    rows = []
    for line in lines[head + 1 :]:
        words = line.split()
        name = _GPU.fullmatch(words[0]) if words else None
        if name is None:
            continue
        row, cells = int(name[1]), words[1 : 1 + len(columns)]
        if len(cells) != len(columns) or not all(_KIND.fullmatch(cell) for cell in cells):
            raise ValueError(f"nvidia-smi topo -m: {line.strip()!r} does not say how GPU{row} is joined to each of {len(columns)} GPUs")
        rows.append(row)
        for column, cell in zip(columns, cells, strict=True):
            if (cell == "X") != (column == row):
                raise ValueError(f"nvidia-smi topo -m: GPU{row} and GPU{column} are joined by {cell}")
            if column != row and kinds.setdefault(frozenset((row, column)), cell) != cell:
                raise ValueError(f"nvidia-smi topo -m: GPU{row} and GPU{column} are joined by {cell} one way and by another the other way")
    if rows != columns:
        raise ValueError(f"nvidia-smi topo -m: {len(columns)} GPUs in its first line, {len(rows)} lines of GPUs")
    return TopoMatrix(tuple(columns), kinds)


def _second(line: str) -> str:
    return [*line.split(), "", ""][1]
