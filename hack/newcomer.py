"""Somebody who has nothing except Python and a page: runs its commands in an empty folder, and sees when the first step was made."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hack.readme import script


@dataclass(frozen=True)
class Typed:
    """Commands that were typed: when the first began and when each ended, by the wall clock, and what they printed."""

    commands: Sequence[str]
    began: float
    ended: Sequence[float]
    code: int
    output: str

    def seconds(self) -> list[tuple[str, float]]:
        """Each command that has ended well, with its time."""
        starts = [self.began, *self.ended]
        return [(command, end - start) for command, start, end in zip(self.commands, starts, self.ended, strict=False)]


def environment(home: Path, index: str, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Of a new user on this machine: a home of its own, system programs, this Python, and packages from that index."""
    path = [str(Path(sys.base_prefix) / "bin"), "/usr/local/bin", "/usr/bin", "/bin"]
    more = dict(more or {})
    ours = more.pop("PATH", "")
    return {
        "HOME": str(home),
        "PATH": os.pathsep.join([ours, *path] if ours else path),
        "LANG": "C.UTF-8",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": index,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        **more,
    }


def follow(typed: Sequence[str], folder: Path, environment: Mapping[str, str], seconds: float) -> Typed:
    """Type these in `folder`, one after the other. Raises TimeoutError with the last words where that takes longer than `seconds`."""
    with tempfile.TemporaryDirectory() as scratch:
        marks, output = Path(scratch, "marks"), Path(scratch, "output")
        marks.touch()
        began = time.time()
        with output.open("wb") as file:
            process = subprocess.Popen(
                ["bash", "-c", script(typed, str(marks))],
                cwd=folder, env=dict(environment), stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
            )  # fmt: skip
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise TimeoutError(f"the commands took longer than {seconds:g} s: {output.read_text()[-2000:]}") from None
        return Typed(typed, began, [float(line) for line in marks.read_text().split()], code, output.read_text())


def first_step(folder: Path) -> float:
    """When the first run below `folder` told its first finished step, by the wall clock. Raises LookupError if none did."""
    lines = [line for file in folder.glob(".psjob/*/history.jsonl") for line in file.read_text().splitlines()]
    times = [point["time"] for point in map(json.loads, lines) if point["step"] > 0]
    if not times:
        raise LookupError(f"no run in {folder} has made a step")
    return float(min(times))
