"""The host's side of the nodes' network: one bridge, one veth a node, routes to pods and Services. Nothing else on the host changes."""

from __future__ import annotations

import subprocess

from hack.cluster.options import BRIDGE, BRIDGE_ADDRESS, SERVICE_RANGE, Options
from hack.cluster.paths import ClusterError


def create(options: Options) -> None:
    """Make the bridge. Raises ClusterError when it exists: Service and pod ranges are fixed, so there is one such cluster a machine."""
    if exists():
        raise ClusterError(
            f"the bridge {BRIDGE} exists: another cluster with real nodes runs on this machine; "
            "end it with `python -m hack.cluster down --state ITS_STATE`, or remove a leftover with `ip link delete psjob0`"
        )
    ip("link", "add", BRIDGE, "type", "bridge")
    ip("address", "add", f"{BRIDGE_ADDRESS}/24", "dev", BRIDGE)
    ip("link", "set", BRIDGE, "up")


def connect(options: Options, index: int, pid: int) -> None:
    """Give node `index`, whose first process is `pid`, its interface eth0, and the host the way to its pods."""
    ours, theirs = f"psjobv{index}", f"psjobe{index}"
    ip("link", "add", ours, "type", "veth", "peer", "name", theirs)
    ip("link", "set", ours, "master", BRIDGE, "up")
    ip("link", "set", theirs, "netns", str(pid), "name", "eth0")
    ip("route", "replace", options.pod_range(index), "via", options.node_address(index))
    if index == 1:  # its kube-proxy answers for every ClusterIP that the host asks for
        ip("route", "replace", SERVICE_RANGE, "via", options.node_address(1))


def remove() -> None:
    """Remove the bridge and with it the routes; the veths went with the nodes' namespaces."""
    if exists():
        ip("link", "delete", BRIDGE)


def exists() -> bool:
    return subprocess.run(["ip", "link", "show", BRIDGE], capture_output=True).returncode == 0


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise ClusterError(f"ip {' '.join(arguments)} failed: {done.stderr.strip()}")
