"""One step's traffic over TCP: push a gradient, apply it, pull the result; beside it torch gloo sends and receives the same bytes.

    python bench/cycle.py [--megabytes 4 --megabytes 64] [--seconds 3]

One worker and one shard as processes of this machine, mode async, SGD with momentum, float32. The peer is torch.distributed with gloo:
one process sends the gradient's bytes, the other sends as many back; nothing is applied. Both in turn in one run, so that the ratio
holds whatever machine this is. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

WARM_UP = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, action="append", help="size of the parameters (default 4, 16 and 64)")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long each is measured")
    parser.add_argument("--part", choices=["worker", "gloo"], help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    sizes = asked.megabytes or [4, 16, 64]
    if asked.part:
        cycles = worker(sizes[0], asked.seconds) if asked.part == "worker" else gloo(sizes[0], asked.seconds, asked.rank)
        print(json.dumps(cycles))
        return 0
    print(f"{'MiB':>5} {'psjob ms':>9} {'gloo ms':>9} {'ratio':>6}  {'psjob p99 ms':>12} {'gloo p99 ms':>11}")
    for size in sizes:
        ours, theirs = measure_psjob(size, asked.seconds), measure_gloo(size, asked.seconds)
        mine, other = statistics.median(ours), statistics.median(theirs)
        print(
            f"{size:>5} {mine * 1e3:>9.2f} {other * 1e3:>9.2f} {mine / other:>6.2f}  {p99(ours) * 1e3:>12.2f} {p99(theirs) * 1e3:>11.2f}",
            flush=True,
        )
    return 0


def measure_psjob(megabytes: int, seconds: float) -> list[float]:
    """Seconds of each cycle of one worker and one shard."""
    with tempfile.TemporaryDirectory() as folder:
        port, status = free_ports(2)
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(job_config(port, status)))
        run = json.loads(config.read_text())["run"]
        shared = {**os.environ, "OMP_NUM_THREADS": "1", "PSJOB_INDEX": "0", "PSJOB_RUN": run, "PSJOB_CONFIG": str(config)}
        shared["PSJOB_TERMINATION_LOG"] = str(Path(folder) / "ended")
        shard = {**shared, "PSJOB_ROLE": "shard", "PSJOB_POD": "ps-0", "PSJOB_EPOCH": "1", "PSJOB_VIEW": "1"}
        shard |= {"PSJOB_CHECKPOINTS": str(Path(folder) / "checkpoints"), "PSJOB_BIND": "127.0.0.1"}
        log = (Path(folder) / "shard.log").open("w+")
        serving = subprocess.Popen([sys.executable, "-m", "psjob.shard"], env=shard, stdout=log, stderr=log)
        try:
            return part("worker", megabytes, seconds, {**shared, "PSJOB_ROLE": "worker", "PSJOB_POD": "worker-0", "PSJOB_START": "1"})
        except subprocess.CalledProcessError:
            log.seek(0)
            print(log.read(), file=sys.stderr)
            raise
        finally:
            serving.kill()
            serving.wait()


def measure_gloo(megabytes: int, seconds: float) -> list[float]:
    """Seconds of each send and receive between two processes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    words = [sys.executable, __file__, "--part", "gloo", "--megabytes", str(megabytes), "--seconds", str(seconds), "--rank", "1"]
    peer = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL)
    try:
        return part("gloo", megabytes, seconds, environment)
    finally:
        peer.wait(timeout=60)


def part(name: str, megabytes: int, seconds: float, environment: dict[str, str]) -> list[float]:
    words = [sys.executable, __file__, "--part", name, "--megabytes", str(megabytes), "--seconds", str(seconds)]
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    cycles: list[float] = json.loads(done.stdout.splitlines()[-1])
    return cycles


def worker(megabytes: int, seconds: float) -> list[float]:
    import torch

    import psjob

    torch.set_num_threads(1)
    model = torch.nn.ParameterList([torch.zeros(1 << 18) for _ in range(megabytes)])
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    attached, optimizer = psjob.attach(model, optimizer)
    for parameter in attached.parameters():
        parameter.grad = torch.ones_like(parameter)
    return cycles(optimizer.step, seconds)


def gloo(megabytes: int, seconds: float, rank: int) -> list[float]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    data, last = torch.ones(megabytes << 18), torch.zeros(1)

    def there_and_back() -> None:
        if rank == 0:
            dist.send(data, 1)
            dist.recv(data, 1)
        else:
            dist.recv(data, 0)
            dist.send(data, 0)

    if rank == 0:
        found = cycles(there_and_back, seconds, lambda more: dist.send(torch.tensor([1.0 if more else 0.0]), 1))
    else:
        found = []
        dist.recv(last, 0)
        while last.item():
            there_and_back()
            dist.recv(last, 0)
    dist.destroy_process_group()
    return found


def cycles(step: Any, seconds: float, tell: Any = None) -> list[float]:
    """Call `step` for so long and return the seconds of each call; `tell` says before each, untimed, whether one more comes."""
    found: list[float] = []
    end = time.perf_counter() + seconds
    while len(found) < WARM_UP + 3 or time.perf_counter() < end:
        if tell:
            tell(True)
        start = time.perf_counter()
        step()
        found.append(time.perf_counter() - start)
    if tell:
        tell(False)
    return found[WARM_UP:]


def job_config(port: int, status: int) -> dict[str, Any]:
    return {
        "format": 1,
        "job": "bench",
        "run": uuid.uuid4().hex,
        "specHash": "0" * 64,
        "mode": "async",
        "seed": 0,
        "updateAt": None,
        "workers": 1,
        "shards": [{"host": "127.0.0.1", "port": port, "statusPort": status}],
        "checkpoint": {"intervalSeconds": 3600.0, "everySteps": None, "keep": 2, "disabled": True, "resumeFrom": None},
        "successPolicy": "AllWorkers",
        "shardTimeoutSeconds": 30.0,
        "connectSeconds": 60.0,
    }


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [found.getsockname()[1] for found in sockets]
    for found in sockets:
        found.close()
    return ports


def p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * 0.99))]


if __name__ == "__main__":
    sys.exit(main())
