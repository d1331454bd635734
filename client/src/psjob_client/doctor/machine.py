"""Judges this machine, alone or with a job that is to run on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from psjob_client.doctor.findings import Finding, ok, problem, warning
from psjob_client.text import amount
from psjob_operator.api.spec import PSTrainingJob
from psjob_operator.api.template import TRAINED, container_of
from psjob_operator.contract import INSTALL

MIB, GIB = 1 << 20, 1 << 30
PYTHON = (3, 11)
PROCESS_BYTES = 350 * MIB
"""Memory of a process that has imported torch, before a model."""
LEAST_SHM = 64 * MIB
LEAST_FILES, OWN_FILES = 1024, 128
"""Open files: what a shell has as a rule; what a shard needs beside a stream for each worker."""
LEAST_DISK, LITTLE_DISK = 100 * MIB, 2 * GIB
PORTS_EACH = 2
"""Ports of a shard: for workers, and for its status."""
PROCESSES_A_CORE = 16


@dataclass(frozen=True)
class Disk:
    """One place that files go to."""

    path: str
    free: int | None
    """None: it cannot be asked."""
    writable: bool


@dataclass(frozen=True)
class MachineFacts:
    """What is known of this machine; None where it cannot be found out."""

    python: tuple[int, int, int]
    client: str
    runtime: str | None
    """Version of the distribution psjob beside this one."""
    torch: str | None
    cores: float
    """Those that this process may use: by affinity and by its cgroup."""
    memory: int | None
    """Bytes that are free for new processes, by the system and by its cgroup."""
    shm: int | None
    """Free bytes of /dev/shm."""
    files: int | None
    """Hard limit of open files; None: no limit."""
    ports: int | None
    """Ports that the system gives to who asks for any."""
    loopback: str
    """Why a port of 127.0.0.1 cannot be had; empty where it can."""
    runs: Disk
    cache: Disk
    gpus: tuple[str, ...] = ()
    """Name and memory of each."""
    driver: str | None = None
    torch_cuda: str | None = None
    """Version of CUDA that torch was built for; None: none, or not asked."""
    cuda_usable: bool | None = None


def judge_machine(facts: MachineFacts, job: PSTrainingJob | None = None) -> list[Finding]:
    """Every line about this machine; with `job`, whether that job fits on it."""
    found = [*_software(facts), *_sizes(facts), *_disks(facts), *_gpu(facts)]
    return found + (list(_fits(facts, job)) if job is not None else [])


def _software(facts: MachineFacts) -> Iterator[Finding]:
    version = ".".join(str(part) for part in facts.python)
    wanted = f"at least {PYTHON[0]}.{PYTHON[1]}"
    if facts.python[:2] < PYTHON:
        yield problem("python", version, wanted, "make an environment with a newer Python")
    else:
        yield ok("python", version, wanted)
    if facts.runtime is None:
        yield problem("psjob", "not installed here", f"{facts.client}, as psjob-client", f"install it {INSTALL}")
    elif facts.runtime != facts.client:
        yield problem("psjob", facts.runtime, f"{facts.client}, as psjob-client", f"install both anew, {INSTALL}")
    else:
        yield ok("psjob", facts.runtime, f"{facts.client}, as psjob-client")
    if facts.torch is None:
        yield problem("torch", "not installed here", "", "pip install torch")
    else:
        yield ok("torch", facts.torch)


def _sizes(facts: MachineFacts) -> Iterator[Finding]:
    yield ok("cores", f"{facts.cores:g}")
    least = 2 * PROCESS_BYTES
    wanted = f"{amount(least)} for a worker and a shard, beside the model"
    if facts.memory is None:
        yield warning("memory", "unknown", wanted, "look at it yourself")
    elif facts.memory < least:
        yield problem("memory", f"{amount(facts.memory)} free", wanted, "end other programs, or raise the container's limit")
    else:
        yield ok("memory", f"{amount(facts.memory)} free", wanted)
    if facts.shm is None:
        yield warning("/dev/shm", "is not there", "", "set spec.training.transport: tcp")
    elif facts.shm < LEAST_SHM:
        yield warning(
            "/dev/shm", f"{amount(facts.shm)} free", amount(LEAST_SHM),
            "give the container more (docker run --shm-size 1g), or set spec.training.transport: tcp",
        )  # fmt: skip
    else:
        yield ok("/dev/shm", f"{amount(facts.shm)} free", amount(LEAST_SHM))
    if facts.files is not None and facts.files < LEAST_FILES:
        yield warning("open files", f"{facts.files} at most", str(LEAST_FILES), "raise the hard limit: ulimit -Hn, or limits.conf")
    else:
        yield ok("open files", f"{facts.files} at most" if facts.files is not None else "no limit", str(LEAST_FILES))
    if facts.loopback:
        yield problem(
            "ports", f"127.0.0.1: {facts.loopback}", "", "processes meet on the loopback address: bring it up (ip link set lo up)"
        )
    else:
        yield ok("ports", f"{facts.ports} on 127.0.0.1" if facts.ports is not None else "127.0.0.1 is there")


def _disks(facts: MachineFacts) -> Iterator[Finding]:
    yield _disk("run folder", facts.runs, "start psjob in a folder with room, or remove old runs below .psjob")
    yield _disk("cache", facts.cache, "data sets and compiled kernels go there: make room, or set XDG_CACHE_HOME")


def _disk(about: str, disk: Disk, remedy: str) -> Finding:
    level = problem if about == "run folder" else warning
    if not disk.writable:
        return level(about, f"{disk.path} cannot be written to", "", remedy)
    if disk.free is None:
        return warning(about, f"{disk.path}: room unknown", amount(LITTLE_DISK), remedy)
    if disk.free < LEAST_DISK:
        return level(about, f"{amount(disk.free)} free at {disk.path}", amount(LEAST_DISK), remedy)
    if disk.free < LITTLE_DISK:
        return warning(about, f"{amount(disk.free)} free at {disk.path}", amount(LITTLE_DISK), remedy)
    return ok(about, f"{amount(disk.free)} free at {disk.path}", amount(LITTLE_DISK))


def _gpu(facts: MachineFacts) -> Iterator[Finding]:
    if facts.driver is None and not facts.gpus:
        yield ok("GPU", "none; jobs train on the CPU")
        return
    if not facts.gpus:
        yield warning("GPU", f"driver {facts.driver}, and no GPU", "", "nvidia-smi says why; in a container start it with --gpus all")
        return
    yield ok("GPU", f"{', '.join(facts.gpus)}; driver {facts.driver}")
    if facts.cuda_usable is False:
        built = f"built for CUDA {facts.torch_cuda}" if facts.torch_cuda else "built without CUDA"
        remedy = "update the driver, or install a torch built for an older CUDA" if facts.torch_cuda else "install a torch built for CUDA"
        yield warning("torch on GPU", f"torch {facts.torch} is {built} and sees none", "", remedy)
    elif facts.cuda_usable:
        yield ok("torch on GPU", f"CUDA {facts.torch_cuda}")


def _fits(facts: MachineFacts, job: PSTrainingJob) -> Iterator[Finding]:
    workers, shards = job.spec.workers.replicas, job.spec.ps.shards
    processes = workers + shards
    fewer = "have fewer processes here: --set spec.workers.replicas=2"
    figure = f"{processes} processes ({workers} workers, {shards} shards)"
    if processes > PROCESSES_A_CORE * facts.cores:
        yield warning("job: cores", figure, f"{facts.cores:g} cores", fewer)
    else:
        yield ok("job: cores", figure, f"{facts.cores:g} cores")
    needed = processes * PROCESS_BYTES
    if facts.memory is not None and facts.memory < needed:
        yield problem("job: memory", f"{amount(needed)} before the model", f"{amount(facts.memory)} free", fewer)
    elif facts.memory is not None:
        yield ok("job: memory", f"{amount(needed)} before the model", f"{amount(facts.memory)} free")
    files = workers * job.spec.training.streams + shards + OWN_FILES
    if facts.files is not None and facts.files < files:
        yield problem(
            "job: open files",
            f"{files} a shard",
            f"{facts.files} at most",
            "raise the hard limit (ulimit -Hn), or use fewer workers or streams",
        )
    else:
        yield ok("job: open files", f"{files} a shard", f"{facts.files} at most" if facts.files is not None else "no limit")
    if facts.ports is not None and facts.ports < shards * PORTS_EACH:
        yield problem("job: ports", str(shards * PORTS_EACH), f"{facts.ports}", "widen net.ipv4.ip_local_port_range, or use fewer shards")
    trained = [container_of(template, TRAINED) or {} for template in job.spec.worker_templates().values()]
    limits = {name for container in trained for name in (container.get("resources") or {}).get("limits") or {}}
    if any(str(name).endswith("/gpu") for name in limits) and not facts.gpus:
        yield warning(
            "job: GPU", "workers ask for one", "none here", "psjob run does not give GPUs out: a script that needs one fails here"
        )
