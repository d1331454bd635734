"""`psjob run` that a test watches: what shard 0's status port and the run's folder said, every few tenths of a second, until its end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from psjob.process.status_client import ask_shard
from tests.e2e.workloads.bulky import HURRY, go_sign
from tests.e2e.workloads.gates import steps_of
from tests.support.disks import Volume
from tests.support.runkeys import of_run

EVERY = 0.2
"""Seconds between two looks."""
ANSWER_SECONDS = 1.0
DIES_SECONDS = 20.0
OF_SHARD = re.compile(r"-shard(\d+)-")
LOST = 2.0
"""A file that is no committed checkpoint's for so long is not one that is just being deleted or named."""
T = TypeVar("T")


@dataclass(frozen=True)
class Look:
    """One look at a running job."""

    at: float
    """Unix time."""
    told: Mapping[str, Any]
    """Shard 0's status; empty where it gave none within ANSWER_SECONDS."""
    beyond: frozenset[str]
    """Files of shards that no manifest names."""

    @property
    def coordinator(self) -> Mapping[str, Any]:
        return self.told.get("coordinator") or {}

    @property
    def step(self) -> int:
        """Lowest complete clock; -1: not told."""
        return int(self.coordinator.get("step", -1))

    def passed(self, step: int, after: float) -> bool:
        """Was `step` or a later one complete at a unix time after `after`?"""
        return any(number >= step and at > after for number, at in self.coordinator.get("passed") or ())

    @property
    def problem(self) -> str:
        """What the job says about checkpoints that cannot be, and about whom it waits for."""
        return " ".join(str(self.coordinator.get(key) or "") for key in ("checkpointProblem", "waiting"))

    def progress(self, shard: int, doing: str) -> tuple[int, int] | None:
        """(done, total) in bytes of what a shard reads or writes for a checkpoint; None: it does not say so."""
        for entry in (self.coordinator.get("checkpointProgress") or {}).get("shards") or ():
            if (entry["index"], entry["doing"]) == (shard, doing):
                return int(entry["done"]), int(entry["total"])
        return None


