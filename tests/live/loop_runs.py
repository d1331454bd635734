"""One script under psjob, with real shards in this process and the worker in a fork, killed and started again where a test says.

The same script's plain twin runs in a fork too. What both print is compared.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from psjob import contract
from psjob.process.config import CheckpointConfig, Config
from tests.live.live_shards import NEVER, Shards
from tests.live.loop_faults import AGAIN, EXIT_AGAIN, FAULT, GOES_ON, WAITS
from tests.support import warm
from tests.support.runkeys import key_file

SECONDS = 60.0
"""Of one process of a script that takes a tenth of a second."""
MOST_STARTS = 8
KILLED = -9
PRELUDE = "__import__('tests.live.loop_faults').live.loop_faults.arm(); "
"""What a script begins with, in its first line."""
STRUCK = ("worker", "shards", "both")


@dataclass(frozen=True)
class Fault:
    """At a step the worker is killed, or its shards are, which continue from their newest checkpoint, or both at once."""

    step: int
    after: bool = False
    """As its push is over, and not as it begins."""
    struck: str = "worker"
    """One of STRUCK."""


@dataclass(frozen=True)
class Job:
    """How a script's job runs."""

    mode: str = "sync"
    update_at: str | None = None
    every: int = 2
    """Steps from one checkpoint to the next."""
    faults: tuple[Fault, ...] = ()


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


def begun(folder: Path, source: str) -> Callable[[], Ran]:
    """Start a script without psjob; what waits for it."""
    folder.mkdir()
    (folder / "train.py").write_text(source)
    process = _start(folder, {})
    return lambda: _ended(process, folder, 1, lambda: None)


def under_psjob(folder: Path, source: str, job: Job) -> Ran:
    """A script as the one worker of a job of one shard, with its faults one after the other."""
    folder.mkdir()
    (folder / "train.py").write_text(PRELUDE + source)
    checkpoint = dataclasses.replace(NEVER, every_steps=job.every)
    left, attempt, told = list(job.faults), 1, ""
    start, rewinds, more = 1, 0, dict[str, str]()

    def made(ports: Sequence[int] = ()) -> Shards:
        return Shards(
            folder, workers=1, shards=1, mode=job.mode, update_at=job.update_at, checkpoint=checkpoint, attempt=attempt, ports=ports
        )

    shards = made()

    def renew() -> None:
        nonlocal shards, attempt
        shards.close()
        attempt += 1
        shards = made(shards.ports)

    def struck() -> None:
        if (folder / WAITS).exists() and not (folder / GOES_ON).exists():
            left.pop(0)
            renew()
            (folder / GOES_ON).touch()

    try:
        (folder / "config.json").write_text(json.dumps(written(shards.config)))
        for starts in range(1, MOST_STARTS + 1):
            fault = left[0] if left else None
            process = _start(folder, {**more, **_environment(folder, start, rewinds, attempt, fault)})
            ran = _ended(process, folder, starts, struck)
            told += ran.err
            if ran.code == KILLED and left:
                if left.pop(0).struck == "both":
                    renew()
                start, rewinds, more = start + 1, 0, {}
            elif ran.code == EXIT_AGAIN:
                again = json.loads((folder / AGAIN).read_text())
                rewinds, more = again["rewinds"], {**again["more"], contract.ENV_MODE: again["mode"]}
            elif ran.code == contract.EXIT_RETRY:
                start, rewinds, more = start + 1, 0, {}
            else:
                break
        return dataclasses.replace(ran, err=told)
    finally:
        shards.close()


def _environment(folder: Path, start: int, rewinds: int, term: int, fault: Fault | None) -> dict[str, str]:
    found = {
        contract.ENV_ROLE: "worker", contract.ENV_INDEX: "0", contract.ENV_RUN: "run-1", contract.ENV_START: str(start),
        contract.ENV_REWINDS: str(rewinds), contract.ENV_TERM: str(term), contract.ENV_CONFIG: str(folder / "config.json"),
        contract.ENV_TERMINATION_LOG: str(folder / "end"), contract.ENV_KEYS: key_file(folder, "worker", 0, start),
        contract.ENV_POD: f"worker-0-r{start}",
    }  # fmt: skip
    if fault is not None:
        found[FAULT] = f"{'wait' if fault.struck == 'shards' else 'kill'} {'after' if fault.after else 'before'} {fault.step}"
    return found


def _start(folder: Path, environment: Mapping[str, str]) -> warm.Started:
    return warm.start_python(folder, ["train.py"], environment, folder / "output.txt", folder / "told.txt", warm.COMPILING)


def _ended(process: warm.Started, folder: Path, starts: int, meanwhile: Callable[[], None]) -> Ran:
    """How a process has ended. `meanwhile` is called now and then."""
    until = time.monotonic() + SECONDS
    while True:
        try:
            code = process.wait(0.02)
        except subprocess.TimeoutExpired:
            meanwhile()
            if time.monotonic() > until:
                process.kill()
                raise AssertionError(f"it did not end in {SECONDS:.0f} s:\n{(folder / 'told.txt').read_text()[-4000:]}") from None
        else:
            return Ran(code, (folder / "output.txt").read_text(), (folder / "told.txt").read_text(), starts)


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
