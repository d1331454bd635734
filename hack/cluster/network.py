"""The host's side of the nodes' network: one bridge, one veth a node, routes to pods and Services. Nothing else on the host changes."""

from __future__ import annotations

import fcntl
import subprocess
import tempfile
import time
from pathlib import Path
from typing import IO

from hack.cluster.options import BRIDGE, BRIDGE_ADDRESS, SERVICE_RANGE, Options
from hack.cluster.paths import ClusterError

LOCK = Path(tempfile.gettempdir()) / "psjob-nodes.lock"


def claim(seconds: float = 0.0) -> IO[str]:
    """Take the machine for a cluster with real nodes: Service and pod ranges are fixed, so there is one at a time.

    Whoever holds the returned file (or inherits it by fork) has the machine. Waits up to `seconds`, then raises ClusterError.
    """
    deadline = time.monotonic() + seconds
    handle = LOCK.open("w")
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError:
            if time.monotonic() >= deadline:
                handle.close()
                raise ClusterError(
                    "another cluster with real nodes runs on this machine, and there can be one at a time; "
                    "end it with `python -m hack.cluster down --state ITS_STATE`, or use --nodes 0"
                ) from None
            time.sleep(0.2)


def create() -> None:
    """Make the bridge, for who has claimed the machine; one that a killed cluster left is removed first."""
    remove()
    ip("link", "add", BRIDGE, "type", "bridge")
    ip("address", "add", f"{BRIDGE_ADDRESS}/24", "dev", BRIDGE)
    ip("link", "set", BRIDGE, "up")


def connect(options: Options, index: int, pid: int) -> None:
    """Give node `index`, whose first process is `pid`, its interface eth0, and the host the way to its pods."""
    ours, theirs = f"psjobv{index}", f"psjobe{index}"
    if exists(ours):  # of the same node before it was reset
        subprocess.run(["ip", "link", "delete", ours], capture_output=True)  # it may go by itself meanwhile
    ip("link", "add", ours, "type", "veth", "peer", "name", theirs)
    ip("link", "set", ours, "master", BRIDGE, "up")
    ip("link", "set", theirs, "netns", str(pid), "name", "eth0")
    ip("route", "replace", options.pod_range(index), "via", options.node_address(index))
    if index == 1:  # its kube-proxy answers for every ClusterIP that the host asks for
        ip("route", "replace", SERVICE_RANGE, "via", options.node_address(1))


def remove() -> None:
    """Remove the bridge with its routes, and the veths: half-closed connections can keep a node's namespace for a minute."""
    for name in (*(f"psjobv{index}" for index in (1, 2)), BRIDGE):
        if exists(name):
            subprocess.run(["ip", "link", "delete", name], capture_output=True)  # it may go by itself between look and delete


def exists(name: str = BRIDGE) -> bool:
    return subprocess.run(["ip", "link", "show", name], capture_output=True).returncode == 0


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise ClusterError(f"ip {' '.join(arguments)} failed: {done.stderr.strip()}")
