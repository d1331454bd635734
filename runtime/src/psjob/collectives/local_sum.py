"""Which way the processes of one worker sum their gradients, from where these lie and what joins the devices. Pure.

`TopoMatrix` says how the GPUs of a machine are joined, from what `nvidia-smi topo -m` prints.

All ways make the same bits: a block is added in the order of the processes, then multiplied once by 1/n. They differ in what moves.

- shared: each process copies all of its gradients to shared memory, and the CPU adds.
- gloo, nccl: each process sends every other one the blocks that it owns (the bytes of a reduce-scatter). It adds what comes on its own
  device, and copies its part to shared memory.

For M bytes and n processes, host bandwidth H, additions of A bytes a second, and links that take t for the exchange:

- shared: M/H + (n-1)/n·M/A;
- nccl: t + (n-1)α + M/(nH).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

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


def parse_topology(text: str) -> TopoMatrix:
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


AUTO, SHARED, GLOO, NCCL = "auto", "shared", "gloo", "nccl"
CPU: Final = "cpu"
LANE_RATE: Final = 18e9
"""Bytes a second and direction of one NVLink (*Dive into Deep Learning* 13.7)."""
MOST_LANES: Final = 18
"""A GPU has at most so many NVLinks: more to all others together mean a switch, through which they share its own."""
FAR: Final = ("NODE", "SYS")
"""Ways that pass the CPU's interconnect. Copies between such GPUs go by host memory: twice over PCIe."""
MESSAGE: Final = 20e-6
"""Seconds before a message's first byte."""


@dataclass(frozen=True)
class Given:
    """What is known of a worker's processes.

    `devices`: by process `cpu`, or a name that no other GPU has. `matrix`: how GPUs are joined, None where that is not known; `numbers`: by
    process its GPU's number there. `host`: bytes a second from a device to host memory; `add`: bytes of one operand a second.
    """

    devices: Sequence[str]
    size: int
    matrix: TopoMatrix | None = None
    numbers: Sequence[int] = ()
    host: float = 12e9
    add: float = 4e9


@dataclass(frozen=True)
class LocalSum:
    """`way` is shared, gloo or nccl; `reason` a clause for the log."""

    way: str
    reason: str


def choose_sum(given: Given, asked: str = AUTO) -> LocalSum:
    """The way that takes the least time, or the one that is asked for. Raises ValueError with what that one cannot do."""
    shut = _cannot(given)
    if asked != AUTO:
        if asked == GLOO and set(given.devices) != {CPU}:
            raise ValueError("gloo sums in host memory, and the models are on GPUs; take nccl, shared or auto")
        if asked == NCCL and shut:
            raise ValueError(f"nccl cannot sum here: {shut}; take shared or auto")
        return LocalSum(asked, "the manifest asks for it")
    if shut:
        return LocalSum(SHARED, shut)
    shared, exchanged = shared_seconds(given), exchange_seconds(given)
    way, times = (NCCL, shared / exchanged) if exchanged < shared else (SHARED, exchanged / shared)
    return LocalSum(way, f"{_joined(given)}, {way} is {times:.1f} times as fast as {NCCL if way == SHARED else SHARED} by the model")


def shared_seconds(given: Given) -> float:
    """Of a sum in shared memory."""
    n = len(given.devices)
    return given.size / given.host + (n - 1) / n * given.size / given.add


def exchange_seconds(given: Given) -> float:
    """Of an exchange between GPUs; without a matrix each pair counts as far."""
    n = len(given.devices)
    part = given.size / n
    slowest = 0.0
    for one in range(n):
        others = [other for other in range(n) if other != one]
        lanes = {other: _lanes(given, one, other) for other in others}
        linked = [count for count in lanes.values() if count]
        if sum(linked) > MOST_LANES:
            nvlink = part * len(linked) / (max(linked) * LANE_RATE)
        else:
            nvlink = max((part / (count * LANE_RATE) for count in linked), default=0.0)
        pcie = sum(part * (2 if _far(given, one, other) else 1) / given.host for other in others if not lanes[other])
        slowest = max(slowest, nvlink, pcie)
    return slowest + (n - 1) * MESSAGE + part / given.host


def _cannot(given: Given) -> str:
    """Why only shared memory is left; empty: it is not."""
    if CPU in given.devices:
        return "models are in host memory, where a socket would copy each byte more often"
    if len(set(given.devices)) < len(given.devices):
        return "several processes share one GPU, which NCCL refuses"
    return ""


def _kind(given: Given, one: int, other: int) -> str:
    if given.matrix is None:
        return FAR[-1]
    return given.matrix.kinds[frozenset((given.numbers[one], given.numbers[other]))]


def _lanes(given: Given, one: int, other: int) -> int:
    return 0 if given.matrix is None else given.matrix.lanes(given.numbers[one], given.numbers[other])


def _far(given: Given, one: int, other: int) -> bool:
    return _kind(given, one, other) in FAR


def _joined(given: Given) -> str:
    if given.matrix is None:
        return "nvidia-smi does not say how the GPUs are joined, so the slowest way is assumed"
    n = len(given.devices)
    kinds = sorted({_kind(given, one, other) for one in range(n) for other in range(one)})
    return f"the GPUs are joined by {' and '.join(kinds)}"
