"""Which GPU a process computes on, how quickly it and the CPU move bytes, and what `nvidia-smi` says of the machine."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from psjob.collectives import localsum
from psjob.collectives.localsum import CPU, TopoMatrix

SMI_SECONDS = 20.0
PROBE = 8 << 20
"""Bytes of a measured copy, and of a measured sum."""
TRIES = 3


@dataclass(frozen=True)
class Lying:
    """Where a process's model lies: `cpu`, or its GPU's UUID. `host`, `add`: as in `localsum.Given`; 0 where they are not measured."""

    device: str
    host: float = 0.0
    add: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """For another process of the worker."""
        return asdict(self)

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Lying:
        """What `to_json` gave. Raises KeyError and ValueError."""
        return cls(str(body["device"]), float(body["host"]), float(body["add"]))


def device_of(parameters: Sequence[torch.Tensor]) -> torch.device:
    """The GPU on which all of them lie; else the CPU."""
    devices = {p.device for p in parameters}
    only = devices.pop() if len(devices) == 1 else torch.device(CPU)
    return only if only.type == "cuda" else torch.device(CPU)


def lying(device: torch.device) -> Lying:
    """Of this process. A GPU's copies are measured, which takes some milliseconds."""
    if device.type != "cuda":
        return Lying(CPU)
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", device)
    there = torch.ones(PROBE, dtype=torch.uint8, device=device)
    here = torch.empty(PROBE, dtype=torch.uint8, pin_memory=True, device="cpu")
    one, other = torch.ones(PROBE // 4, dtype=torch.float32, device="cpu"), torch.ones(PROBE // 4, dtype=torch.float32, device="cpu")

    def copy() -> None:
        here.copy_(there)

    return Lying(str(uuid), PROBE / _least(copy), PROBE / _least(lambda: one.add_(other)))


def topology(uuids: Sequence[str]) -> tuple[TopoMatrix | None, list[int]]:
    """How the GPUs are joined, and the number there of each that is named; None where the tool is missing or says something else."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None, []
    try:
        matrix = localsum.parse_topology(_said(tool, "topo", "-m"))
        rows = [line.split(",") for line in _said(tool, "--query-gpu=index,uuid", "--format=csv,noheader").splitlines()]
        known = {uuid.strip().removeprefix("GPU-"): int(number) for number, uuid in rows}
        numbers = [known[uuid.removeprefix("GPU-")] for uuid in uuids]
    except (OSError, ValueError, KeyError, subprocess.SubprocessError):
        return None, []
    return (matrix, numbers) if set(numbers) <= set(matrix.gpus) else (None, [])


def _said(tool: str, *words: str) -> str:
    return subprocess.run([tool, *words], capture_output=True, text=True, timeout=SMI_SECONDS, check=True).stdout


def _least(act: Any) -> float:
    taken = []
    for _ in range(TRIES + 1):
        begin = time.perf_counter()
        act()
        taken.append(time.perf_counter() - begin)
    return min(taken[1:])
