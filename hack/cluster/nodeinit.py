"""The first process of a node, inside its namespaces: mounts, network, then the three components, again when they end.

It is run by path, not as a part of the package, and needs the standard library alone.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

COMPONENTS = ("containerd", "kubelet", "kube-proxy")


def main(file: str) -> None:
    """Prepare the node that `file` describes and keep its components running until this process is killed."""
    node: dict[str, Any] = json.loads(Path(file).read_text())
    signal.signal(signal.SIGTERM, _end)  # the kernel protects a first process from signals it does not handle
    _mounts(node)
    _network(node)
    environment = {**os.environ, "PATH": f"{node['path']}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    running = {_start("containerd", node, environment): "containerd"}
    _import_pause(node)
    for name in COMPONENTS[1:]:
        running[_start(name, node, environment)] = name
    _keep(running, node, environment)


def _mounts(node: dict[str, Any]) -> None:
    for target in node["tmpfs"]:
        _run("mount", "-t", "tmpfs", "tmpfs", target)
    for folder in ("/run/lock", "/run/netns", "/var/lib/cni", "/var/lib/kubelet", "/var/log/containers"):
        Path(folder).mkdir(parents=True, exist_ok=True)
    # Volumes mounted by the kubelet later must reach the containers that run already.
    _run("mount", "--bind", node["shared"], node["shared"])
    _run("mount", "--make-rshared", node["shared"])


def _network(node: dict[str, Any]) -> None:
    _until(lambda: "eth0" in (name for _, name in socket.if_nameindex()), "the host to give this node its interface")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1\n")
    for words in node["ip"]:
        _run("ip", *words.split())


def _import_pause(node: dict[str, Any]) -> None:
    _until(lambda: Path(node["socket"]).exists(), "containerd's socket")
    deadline = time.monotonic() + 30
    while subprocess.run(node["import"], capture_output=True).returncode != 0:
        if time.monotonic() > deadline:
            sys.exit("containerd did not take the pause image within 30 s; see containerd.log")
        time.sleep(0.1)


def _keep(running: dict[int, str], node: dict[str, Any], environment: dict[str, str]) -> None:
    """Reap everything that is left to the first process of a PID namespace; start again what must run."""
    while True:
        pid, status = os.waitpid(-1, 0)
        name = running.pop(pid, None)
        if name is not None:
            print(f"{name} ended with {os.waitstatus_to_exitcode(status)}; starting it again", flush=True)
            time.sleep(0.5)
            running[_start(name, node, environment)] = name


def _start(name: str, node: dict[str, Any], environment: dict[str, str]) -> int:
    with (Path(node["folder"]).parent / "logs" / f"{Path(node['folder']).name}-{name}.log").open("ab") as log:
        child = subprocess.Popen(node[name], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd="/")
    child.returncode = 0  # _keep reaps it; Popen must not
    return child.pid


def _until(ready: Any, what: str) -> None:
    deadline = time.monotonic() + 30
    while not ready():
        if time.monotonic() > deadline:
            sys.exit(f"waited 30 s for {what}")
        time.sleep(0.02)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: {done.stderr.strip()}")


def _end(number: int, frame: object) -> None:
    os._exit(0)  # with the first process the kernel ends every other one of the namespace


if __name__ == "__main__":
    main(sys.argv[1])
