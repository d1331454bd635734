"""One script under psjob, with real shards in this process and the worker in a fork, killed and started again where a test says.

The same script's plain twin runs in a fork too. What both print is compared.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from psjob import contract
from psjob.process.config import CheckpointConfig, Config
from tests import warm
from tests.live.live_shards import NEVER, serving
from tests.live.loop_faults import FAULT
from tests.runkeys import key_file

SECONDS = 60.0
"""Of one process of a script that takes a tenth of a second."""
MOST_STARTS = 5
KILLED = -9
PRELUDE = "__import__('tests.live.loop_faults').live.loop_faults.arm(); "
"""What a script begins with, in its first line."""


@dataclass(frozen=True)
class Fault:
    """The worker is killed at a step. `shards`: so are all shards, which go on from their newest checkpoint."""

    step: int
    after: bool = False
    shards: bool = False


@dataclass(frozen=True)
class Ran:
    """How a script ended: exit code of its last process, what that printed, and what all of them told."""

    code: int
    out: str
    err: str
    starts: int

    @property
    def lines(self) -> list[str]:
        """What the last process printed."""
        return self.out.splitlines()


def plain(folder: Path, source: str) -> Ran:
    """A script without psjob."""
    folder.mkdir()
    (folder / "train.py").write_text(source)
    return _started(folder, {}, 1)


def under_psjob(folder: Path, source: str, faults: Sequence[Fault] = (), update_at: str | None = None, every: int = 2) -> Ran:
    """A script as the one worker of a job of one shard, in mode sync, with these faults one after the other."""
    folder.mkdir()
    (folder / "train.py").write_text(PRELUDE + source)
    left = list(faults)
    start, rewinds, view, told = 1, 0, 0, ""
    checkpoint = dataclasses.replace(NEVER, every_steps=every)
    while True:
        view += 1
        with serving(folder, workers=1, shards=1, update_at=update_at, checkpoint=checkpoint, attempt=view) as shards:
            (folder / "config.json").write_text(json.dumps(written(shards.config)))
            while True:
                fault = left[0] if left else None
                ran = _started(folder, _environment(folder, start, rewinds, view, fault), start + rewinds)
                told += ran.err
                if ran.code == KILLED and left:
                    left.pop(0)
                elif ran.code != contract.EXIT_RETRY or start + rewinds >= MOST_STARTS:
                    return dataclasses.replace(ran, err=told)
                if fault is not None and fault.shards and ran.code == KILLED:
                    rewinds += 1
                    break
                start += 1


def _environment(folder: Path, start: int, rewinds: int, view: int, fault: Fault | None) -> dict[str, str]:
    found = {
        contract.ENV_ROLE: "worker", contract.ENV_INDEX: "0", contract.ENV_RUN: "run-1", contract.ENV_START: str(start),
        contract.ENV_REWINDS: str(rewinds), contract.ENV_VIEW: str(view), contract.ENV_CONFIG: str(folder / "config.json"),
        contract.ENV_TERMINATION_LOG: str(folder / "end"), contract.ENV_KEYS: key_file(folder, "worker", 0, start),
        contract.ENV_POD: f"worker-0-r{start}",
    }  # fmt: skip
    if fault is not None:
        found[FAULT] = f"{'after' if fault.after else 'before'} {fault.step}"
    return found


def _started(folder: Path, environment: Mapping[str, str], starts: int) -> Ran:
    out, err = folder / "output.txt", folder / "told.txt"
    process = warm.start_python(folder, ["train.py"], environment, out, err, warm.COMPILING)
    try:
        code = process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"it did not end in {SECONDS:.0f} s:\n{err.read_text()[-4000:]}") from None
    return Ran(code, out.read_text(), err.read_text(), starts)


def written(config: Config) -> dict[str, object]:
    """The config file of a process, with what a job in this process sets."""
    saved: CheckpointConfig = config.checkpoint
    return {
        "format": contract.CONFIG_FORMAT, "job": config.job, "run": config.run, "specHash": config.spec_hash, "mode": config.mode,
        "seed": config.seed, "updateAt": config.update_at, "workers": config.workers,
        "shards": [{"host": s.host, "port": s.port, "statusPort": s.status_port} for s in config.shards],
        "checkpoint": {
            "intervalSeconds": saved.interval_seconds, "everySteps": saved.every_steps, "keep": saved.keep, "disabled": saved.disabled,
            "resumeFrom": None,
        },
        "successPolicy": config.success_policy, "shardTimeoutSeconds": config.shard_timeout, "connectSeconds": config.connect_seconds,
    }  # fmt: skip
