"""Machines that the tests of the planner describe.

- What `nvidia-smi topo -m` has printed on some machines. Long rows of network cards are as they were published.
"""

from __future__ import annotations

import itertools
from typing import Any

from psjob_client.topology.machine import FIGURES, PRESETS, Machine, read_machine


def machine(raw: Any) -> Machine:
    found, problems = read_machine(raw, FIGURES)
    assert found is not None, [str(problem) for problem in problems]
    return found


def preset(name: str, workers: int = 4, servers: int = 0) -> list[Machine]:
    return [machine(raw) for raw in PRESETS[name](workers, servers)]


def problems(raw: Any) -> list[str]:
    found, told = read_machine(raw)
    assert (found is None) is bool(told)
    return [str(problem) for problem in told]


def switched(n: int, rate: object = "1GB/s", latency: object = "50us", **more: Any) -> dict[str, Any]:
    """n hosts of a device each on one switch."""
    hosts = [f"w{i}" for i in range(n)]
    joins = [*hosts, *more.get("servers", [])]
    return {"name": "switched", "hosts": hosts, "switches": [{"name": "s", "joins": joins, "bandwidth": rate, "latency": latency}], **more}


def meshed(n: int, rate: float = 1e9, latency: float = 50e-6, **slow: float) -> dict[str, Any]:
    """n hosts with a link between each pair; `w0w1=1e6` gives one of them its own rate."""
    pairs = list(itertools.combinations([f"w{i}" for i in range(n)], 2))
    links = [{"between": [one, other], "bandwidth": slow.get(one + other, rate), "latency": latency} for one, other in pairs]
    return {"name": "meshed", "hosts": [f"w{i}" for i in range(n)], "links": links}


def two_hosts(uplink: object = "1Gb/s", **more: Any) -> dict[str, Any]:
    """Four devices in each of two hosts, on a PCIe switch; the hosts are joined by `uplink`."""
    hosts = {"a": [f"a{i}" for i in range(4)], "b": [f"b{i}" for i in range(4)]}
    return {
        "name": "two-hosts",
        "hosts": [{"name": name, "devices": devices} for name, devices in hosts.items()],
        "switches": [{"name": f"p{name}", "joins": devices, "bandwidth": "16GB/s", "latency": "5us"} for name, devices in hosts.items()],
        "links": [{"between": ["pa", "pb"], "bandwidth": uplink, "latency": "50us"}],
        **more,
    }


# One H100 in a virtual machine, driver 580: the first line is underlined. Recorded there.
ONE_H100 = "\t\x1b[4mGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\nGPU0\t X \t0-15\t0\t\tN/A\n\nLegend:\n\n  X    = Self\n"
# github.com/noonghunna/club-3090/issues/1229
TWO_5090 = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \tPHB\t0-63\t0\t\tN/A\nGPU1\tPHB\t X \t0-63\t0\t\tN/A\n"
# github.com/NVIDIA/nccl/issues/1617
FOUR_H100 = """\
        GPU0    GPU1    GPU2    GPU3    NIC0    NIC1    NIC2    NIC3    CPU Affinity    NUMA Affinity   GPU NUMA ID
GPU0     X      NV6     NV6     NV6     PIX     SYS     SYS     SYS     6,14,22,30      3               N/A
GPU1    NV6      X      NV6     NV6     SYS     PIX     SYS     SYS     4,12,20,28      1               N/A
GPU2    NV6     NV6      X      NV6     SYS     SYS     PIX     SYS     7,15,23,31      7               N/A
GPU3    NV6     NV6     NV6      X      SYS     SYS     SYS     PIX     5,13,21,29      5               N/A
NIC0    PIX     SYS     SYS     SYS      X      SYS     SYS     SYS
NIC1    SYS     PIX     SYS     SYS     SYS      X      SYS     SYS
NIC2    SYS     SYS     PIX     SYS     SYS     SYS      X      SYS
NIC3    SYS     SYS     SYS     PIX     SYS     SYS     SYS      X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
"""
# github.com/NVIDIA/k8s-test-infra/issues/371
FOUR_GB200 = """\
        GPU0    GPU1    GPU2    GPU3    CPU Affinity    NUMA Affinity   GPU NUMA ID
GPU0     X      NV18    NV18    NV18    0-71    0               N/A
GPU1    NV18     X      NV18    NV18    0-71    0               N/A
GPU2    NV18    NV18     X      NV18    72-143  1               N/A
GPU3    NV18    NV18    NV18     X      72-143  1               N/A
"""
# github.com/kubernetes/kubernetes/issues/53497, the half of its machine that is shown whole
FOUR_PCIE = """\
        GPU0    GPU1    GPU2    GPU3    mlx4_0  CPU Affinity
GPU0     X      PIX     PHB     PHB     PHB     0-9,20-29
GPU1    PIX      X      PHB     PHB     PHB     0-9,20-29
GPU2    PHB     PHB      X      PIX     PHB     0-9,20-29
GPU3    PHB     PHB     PIX      X      PHB     0-9,20-29
"""
