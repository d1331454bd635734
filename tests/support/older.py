"""This project as it was at an older commit, unpacked from git: its operator as a process, its CRD, its chart, its images' sources."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

import pytest

from hack.cluster.paths import REPO

BEFORE = "5277dabc25ddd7c821d4c771a94fcfd724f3bfe6"
"""A commit whose fields of spec and status have other names. Its jobs have config format 1 and wire 1."""


@dataclass
class Older:
    """The operator of an older commit. Starts processes as `operator_nursery.Nursery` does."""

    folder: Path
    _processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """In which its operator is found before the installed one."""
        return {**os.environ, "PYTHONPATH": str(self.folder / "operator" / "src")}

    @property
    def crd(self) -> Path:
        """Its CRD."""
        return self.folder / "crds" / "psjob.dev_pstrainingjobs.yaml"

    @property
    def chart(self) -> Path:
        """Its chart."""
        return self.folder / "charts" / "psjob"

    def start(self, arguments: list[str], log: Path) -> int:
        """`psjob-operator` with these arguments; answers its pid."""
        words = [sys.executable, "-m", "psjob_operator", *arguments]
        with log.open("ab") as out:
            process = subprocess.Popen(words, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=self.environment)
        self._processes[process.pid] = process
        return process.pid

    def poll(self, pid: int) -> int | None:
        """Its exit code once it has ended."""
        return self._processes[pid].poll()

    def wait(self, pid: int) -> int:
        """Wait for its end; answers the exit code."""
        return self._processes[pid].wait(timeout=60)


def release_before(repository: Path = REPO) -> str:
    """The newest tag of a release behind this commit; BEFORE while there is none."""
    words = ["git", "-C", str(repository), "describe", "--tags", "--abbrev=0", "--match=v[0-9]*", "HEAD^"]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip() or BEFORE


def unpacked(folder: Path, commit: str = BEFORE) -> Older:
    """That commit's operator, runtime, CRD and chart under `folder`. Skips, by the commit's name, where this clone does not hold it."""
    words = ["git", "-C", str(REPO), "archive", "--format=tar", commit, "operator/src", "runtime/src", "crds", "charts"]
    done = subprocess.run(words, capture_output=True)
    if done.returncode != 0:
        why = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        pytest.skip(f"commit {commit[:7]} cannot be read ({' '.join(why)}); a shallow clone needs git fetch --unshallow")
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    made = Older(folder)
    ask = [sys.executable, "-c", "import psjob_operator; print(psjob_operator.__file__)"]
    found = subprocess.run(ask, capture_output=True, text=True, env=made.environment, check=True).stdout
    assert found.startswith(str(folder)), f"the operator of {commit[:7]} is hidden by {found}"
    return made
