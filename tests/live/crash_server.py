"""A process that has torch loaded and forks one child per save, so that a test can kill many of them quickly.

It is sent {"folder", "step", "stop": [function of disk, n-th call, "before" | "half"] | null, "wait": bool, "large": bool,
"base": bool}; answers {"pid"}, then {"status"}: 0 committed, 3 a CheckpointProblem (its text in problem.txt), -9 killed. With "wait" the
child begins when a file named go appears; with "large" files are written as large ones are; with "base" half of the blocks are named
where they lie.
"""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from psjob.checkpoint import disk, manifest
from psjob.checkpoint.disk import CheckpointProblem
from tests.tensors.checkpoint_parts import RUN, blocks, save

PRIMITIVES = ("_create", "_write", "_sync", "_rename")


def serve(line: Connection) -> None:
    torch.set_num_threads(1)
    blocks(0)  # so that torch has looked at the processor before a fault is put in
    while True:
        order = line.recv()
        pid = os.fork()
        if pid == 0:
            os._exit(child(order))
        line.send({"pid": pid})
        _, status = os.waitpid(pid, 0)
        line.send({"status": os.waitstatus_to_exitcode(status)})


def child(order: dict[str, Any]) -> int:
    folder = Path(order["folder"])
    while order["wait"] and not (folder.parent / "go").exists():
        time.sleep(0.002)
    if order["large"]:
        disk.LARGE = 0  # type: ignore[misc]
    if order["stop"]:
        stop_at(*order["stop"])
    try:
        base = manifest.newest_manifest(folder, RUN)[0] if order["base"] else None
        made = save(folder, order["step"], base=base)
        manifest.commit(folder, made)
        manifest.prune(folder, 1, made)
    except CheckpointProblem as problem:
        (folder.parent / "problem.txt").write_text(str(problem))
        return 3
    return 0


def stop_at(name: str, number: int, side: str) -> None:
    """Kill this process before the n-th call of a function of `disk` (`any`: of all of them), or with half of a write done."""
    calls = 0
    for each in PRIMITIVES if name == "any" else (name,):
        real = getattr(disk, each)

        def counted(*arguments: Any, real: Any = real) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                if side == "half":
                    os.write(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments)

        setattr(disk, each, counted)
