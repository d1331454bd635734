"""Machines by name, described as a user would, of figures by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Described = dict[str, Any]


def d2l(workers: int, servers: int) -> list[Described]:
    """The founding text's two machines: four GPUs on a PCIe switch, and eight V100 with NVLink."""
    gpus = [f"gpu{i}" for i in range(1, 5)]
    pcie: Described = {
        "name": "d2l-4-gpus-pcie",
        "hosts": [{"name": "server", "devices": gpus, "cpu": "cpu", "cpuLanes": 24}],
        "switches": [{"name": "switch", "joins": gpus, "bandwidth": "pcie3-x16"}],
        "links": [{"between": ["cpu", "switch"], "bandwidth": "pcie3-lane", "lanes": 16}],
    }
    return [pcie, *dgx1(workers, servers)]


def dgx1(workers: int, servers: int) -> list[Described]:
    """Eight V100, six NVLinks each, in the text's numbers: a ring of double links and a ring of single ones."""
    gpus = [str(i) for i in range(1, 9)]
    links = [
        {"between": [str(one), str(other)], "bandwidth": "nvlink-lane", "lanes": lanes}
        for lanes, ring in ((2, DOUBLE_LINKS), (1, SINGLE_LINKS))
        for one, other in zip(ring, ring[1:] + ring[:1], strict=True)
    ]
    pcie = {"name": "pcie", "joins": [*gpus, "cpu"], "bandwidth": "pcie3-x16"}
    return [{"name": "8-v100-nvlink", "hosts": [{"name": "server", "devices": gpus, "cpu": "cpu"}], "switches": [pcie], "links": links}]


DOUBLE_LINKS = (1, 2, 3, 4, 5, 6, 7, 8)
SINGLE_LINKS = (1, 4, 6, 3, 5, 8, 2, 7)


def _ethernet(figure: str) -> Callable[[int, int], list[Described]]:
    def made(workers: int, servers: int) -> list[Described]:
        hosts = [f"w{i}" for i in range(workers)]
        shards = [f"ps{i}" for i in range(servers)]
        switch = {"name": "switch", "joins": [*hosts, *shards], "bandwidth": figure}
        return [{"name": f"{workers}-hosts-{figure}", "hosts": hosts, "servers": shards, "switches": [switch]}]

    return made


PRESETS: Mapping[str, Callable[[int, int], list[Described]]] = {
    "d2l": d2l,
    "dgx1": dgx1,
    "ethernet-1": _ethernet("ethernet-1"),
    "ethernet-10": _ethernet("ethernet-10"),
    "ethernet-100": _ethernet("ethernet-100"),
}
"""Each takes the number of worker hosts and of servers; the founding text's machines are as large as they are."""