class Watched:
    """A job of bulky.py whose run folder lies on a volume; summary, history, output and signs lie in `notes`, on another one.

    As a context manager it ends every process of the job, however the test ends.
    """

    def __init__(self, volume: Volume, notes: Path, job: Path, *words: str) -> None:
        self.volume, self.notes = volume, notes
        self.looks: list[Look] = []
        argv = [sys.executable, "-m", "psjob_client.cli.main", "run", str(job), "--no-progress", "--summary", str(notes / "summary.json")]
        argv += ["--history", str(notes / "history.jsonl"), *words]
        with (notes / "out").open("wb") as out, (notes / "err").open("wb") as err:
            self.process = subprocess.Popen(
                argv, cwd=volume.folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=out, stderr=err, start_new_session=True
            )
        self._over = threading.Event()
        self._named: tuple[frozenset[str], str] = (frozenset(), "")
        self._thread = threading.Thread(target=self._watch, name="looks", daemon=True)
        self._thread.start()

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self.volume.limit(None)  # nothing can be killed while it waits for the device
        children = self.processes
        if self.process.poll() is None:
            self.process.kill()  # its children go with it
        self.process.wait()
        deadline = time.monotonic() + DIES_SECONDS
        while any(_alive(child) for child in children) and time.monotonic() < deadline:
            time.sleep(0.05)
        left = [child for child in children if _alive(child)]
        for child in left:
            os.kill(child, signal.SIGKILL)
        self._thread.join()
        with (self.notes / "looks.jsonl").open("w") as file:  # for people
            file.writelines(json.dumps({"at": look.at, "told": look.told, "beyond": sorted(look.beyond)}) + "\n" for look in self.looks)
        assert not left, f"processes {left} of the job outlived psjob run by {DIES_SECONDS:.0f} s"

    # -- what is there -------------------------------------------------------------------------

    @cached_property
    def folder(self) -> Path:
        """The run's folder; it is there when its config is."""
        return self.until("the run's folder is made", 60, lambda: next(self.volume.folder.glob(".psjob/*/config.json"), None)).parent

    @property
    def steps(self) -> list[int]:
        """Steps of the manifests, ascending."""
        return steps_of(self.folder)

    @property
    def last(self) -> Look:
        return self.looks[-1] if self.looks else Look(0.0, {}, frozenset())

    @property
    def processes(self) -> list[int]:
        """All that `psjob run` has started, directly or not."""
        return _children(self.process.pid)

    def status(self) -> Mapping[str, Any]:
        """status.json, the copy of the job's status."""
        return dict(json.loads((self.folder / "status.json").read_text()))

    def own_bytes(self, shard: int) -> int:
        """Size of a shard's files in the newest checkpoint."""
        text = max(self.folder.glob("manifest-*.json"), key=lambda path: path.name).read_text()
        return sum(path.stat().st_size for path in self.folder.glob("*.safetensors") if _shard(path.name) == shard and path.name in text)

    # -- doing ---------------------------------------------------------------------------------

    def go(self, step: int) -> None:
        """Let the script make `step`, at which it holds."""
        go_sign(self.notes, step).touch()

    def hurry(self) -> None:
        (self.notes / HURRY).touch()

    def until(self, what: str, seconds: float, found: Callable[[], T | None]) -> T:
        """Wait until `found` gives something; the test fails when it does not in `seconds`, or when the job ends before."""
        deadline = time.monotonic() + seconds
        while True:
            result = found()
            if result:
                return result
            assert self.process.poll() is None, f"psjob run ended before this came: {what}\n{self.evidence()}"
            assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}\n{self.evidence()}"
            time.sleep(0.1)

    def struck(self, fault: str, seconds: float) -> float:
        """Wait until psjob run has done what `--fault` asks; a unix time just after that."""
        said = f"fault {fault}: "
        return self.until(f"{fault} is done", seconds, lambda: time.time() if said in (self.notes / "err").read_text() else None)

    def stay(self, seconds: float) -> list[Look]:
        """Wait, and give the looks of that time; the test fails when the job ends meanwhile."""
        began = time.time()
        self.until(f"{seconds:.0f} s pass", seconds + 10, lambda: time.time() - began >= seconds)
        return self.since(began)

    def since(self, at: float, until: float = float("inf")) -> list[Look]:
        """The looks of a time."""
        return [look for look in list(self.looks) if at <= look.at <= until]

    def end(self, seconds: float) -> Mapping[str, Any]:
        """The summary of a job that completes within `seconds`."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job did not end in {seconds:.0f} s\n{self.evidence()}") from None
        assert code == 0, f"exit code {code}\n{self.evidence()}"
        return dict(json.loads((self.notes / "summary.json").read_text()))

    def evidence(self) -> str:
        """What a person needs to see of a job that did not do as it should."""
        told = {
            key: value for key, value in self.last.coordinator.items() if key not in ("passed", "workers", "staleness", "gap", "metrics")
        }
        status = next(iter(self.volume.folder.glob(".psjob/*/status.json")), None)
        logs = sorted(self.volume.folder.glob(".psjob/*/logs/*"), key=lambda path: path.stat().st_mtime)
        tails = [f"-- {path.name}\n{path.read_text()[-1500:]}" for path in logs[-8:] if path.stat().st_size]
        restarts = json.loads(status.read_text()).get("restarts") if status else None
        files = sorted(f"{path.name} {path.stat().st_size}" for path in self.volume.folder.glob(".psjob/*/*") if path.is_file())
        words = [f"coordinator: {json.dumps(told)}", f"restarts: {restarts}", f"free: {self.volume.free()}", *files]
        return "\n".join([(self.notes / "err").read_text()[-3000:], *words, *tails])

    # -- looking -------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._over.wait(EVERY):
            config = next(self.volume.folder.glob(".psjob/*/config.json"), None)
            if config is not None:
                port = json.loads(config.read_text())["shards"][0]["statusPort"]
                self.looks.append(Look(time.time(), _ask(port, config.parent), self._beyond(config.parent)))

    def _beyond(self, folder: Path) -> frozenset[str]:
        files = {name for name in os.listdir(folder) if OF_SHARD.search(name)}
        manifests = frozenset(path.name for path in folder.glob("manifest-*.json"))
        if manifests != self._named[0]:
            try:
                self._named = manifests, "".join((folder / name).read_text() for name in sorted(manifests))
            except FileNotFoundError:  # pruned meanwhile
                return self.last.beyond
        return frozenset(name for name in files if name not in self._named[1])


def strays(looks: Sequence[Look]) -> dict[int, set[str]]:
    """By shard: the most files that lay there together for LOST seconds and belonged to no committed checkpoint."""
    worst: dict[int, set[str]] = {}
    for index, first in enumerate(looks):
        held = set(first.beyond)
        for look in looks[index + 1 :]:
            held &= look.beyond
            if look.at - first.at >= LOST:
                for shard in {_shard(name) for name in held}:
                    mine = {name for name in held if _shard(name) == shard}
                    worst[shard] = max(worst.get(shard, set()), mine, key=len)
                break
    return worst


def _shard(name: str) -> int:
    """Whose file of a checkpoint it is; -1: the coordinator's."""
    match = OF_SHARD.search(name)
    return int(match[1]) if match else -1


def _ask(port: int, run: Path) -> Mapping[str, Any]:
    try:
        return ask_shard("127.0.0.1", port, of_run(run)["questions"], seconds=ANSWER_SECONDS)
    except (OSError, ValueError):
        return {}


def _children(pid: int) -> list[int]:
    """Processes that this one has started, and theirs."""
    started: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (facts := _facts(int(entry.name))):
            started.setdefault(int(facts[1]), []).append(int(entry.name))
    found, rest = [], [pid]
    while rest:
        below = started.get(rest.pop(), [])
        found += below
        rest += below
    return found


def _alive(pid: int) -> bool:
    """It is there, and no zombie."""
    return _facts(pid)[:1] not in ([], ["Z"], ["X"])


def _facts(pid: int) -> list[str]:
    """State, parent and so on from /proc; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
