"""A program that Go builds once into the cache, from a module that pins all of its source."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hack.cluster.paths import ClusterError, cache

SECONDS = 1800


@dataclass(frozen=True)
class GoTool:
    """What to build, and how."""

    name: str
    package: str
    module: Path
    """Folder of go.mod and go.sum."""
    about: str
    """What it is, and how long building takes."""
    cgo: bool = False
    tags: str = ""

    def built(self, go: Callable[[], str]) -> Path:
        """The program. `go` answers the go command, and is asked where it must be built; raises ClusterError if that fails."""
        files = [self.module / "go.mod", self.module / "go.sum", *sorted((self.module / self.package).glob("*.go"))]
        seen = hashlib.sha256(b"".join(file.read_bytes() for file in files) + self.tags.encode())
        home = cache() / "bin" / f"{self.name}-{seen.hexdigest()[:12]}"
        home.parent.mkdir(parents=True, exist_ok=True)
        with home.with_suffix(".lock").open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if not home.exists():
                self._build(home, go())
        return home / self.name

    def _build(self, home: Path, go: str) -> None:
        scratch = home.with_suffix(".partial")
        options = ["-trimpath", "-ldflags", "-s -w", *(["-tags", self.tags] if self.tags else [])]
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        env = {
            **os.environ,
            "GOCACHE": str(cache() / "go-build"),
            "GOFLAGS": "-buildvcs=false -mod=readonly",
            "GOWORK": "off",
            "CGO_ENABLED": str(int(self.cgo)),
        }
        print(f"building {self.name}, {self.about}", file=sys.stderr)
        command = [go, "build", *options, "-o", str(scratch / self.name), self.package]
        done = subprocess.run(command, cwd=self.module, env=env, capture_output=True, text=True, timeout=SECONDS)
        if done.returncode != 0:
            raise ClusterError(f"go could not build {self.name}; its last words:\n{done.stderr[-2000:]}")
        scratch.rename(home)
