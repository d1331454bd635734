"""Machines that the tests of the planner describe."""

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
