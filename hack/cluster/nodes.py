"""Real nodes: one set of namespaces each, in which containerd, kubelet and kube-proxy run; killing its first process ends all of it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from hack.cluster import cgroups, dns, images, network, nodefiles
from hack.cluster.api import Api
from hack.cluster.options import DNS_SERVICE, Options
from hack.cluster.paths import ClusterError, Unavailable, program
from hack.cluster.plane import Plane
from hack.cluster.proc import Keeper, wait_for

READY_LIMIT = 90.0
HIDDEN = ("/run", "/var/lib", "/var/log")


def check(options: Options) -> None:
    """Raise Unavailable for what this machine lacks, ClusterError for what was asked wrongly."""
    check_rights(options)
    lacking = [tool for tool in ("ip", "nft", "unshare", "nsenter", "mount") if shutil.which(tool) is None]
    if lacking:
        raise Unavailable(f"real nodes need the commands {', '.join(lacking)}; install them with: python -m hack.cluster deps")


def check_rights(options: Options) -> None:
    """As `check`, without the commands, which `deps` can install."""
    if not sys.platform.startswith("linux"):
        raise Unavailable(f"real nodes need Linux; this is {sys.platform}")
    if os.geteuid() != 0:
        raise Unavailable("real nodes need root (namespaces, mounts, cgroups); run as root, or use --nodes 0")
    for folder in HIDDEN:
        if options.state.is_relative_to(folder):
            raise ClusterError(f"--state {options.state}: a node hides {folder} behind its own; choose a folder elsewhere")


def start(options: Options, keeper: Keeper, plane: Plane) -> dict[int, int]:
    """Start DNS and every node; they are not Ready yet. The first process of each node, by its number."""
    dns.start(options, keeper, plane)
    pause = images.pause(options.state / "pause.tar")
    cgroups.create(options)
    for index in range(1, options.nodes + 1):
        folder = nodefiles.write(options, index, plane, pause)
        init = [sys.executable, str(Path(__file__).resolve().parent / "nodeinit.py"), str(folder / "node.json")]
        keeper.start(f"node{index}", ["unshare", "--mount", "--pid", "--net", "--kill-child", "--fork", "--mount-proc", *init])
    for index in range(1, options.nodes + 1):
        wait_for(f"node{index}'s namespaces", lambda at=index: first_process(options.state, at) is not None, 10, keeper.check)  # type: ignore[misc]
    connected: dict[int, int] = {}
    connect(options, connected)
    return connected


def connect(options: Options, connected: dict[int, int]) -> None:
    """Give its interface to each node whose first process is not the one in `connected`: it is new, or was reset."""
    for index in range(1, options.nodes + 1):
        first = first_process(options.state, index)
        if first is not None and first != connected.get(index):
            network.connect(options, index, first)
            connected[index] = first


def wait_ready(options: Options, keeper: Keeper, api: Api) -> None:
    """Wait until all nodes are Ready and the DNS Service answers through node 1's kube-proxy."""
    for index in range(1, options.nodes + 1):
        wait_for(f"node{index} to be Ready", lambda at=index: _is_ready(api, at), READY_LIMIT, keeper.check)  # type: ignore[misc]
    wait_for("the DNS Service to answer", lambda: _connects(DNS_SERVICE, 53), READY_LIMIT, keeper.check)


def process(state: Path, index: int, name: str) -> int:
    """The process id, on this machine, of a node's containerd, kubelet or kube-proxy. Raises ClusterError when it is not there."""
    first = first_process(state, index)
    for child in _children(first) if first else ():
        if Path(f"/proc/{child}/comm").read_text().strip() == name:
            return child
    raise ClusterError(f"node{index} of {state} runs no {name} now")


def component(state: Path, name: str) -> int:
    """The process id of a component of the cluster: `kube-apiserver`, `node1/kubelet`. Raises ClusterError when it is not there."""
    node, _, inner = name.partition("/")
    if inner:
        return process(state, int(node.removeprefix("node")), inner)
    file = state / "pids" / f"{name}.pid"
    if not file.exists():
        known = ", ".join(sorted(path.stem for path in (state / "pids").glob("*.pid"))) or "none"
        raise ClusterError(f"the cluster of {state} runs no {name}; running: {known}, and in a node: containerd, kubelet, kube-proxy")
    return int(file.read_text())


def load(state: Path, count: int, archive: Path) -> list[str]:
    """Import an image archive into every node, all at once; the names it brought. Raises ClusterError with containerd's words."""
    if not archive.is_file():
        raise ClusterError(f"{archive}: no such image archive")
    commands = [
        [str(program("ctr")), f"--address={state}/node{index}/containerd.sock", "--namespace=k8s.io", "images", "import", str(archive)]
        for index in range(1, count + 1)
    ]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for command in commands]
    for index, child in enumerate(running, 1):
        _, errors = child.communicate()
        if child.returncode != 0:
            raise ClusterError(f"node{index} did not take {archive.name}: {errors.strip()[-500:]}")
    return images.names(archive)


def allow_plain_registry(state: Path, count: int, address: str) -> None:
    """Let every node pull from the registry at `address` (HOST:PORT) without TLS; containerd reads this at each pull."""
    for index in range(1, count + 1):
        folder = state / f"node{index}" / "registries" / address
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts.toml").write_text(
            f'server = "http://{address}"\n\n[host."http://{address}"]\ncapabilities = ["pull", "resolve"]\n'
        )


def clean() -> None:
    """Remove what outlives the nodes' processes."""
    cgroups.remove()


def first_process(state: Path, index: int) -> int | None:
    """The node's first process: the only child of its unshare."""
    try:
        unshare = int((state / "pids" / f"node{index}.pid").read_text())
    except (FileNotFoundError, ValueError):
        return None
    return next(_children(unshare), None)


def _children(pid: int) -> Iterator[int]:
    try:
        words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return
    yield from map(int, words)


def _is_ready(api: Api, index: int) -> bool:
    if not api.ok(f"/api/v1/nodes/node{index}"):
        return False
    node = api.get(f"/api/v1/nodes/node{index}")
    ready = any(item["type"] == "Ready" and item["status"] == "True" for item in node["status"].get("conditions", []))
    return ready and not node["spec"].get("taints")


def _connects(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True
