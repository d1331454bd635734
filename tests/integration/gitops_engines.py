"""The engines of Argo CD and Flux as one real program (hack/cluster/modules/gitops), and the table of docs/gitops.md to compare with."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from hack.argocd import SETTINGS
from hack.cluster.paths import REPO, program
from tests.integration.operator_harness import World

EXAMPLES = REPO / "examples" / "gitops"
PAGE = REPO / "docs" / "gitops.md"
JOBS, UNTIL_COMPLETE = EXAMPLES / "flux" / "jobs.yaml", EXAMPLES / "flux" / "jobs-until-complete.yaml"
SECONDS = 60.0
T = TypeVar("T")
COLUMNS = ("argo", "argoUntilComplete", "kstatus", "flux", "fluxUntilComplete")
"""Of the table, after what the job does and by what it is known."""


@dataclass
class Engines:
    """The program with some of its words; `ask` may be called again and again."""

    words: tuple[str, ...]
    _process: subprocess.Popen[str] | None = field(default=None, repr=False)

    def ask(self, line: Mapping[str, Any]) -> Any:
        """Its answer to one object. AssertionError with its words where it ends."""
        if self._process is None:
            command = [str(program("gitops")), *self.words]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        process = self._process
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        late = threading.Timer(SECONDS, process.kill)
        late.start()
        try:
            process.stdin.write(json.dumps(line) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            late.cancel()
        assert answer, f"gitops {' '.join(self.words)} ended: {process.stderr.read()}"
        return json.loads(answer)

    def close(self) -> None:
        """End it: it reads to the end of its input, and takes away what it made."""
        if self._process is not None:
            self._process.communicate(timeout=SECONDS)
            self._process = None


@dataclass
class Judges:
    """Everyone who says how a job is, in both ways: a job that trains is ready, or is only when it is complete."""

    running: Engines
    complete: Engines

    @classmethod
    def of(cls, folder: Path) -> Judges:
        """With the settings that users paste; files are made in `folder`."""
        text = SETTINGS.read_text()
        assert text.count("local until_complete = false") == 1
        waiting = folder / "argocd-cm.yaml"
        waiting.write_text(text.replace("local until_complete = false", "local until_complete = true"))
        running, complete = health_checks(JOBS, folder / "running.yaml"), health_checks(UNTIL_COMPLETE, folder / "complete.yaml")
        return cls(Engines(("verdicts", str(SETTINGS), str(running))), Engines(("verdicts", str(waiting), str(complete))))

    def ask(self, live: Mapping[str, Any]) -> dict[str, str]:
        """The verdict of each by column of the table."""
        one, other = self.running.ask(live), self.complete.ask(live)
        assert one["kstatus"] == other["kstatus"]
        return dict(zip(COLUMNS, (one["argo"], other["argo"], one["kstatus"], one["flux"], other["flux"]), strict=True))

    def close(self) -> None:
        """End their programs."""
        self.running.close()
        self.complete.close()


@dataclass(frozen=True)
class Row:
    """A line of the table: what must hold of a job for it, and the verdicts."""

    about: str
    known_by: tuple[str, ...]
    verdicts: dict[str, str]

    def fits(self, live: Mapping[str, Any]) -> bool:
        """Whether the line is about this object."""
        return all(holds(mark, live) for mark in self.known_by)


def holds(mark: str, live: Mapping[str, Any]) -> bool:
    """Whether what the table says between backquotes is so: a condition such as Ready=True, or one of two words about metadata."""
    status = live.get("status") or {}
    if mark == "metadata.deletionTimestamp":
        return "deletionTimestamp" in live["metadata"]
    if mark == "status.observedGeneration":
        return bool(status.get("observedGeneration") != live["metadata"]["generation"])
    kind, equals, truth = mark.partition("=")
    assert equals, f"{PAGE.name}: {mark} is no mark of a job"
    return any(one["type"] == kind and one["status"] == truth for one in status.get("conditions") or [])


def table() -> list[Row]:
    """The table of docs/gitops.md."""
    rows = []
    for line in PAGE.read_text().partition("## What each engine says")[2].partition("\n## ")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == len(COLUMNS) + 2 and "`" in cells[1]:
            rows.append(Row(cells[0], tuple(re.findall(r"`([^`]+)`", cells[1])), dict(zip(COLUMNS, cells[2:], strict=True))))
    assert len(rows) > 5, f"{PAGE.name} has no table"
    return rows


def row_of(live: Mapping[str, Any], rows: Iterable[Row]) -> Row:
    """The first line that fits."""
    found = next((row for row in rows if row.fits(live)), None)
    assert found is not None, f"no line of {PAGE.name} is about {live.get('status')}"
    return found


def steady(place: World, name: str, check: Callable[[dict[str, Any]], T]) -> T:
    """What `check` says of the live object, where that object was not written meanwhile: both sides of a difference are of one moment."""
    for _ in range(20):
        live = place.job(name)
        found = check(live)
        if place.job(name)["metadata"]["resourceVersion"] == live["metadata"]["resourceVersion"]:
            return found
    raise AssertionError(f"{name} is written too often to be compared")


def health_checks(example: Path, target: Path) -> Path:
    """Write spec.healthCheckExprs of the example's Kustomization as a file of its own."""
    (found,) = (
        one["spec"]["healthCheckExprs"] for one in yaml.safe_load_all(example.read_text()) if "healthCheckExprs" in one.get("spec", {})
    )
    target.write_text(yaml.safe_dump(found))
    return target
