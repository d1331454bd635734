"""Gathers the facts of this machine: reads, asks, and decides nothing."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from psjob_client.doctor.findings import Disk, MachineFacts
from psjob_client.local.process import free_memory
from psjob_client.local.run_folder import RUNS_FOLDER

SMI_SECONDS, TORCH_SECONDS = 20.0, 60.0
ASK_TORCH = "import json, torch; print(json.dumps([torch.version.cuda, torch.cuda.is_available()]))"
CGROUP = Path("/sys/fs/cgroup")


def machine(folder: Path) -> MachineFacts:
    """This machine, for runs started in `folder`."""
    gpus, driver = _gpus()
    cuda, usable = _torch_on_gpu() if gpus else (None, None)
    return MachineFacts(
        python=(sys.version_info.major, sys.version_info.minor, sys.version_info.micro),
        client=version("psjob-client"),
        runtime=_version("psjob"),
        torch=_version("torch"),
        cores=_cores(),
        memory=_memory(),
        shm=_free(Path("/dev/shm")),
        files=_files(),
        ports=_ports(),
        loopback=_loopback(),
        runs=_disk(folder / RUNS_FOLDER),
        cache=_disk(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")),
        gpus=gpus,
        driver=driver,
        torch_cuda=cuda,
        cuda_usable=usable,
    )


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _cores() -> float:
    count = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    share = _numbers(CGROUP / "cpu.max")
    if not share:
        share = [*_numbers(CGROUP / "cpu" / "cpu.cfs_quota_us"), *_numbers(CGROUP / "cpu" / "cpu.cfs_period_us")]
    return min(count, share[0] / share[1]) if len(share) == 2 and share[0] > 0 and share[1] > 0 else count


def _memory() -> int | None:
    there = free_memory()
    free = [] if there is None else [there]
    for limit, used in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        most, now = _numbers(CGROUP / limit), _numbers(CGROUP / used)
        if most and now:
            free.append(max(0, int(most[0] - now[0])))
    return min(free, default=None)


def _numbers(path: Path) -> list[float]:
    """The numbers of a file of the kernel; empty where it is not there, or says `max`."""
    with contextlib.suppress(OSError, ValueError):
        return [float(word) for word in path.read_text().split()]
    return []


def _free(path: Path) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def _disk(path: Path) -> Disk:
    there = path.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    return Disk(str(there), _free(there), os.access(there, os.W_OK))


def _files() -> int | None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return None if hard == resource.RLIM_INFINITY else hard


def _ports() -> int | None:
    found = _numbers(Path("/proc/sys/net/ipv4/ip_local_port_range"))
    return int(found[1] - found[0] + 1) if len(found) == 2 else None


def _loopback() -> str:
    try:
        with socket.create_server(("127.0.0.1", 0)):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _gpus() -> tuple[tuple[str, ...], str | None]:
    """(name and memory of each, driver), as nvidia-smi tells them."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return (), None
    try:
        query = [smi, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=SMI_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), f"does not answer ({type(error).__name__})"
    rows = [[word.strip() for word in line.split(",")] for line in done.stdout.splitlines() if line.count(",") == 2]
    if done.returncode or not rows:
        return (), "does not answer"
    return tuple(f"{name} {memory}" for name, memory, _ in rows), rows[0][2]


def _torch_on_gpu() -> tuple[str | None, bool | None]:
    """(CUDA that torch is built for, whether it sees a GPU): asked in a process of its own, since the client never imports torch."""
    try:
        done = subprocess.run([sys.executable, "-c", ASK_TORCH], capture_output=True, text=True, timeout=TORCH_SECONDS, check=True)
        cuda, usable = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None, None
    return cuda, bool(usable)
