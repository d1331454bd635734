"""The grid of devices that a described machine is."""

from __future__ import annotations

from psjob.planning.plan import Grid, Wire
from psjob_client.topology.estimate import Unfit, estimate
from psjob_client.topology.machine import Machine, Routes

SHARED = 0.75
"""An uplink is shared where all devices of a host together get less than this share of what they get one by one."""
PROBE_BYTES = 1e9


def grid_of(machine: Machine) -> Grid:
    """Raises ValueError where hosts have different numbers of devices, and NoWay where devices are not joined."""
    counts = {len(host.devices) for host in machine.hosts}
    if len(counts) > 1:
        told = " and ".join(str(count) for count in sorted(counts))
        raise ValueError(f"hosts: they have {told} devices; stages are planned for hosts of equally many, so leave the others out")
    each, homes = counts.pop(), [host.devices for host in machine.hosts]
    routes = Routes(machine)
    routes.check((*machine.devices, *machine.servers))
    near = [(one, other) for home in homes for one in home for other in home if one != other]
    far = [(one, other) for a in homes for b in homes if a is not b for one in a for other in b]
    inside, across = _slowest(routes, near), _slowest(routes, far)
    shared = False
    if far and each > 1:
        flows = list(zip(homes[0], homes[1], strict=True))
        shared = routes.pace(flows).bandwidth < SHARED * routes.pace(flows[:1]).bandwidth
    push_byte, push_latency = _updates(routes, inside or across)
    only = inside or across
    assert only is not None
    return Grid(len(homes), each, inside or only, across or only, shared, push_byte, push_latency, machine.devices)


def _slowest(routes: Routes, pairs: list[tuple[str, str]]) -> Wire | None:
    if not pairs:
        return None
    return Wire(min(routes.width(*pair) for pair in pairs), max(routes.way(*pair).latency for pair in pairs))


def _updates(routes: Routes, wire: Wire | None) -> tuple[float, float]:
    """By `ps` of plan-topology; on one host without servers by its CPU's link, else as fast as devices reach each other."""
    for strategy in ("ps", "ps-cpu"):
        try:
            one, two = (estimate(strategy, routes, size).seconds for size in (PROBE_BYTES, 2 * PROBE_BYTES))
        except Unfit:
            continue
        return (two - one) / PROBE_BYTES, max(0.0, 2 * one - two)
    assert wire is not None
    return 2 / wire.bandwidth, 2 * wire.latency
