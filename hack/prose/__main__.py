"""`python -m hack.prose [PAGE …]`: vale over README, docs and examples, with the rules of hack/prose/styles.

An error of a page that pending.toml does not count is an error here. That file may only shrink: a page with fewer errors than it counts
is named too. Warnings are printed where pages are named, and never fail.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hack.cluster.build import find_go
from hack.cluster.paths import ClusterError, cache
from hack.site.stage import pages

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
MODULE = HERE / "module"
PACKAGE = "github.com/vale-cli/vale/v3/cmd/vale"
SECONDS = 900
TRIES = 3
SLOW = "did not finish within"
"""What vale says of a rule that took more than its 2 s, as on a busy machine."""


@dataclass(frozen=True)
class Finding:
    """What a rule of vale says of a line of a page."""

    page: str
    line: int
    rule: str
    message: str
    error: bool

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {'error' if self.error else 'warning'}: {self.message} ({self.rule})"


def main(arguments: list[str]) -> int:
    named = arguments or sorted(pages(ROOT))
    try:
        found = findings(named)
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 1
    if arguments:
        print("\n".join(str(one) for one in found) or "no finding")
        return 1 if any(one.error for one in found) else 0
    wrong = judge(found, pending())
    waiting = sum(pending().values())
    print("\n".join(wrong) if wrong else f"vale: {len(named)} pages, {waiting} errors that hack/prose/pending.toml counts")
    return 1 if wrong else 0


def findings(named: list[str]) -> list[Finding]:
    """What vale finds in those pages, by page and line. Raises ClusterError where one is not there or vale cannot be built."""
    if absent := [page for page in named if not (ROOT / page).is_file()]:
        raise ClusterError(f"there is no page {absent[0]}; give paths as from the root of the repository")
    command = [str(vale()), "--config", str(HERE / "vale.ini"), "--output", "JSON", "--no-exit", *named]
    for _ in range(TRIES):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
        if done.returncode == 0 or SLOW not in done.stdout + done.stderr:
            break
    if done.returncode != 0:
        raise ClusterError(f"vale ended with {done.returncode}: {(done.stdout + done.stderr).strip()[-2000:]}")
    return [
        Finding(page, said["Line"], said["Check"], said["Message"], said["Severity"] == "error")
        for page, told in sorted(json.loads(done.stdout).items())
        for said in sorted(told, key=lambda one: (one["Line"], one["Check"]))
    ]


def judge(found: list[Finding], counted: Mapping[str, int]) -> list[str]:
    """What is wrong: each error of a page that has more than are counted, and each count that is too high."""
    errors = Counter(one.page for one in found if one.error)
    wrong = [str(one) for one in found if one.error and errors[one.page] > counted.get(one.page, 0)]
    for page, count in counted.items():
        if errors[page] < count:
            wrong.append(f"hack/prose/pending.toml counts {count} errors of {page}, which has {errors[page]}; lower the number")
    return wrong


def pending() -> dict[str, int]:
    """How many errors each page may still have."""
    counted: dict[str, int] = tomllib.loads((HERE / "pending.toml").read_text())["errors"]
    return counted


def vale() -> Path:
    """The program, built from its pinned module into the cache where it is not there."""
    seen = hashlib.sha256(b"".join((MODULE / name).read_bytes() for name in ("go.mod", "go.sum")))
    home = cache() / "bin" / f"vale-{seen.hexdigest()[:12]}"
    home.parent.mkdir(parents=True, exist_ok=True)
    with home.with_suffix(".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        if not home.exists():
            _build(home)
    return home / "vale"


def _build(home: Path) -> None:
    scratch = home.with_suffix(".partial")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    env = {
        **os.environ,
        "GOCACHE": str(cache() / "go-build"),
        "GOFLAGS": "-buildvcs=false -mod=readonly",
        "GOWORK": "off",
        "CGO_ENABLED": "1",
    }
    command = [find_go(), "build", "-trimpath", "-ldflags", "-s -w", "-o", str(scratch / "vale"), PACKAGE]
    print("building vale, the prose linter, once (a minute or two)", file=sys.stderr)
    done = subprocess.run(command, cwd=MODULE, env=env, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode != 0:
        raise ClusterError(f"go could not build vale (it needs a C compiler too); its last words:\n{done.stderr[-2000:]}")
    scratch.rename(home)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
