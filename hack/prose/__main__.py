"""`python -m hack.prose [PAGE or SOURCE …]`: vale over the documentation, and over docstrings and messages of the sources.

A machine that cannot build vale skips it, with the next step, unless pages are named or PSJOB_FORBID_SKIP is 1.

The rules are in hack/prose/styles. An error of a page that pending.toml does not count is an error here. That file may only shrink: a
page with fewer errors than it counts is named too. Warnings are printed where pages are named, and never fail.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hack.cluster.build import find_go
from hack.cluster.paths import ClusterError, Unavailable
from hack.gotool import GoTool
from hack.prose.extract import Said, extract
from hack.prose.sources import sources, written
from hack.site.stage import pages

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
MODULE = HERE / "module"
PACKAGE = "github.com/vale-cli/vale/v3/cmd/vale"
SECONDS = 900
TRIES = 3
MEAN = "psjob.Mean"
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
    named = arguments or [*sorted(pages(ROOT)), *sources(ROOT)]
    try:
        vale()
        found = findings(named)
    except Unavailable as error:
        if arguments or os.environ.get("PSJOB_FORBID_SKIP") == "1":
            print(error, file=sys.stderr)
            return 1
        print(f"skipped: prose ({len(named)} pages and sources): {error}")
        return 0
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 1
    if arguments:
        print("\n".join(str(one) for one in found) or "no finding")
        return 1 if any(one.error for one in found) else 0
    wrong = judge(found, pending())
    waiting = sum(pending().values())
    print("\n".join(wrong) if wrong else f"vale: {len(named)} pages and sources, {waiting} errors that hack/prose/pending.toml counts")
    return 1 if wrong else 0


def findings(named: Sequence[str]) -> list[Finding]:
    """What vale finds in those pages and sources, by page and line.

    Raises ClusterError if one is not there or vale cannot be built.
    """
    if absent := [page for page in named if not (ROOT / page).is_file()]:
        raise ClusterError(f"there is no page {absent[0]}; give paths as from the root of the repository")
    texts = [page for page in named if not page.endswith(".py")]
    code = [page for page in named if page.endswith(".py")]
    found = _asked(texts, ROOT) if texts else []
    if code:
        found += of_sources({path: extract((ROOT / path).read_text(encoding="utf-8")) for path in code})
    return sorted(found, key=lambda one: (one.page, one.line, one.rule))


def of_sources(texts: Mapping[str, list[Said]]) -> list[Finding]:
    """What is found in docstrings and messages, each with the line of its source; a mean belongs to all of a folder."""
    made = written(texts)
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, page in made.items():
            (Path(scratch) / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(scratch) / name).write_text("\n".join(page.lines) + "\n", encoding="utf-8")
        for one in _asked(list(made), Path(scratch)):
            origin = made[one.page].origins[one.line - 1]
            found.append(one if one.rule == MEAN else replace(one, page=origin.path, line=origin.line))
    return found


def _asked(named: Sequence[str], folder: Path) -> list[Finding]:
    """What vale finds in pages below a folder."""
    command = [str(vale()), "--config", str(HERE / "vale.ini"), "--output", "JSON", "--no-exit", *named]
    for _ in range(TRIES):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS)
        if done.returncode == 0 or SLOW not in done.stdout + done.stderr:
            break
    if done.returncode != 0:
        raise ClusterError(f"vale ended with {done.returncode}: {(done.stdout + done.stderr).strip()[-2000:]}")
    return [
        Finding(page, said["Line"], said["Check"], said["Message"], said["Severity"] == "error")
        for page, told in json.loads(done.stdout).items()
        for said in told
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
    return GoTool("vale", PACKAGE, MODULE, "the prose linter, once (a minute or two)", cgo=True).built(_go)


def _go() -> str:
    """The go command. Raises Unavailable, with the next step, where it or the C compiler that it calls is missing."""
    try:
        go = find_go()
    except Unavailable:
        raise Unavailable(
            "vale, the prose linter, is built by Go; install Go 1.26 or newer (https://go.dev/dl) and run this again"
        ) from None
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        raise Unavailable("vale, the prose linter, is built by Go with a C compiler; install gcc or clang")
    return go


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
