"""The planner's pick on three machines of slow links, against every strategy that runs there, between four processes.

A machine is the planner's own description. A message holds each link on its way for α + bytes/B, one after another whoever sends it: what
flows share is shared between processes too. The order of devices and the chunks are those of the planner's estimates.
"""

from __future__ import annotations

import argparse
import fcntl
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Callable
from typing import Any

import clock
import collectives
import torch.distributed as dist

from psjob.collectives.schedule import STRATEGIES, Schedule, relabelled, schedule_of
from psjob_client.topology import costs
from psjob_client.topology.choose import HYSTERESIS, Choice, Estimate, choose_strategy
from psjob_client.topology.machine import FIGURES, Machine, Routes, read_machine

NUMEL = 1 << 19
SIZE = 4.0 * NUMEL
HOSTS = ["w0", "w1", "w2", "w3"]
PAIRS = [[one, other] for i, one in enumerate(HOSTS) for other in HOSTS[i + 1 :]]
MACHINES: dict[str, dict[str, Any]] = {
    "one switch": {"hosts": HOSTS, "switches": [{"name": "s", "joins": HOSTS, "bandwidth": 10e6, "latency": 2e-3}]},
    "a slow uplink": {
        "hosts": [{"name": "a", "devices": HOSTS[:2]}, {"name": "b", "devices": HOSTS[2:]}],
        "switches": [{"name": f"p{i}", "joins": HOSTS[2 * i : 2 * i + 2], "bandwidth": 40e6, "latency": 2e-3} for i in (0, 1)],
        "links": [{"between": ["p0", "p1"], "bandwidth": 4e6, "latency": 2e-3}],
    },
    "one bad link": {
        "hosts": HOSTS,
        "links": [{"between": pair, "bandwidth": 10e6 if pair != ["w0", "w1"] else 0.5e6, "latency": 4e-3} for pair in PAIRS],
    },
}
RUNS = {"ps": "servers", "ps-split": "servers"}
"""What carries a strategy of the planner out, where it has another name; a shard beside each worker is a server of a share."""


def main() -> None:
    words = clock.asked(__doc__)
    if words.part:
        work(words)
        return
    rows = []
    for name in MACHINES:
        choice = chosen(name)
        given = runs(choice)
        (port,) = clock.free_ports(1)
        with tempfile.NamedTemporaryFile() as shared:
            parts = [clock.spawn(words, name, rank, port, PSJOB_BENCH_LINKS=shared.name) for rank in range(len(HOSTS))]
            found = clock.last_line(parts[0])
            for part in parts[1:]:
                part.communicate(timeout=60)
        took = {each.strategy: seconds for each, seconds in zip(given, found, strict=True)}
        least = min(took, key=lambda strategy: took[strategy])
        note = ", ".join(f"{each.strategy} {took[each.strategy]:.2f} s ({each.seconds:.2f})" for each in given)
        what = f"{name}: {choice.pick.strategy} over the fastest, {least}"
        rows.append(clock.row(what, took[choice.pick.strategy] / took[least], "times", 1 + HYSTERESIS, note=f"measured (planned): {note}"))
    clock.answer_rows(rows)


def machine(name: str) -> Machine:
    found, problems = read_machine({"name": name.replace(" ", "-"), **MACHINES[name]}, FIGURES)
    if found is None:
        raise RuntimeError("; ".join(map(str, problems)))
    return found


def chosen(name: str) -> Choice:
    return choose_strategy(machine(name), SIZE)


def runs(choice: Choice) -> list[Estimate]:
    """The estimates that something carries out; of two that run as one the first."""
    named: dict[str, Estimate] = {}
    for given in choice.estimates:
        name = RUNS.get(given.strategy, given.strategy)
        if name in STRATEGIES:
            named.setdefault(name, given)
    return list(named.values())


def planned(given: Estimate, devices: tuple[str, ...]) -> Schedule:
    """As the estimate has it: its order, and its chunks."""
    name, n = RUNS.get(given.strategy, given.strategy), len(devices)
    halves = 2 if given.strategy == "double-tree" else 1
    chunks = max(1, min(64, costs.best_chunks(SIZE / halves, n, given.bandwidth, given.latency)))
    plan = schedule_of(name, n, chunks, 2 if name == "hierarchical" else 1)
    return plan if name == "hierarchical" else relabelled(plan, [devices.index(device) for device in given.order], n)


def work(words: argparse.Namespace) -> None:
    collectives.join(words, len(HOSTS))
    choice, devices = chosen(words.part), machine(words.part).devices
    links = Held(dist.group.WORLD, Routes(machine(words.part)), devices, os.environ["PSJOB_BENCH_LINKS"])
    clock.answer([collectives.measure(planned(given, devices), NUMEL, links) for given in runs(choice)])
    dist.barrier()
    dist.destroy_process_group()


class Held(collectives.Links):
    """Links of a described machine, which all processes share: when each is free again stands in a file."""

    def __init__(self, group: Any, routes: Routes, devices: tuple[str, ...], path: str) -> None:
        super().__init__(group)
        self._routes, self._devices = routes, devices
        names = {key for one in devices for other in devices if one != other for key in routes.way(one, other).resources}
        self._places = {key: 8 * place for place, key in enumerate(sorted(names))}
        self._file = open(path, "r+b")  # noqa: SIM115 - open as long as the process
        self._file.truncate(8 * len(names))
        self._free = mmap.mmap(self._file.fileno(), 8 * len(names))

    def way(self, peer: int) -> Callable[[int], None]:
        way = self._routes.way(self._devices[self.rank], self._devices[peer])
        width = {key: self._routes.room(key) for key in way.resources}

        def passed(nbytes: int) -> None:
            done = 0.0
            with open(self._file.name, "r+b") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                now = time.monotonic()
                for key in way.resources:
                    (free,) = struct.unpack_from("d", self._free, self._places[key])
                    end = max(now, free) + way.latency + nbytes / width[key]
                    struct.pack_into("d", self._free, self._places[key], end)
                    done = max(done, end)
            time.sleep(max(0.0, done - time.monotonic()))

        return passed


if __name__ == "__main__":
    main()
