"""A worker of two processes: seconds of a step whose gradients are there already, by where models lie and how the processes sum.

`--device cuda`: both on the first GPU, and a job of two stages there beside it.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import clock
import psjob_run
import torch
from on_device import device_of
from torch import nn

import psjob as ps

PROCESSES = 2
WARM_UP, STEPS = 4, 20
WIDE, DEEP, BATCH = 2048, 8, 256


def main() -> None:
    words = clock.asked(__doc__)
    device = device_of(words).type
    if words.part == "sum":
        summing(device, words.megabytes, words.tensors)
        return
    if words.part == "stages":
        stages(device)
        return
    rows = []
    for way in ("auto",) if device == "cuda" else ("auto", "gloo"):
        laid = {"processes": PROCESSES} | ({} if way == "auto" else {"localSum": way})
        seconds, told = job(words, "sum", 1, workers=laid)
        rows.append(clock.row(f"{words.megabytes} MB on {device}, {way}: a step", 1e3 * seconds, "ms", note=told))
    for schedule in ("flush", "2bw") if device == "cuda" else ():
        cut = [{"name": "a"}, {"name": "b", "cut": str(DEEP)}]
        spec = {"stages": cut, "training": {"pipeline": {"microbatches": 4, "schedule": schedule}}}
        rows.append(clock.row(f"two stages on {device}, {schedule}: a step", 1e3 * job(words, "stages", 2, **spec)[0], "ms"))
    clock.answer_rows(rows)


def job(words: Any, part: str, replicas: int, **spec: Any) -> tuple[float, str]:
    """Seconds of a step of rank 0, and what the log says of the sum."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "seconds.json"
        command = [str(Path(__file__).resolve()), "--part", part, f"--device={words.device}", "--megabytes", str(words.megabytes)]
        env = [{"name": "BENCH_FILE", "value": str(file)}]
        container = {"name": "worker", "image": "none", "command": ["python", *command], "env": env}
        pods = {"replicas": replicas, "template": {"spec": {"containers": [container]}}, **spec.pop("workers", {})}
        summary = psjob_run.run(folder, command, 240.0, replicas, workers_spec=pods, **spec)
        logs = "".join(log.read_text() for log in Path(folder).glob(f".psjob/{summary['run']}/logs/*worker-0*.log"))
        said = next((line.partition("sum their gradients by ")[2] for line in logs.splitlines() if "sum their gradients by" in line), "")
        return float(json.loads(file.read_text())), said


def summing(device: str, megabytes: int, tensors: int) -> None:
    torch.set_num_threads(1)
    model = nn.ParameterList([torch.zeros(megabytes * 250_000 // tensors, device=device) for _ in range(tensors)])
    attached, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=clock.RATE))
    for parameter in attached.parameters():
        parameter.grad = torch.ones_like(parameter)
    tell(timed(optimizer.step, device))
    clock.check((float(p[at].detach()) for p in attached.parameters() for at in (0, -1)), -clock.RATE * (WARM_UP + STEPS))


def stages(device: str) -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(DEEP) for layer in (nn.Linear(WIDE, WIDE), nn.ReLU())]
    model = nn.Sequential(*layers).to(device)
    pipe = ps.pipeline(model, nn.functional.mse_loss)
    _, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=clock.RATE))
    x = torch.ones(BATCH, WIDE, device=device)

    def step() -> None:
        optimizer.zero_grad()
        pipe.step(x, x)
        optimizer.step()

    tell(timed(step, device))


def timed(step: Any, device: str) -> list[float]:
    found = []
    for _ in range(WARM_UP + STEPS):
        begin = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return found[WARM_UP:]


def tell(seconds: list[float]) -> None:
    if ps.rank() == 0:
        Path(os.environ["BENCH_FILE"]).write_text(json.dumps(statistics.median(seconds)))


if __name__ == "__main__":
    main()
