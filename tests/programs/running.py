"""Runs a program of `programs.toml`: its reference, and in a job by sync, with a killed shard, with a killed worker, and async."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.frameworks import IMPORTS, OFFLINE
from tests.programs import data, packages
from tests.programs.edits import changed, edited, seeded
from tests.support import warm

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WORKERS, SHARDS = 2, 2
DIFFER = 4
"""How `psjob run` ends if workers came apart."""
SECONDS = 280.0
"""For a program that takes a few, on a busy machine."""


@dataclass(frozen=True)
class Program:
    """A row of `programs.toml`."""

    name: str
    package: str
    """Whose program it is, or whose interface it drives."""
    source: str
    """`archive:PATH` in the source archive, `apart:PATH` and `site:PATH` of the wheel, or `own:FILE` of this folder."""
    final: str
    """A pattern of the lines that say the loss."""
    edits: tuple[tuple[str, str], ...] = ()
    tried: tuple[tuple[str, str], ...] = ()
    """What makes a program short enough for a test, or lets it read the data there is: the reference has it too, and it does not count."""
    words: tuple[str, ...] = ()
    data: str = ""
    seeded: bool = False
    """It seeds its generators itself."""
    reference: str = "ddp"
    reference_words: tuple[str, ...] = ()
    shard: int = 5
    """A shard is killed at this step."""
    worker: int = 6
    """And a worker at this one, in another run."""
    training: tuple[tuple[str, str], ...] = ()
    """Fields of `training` that its page says."""
    tolerance: float = 1e-6
    """Of weights; ten times as much of losses. A value's last bit depends on where a vector is cut, and on the order of a norm's sum."""
    why: str = ""
    """Where more is allowed: why."""
    quick: bool = False
    """`make test` runs it."""
    wrong: tuple[tuple[str, str], ...] = ()
    """By mode, what psjob does not do right yet, or refuses."""

    @property
    def own(self) -> bool:
        """Written here, in words of this project, as the package's documentation drives its interface."""
        return self.source.startswith("own:")

    def file(self) -> Path:
        """The program as its package has it."""
        kind, _, path = self.source.partition(":")
        if kind == "own":
            return HERE / "own" / path
        if kind == "archive":
            return packages.archive(self.package) / path
        return packages.site().parent / kind / path

    def texts(self) -> tuple[str, str]:
        """Before its edit and after it; an own program has the lines of its edit marked, as those of docs are."""
        text = self.file().read_text()
        if self.own:
            return "".join(line for line in text.splitlines(keepends=True) if "# new" not in line), text
        text = edited(text, self.tried, self.name)
        return text, edited(text, self.edits, self.name)

    def lines(self) -> int:
        """How many lines its edit changes."""
        before, after = self.texts()
        return changed(before, after)

    def wrong_in(self, mode: str) -> str:
        """What is wrong in that mode, empty where it is right."""
        return dict(self.wrong).get(mode, "")


@cache
def table() -> dict[str, Program]:
    """All programs, by name."""
    rows = tomllib.loads((HERE / "programs.toml").read_text())["program"]
    return {row["name"]: Program(**{key: _frozen(value) for key, value in row.items()}) for row in rows}


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((key, each) for key, each in value.items())
    return tuple(_frozen(each) for each in value) if isinstance(value, list) else value


@dataclass(frozen=True)
class Ran:
    """A run that has ended."""

    code: int
    output: str
    seconds: float
    weights: dict[str, torch.Tensor]
    losses: list[str]
    restarted: bool = False


def laid(program: Program, folder: Path) -> Path:
    """Put the edited program and its data into a new folder; the file to run."""
    folder.mkdir()
    data.MAKERS[program.data](folder)
    source = program.file()
    place = folder / "program"
    place.mkdir()
    if not program.own:
        for beside in source.parent.glob("*.py"):
            shutil.copy(beside, place / beside.name)
    text = program.texts()[1]
    file = place / source.name
    file.write_text(text if program.seeded or program.own else seeded(text))
    return file


def environment(program: Program, folder: Path) -> dict[str, str]:
    """Of its processes."""
    paths = [str(ROOT)] if not packages.beside(program.package) else [str(packages.site()), str(ROOT)]
    return {
        **OFFLINE,
        "PYTHONPATH": os.pathsep.join(paths),
        "MPLBACKEND": "agg",
        "HOME": str(folder),
        "PYTHONWARNINGS": "ignore",
    }


def referred(program: Program, folder: Path) -> Ran:
    """The program under its reference. Raises AssertionError if it fails."""
    file = laid(program, folder)
    words = [program.reference, str(WORKERS), "weights", str(file), *program.words, *program.reference_words]
    begin = time.monotonic()
    code, output = warm.call(folder, "tests.programs.reference", words, environment(program, folder), SECONDS, IMPORTS)
    seconds = time.monotonic() - begin
    assert code == 0, output[-4000:]
    return Ran(code, output, seconds, load_file(folder / "weights"), re.findall(program.final, output))


def in_job(program: Program, folder: Path, mode: str = "sync") -> Ran:
    """The program in a job of 2 workers and 2 shards; `mode` is sync, shard or worker (sync, with a kill of one), or async."""
    file = laid(program, folder)
    container = {
        "name": "worker", "image": "none", "command": ["python", str(file), *program.words],
        "env": [{"name": key, "value": value} for key, value in environment(program, folder).items()],
    }  # fmt: skip
    spec = {
        "training": {"mode": "async" if mode == "async" else "sync", "seed": 0, **dict(program.training)},
        "shards": {"replicas": SHARDS},
        "workers": {"replicas": WORKERS, "template": {"spec": {"containers": [container]}}},
        "checkpoint": {"periodSeconds": 3600, "everySteps": 3},
    }
    job = {"apiVersion": "psjob.dev/v1alpha1", "kind": "PSTrainingJob", "metadata": {"name": "job"}, "spec": spec}
    (folder / "job.yaml").write_text(json.dumps(job))
    argv = ["run", "job.yaml", "--no-progress", "--summary", "summary.json"]
    if mode in ("shard", "worker"):
        argv += ["--fault", f"kill:shard-1@step={program.shard}" if mode == "shard" else f"kill:worker-1@step={program.worker}"]
    begin = time.monotonic()
    code, output = warm.run(folder, argv, environment(program, folder), SECONDS, IMPORTS)
    seconds = time.monotonic() - begin
    finals = list(folder.glob(".psjob/*/final.safetensors"))
    summary = json.loads((folder / "summary.json").read_text()) if (folder / "summary.json").exists() else {}
    weights = load_file(finals[0]) if finals else {}
    return Ran(code, output, seconds, weights, re.findall(program.final, output), bool(summary.get("restarts")))


def farthest(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest difference of a value from the reference's, and in which tensor. Raises KeyError for one that the reference lacks."""
    worst, where = 0.0, ""
    for key, value in found.items():
        there = _there(wanted, key)
        if value.shape != there.shape:
            return float("inf"), key
        differs = 0.0 if value.equal(there) else float((value.double() - there.double()).abs().max())
        if not differs <= worst:
            worst, where = differs, key
    return worst, where


def _as_finite(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    """Whether all values are finite that are so in the reference; a bound may be infinite."""
    return all(bool((value.isfinite() | ~_there(wanted, key).isfinite()).all()) for key, value in found.items())


def _there(wanted: dict[str, torch.Tensor], key: str) -> torch.Tensor:
    """The reference's, whose models have a name where those of a job need none. Raises KeyError."""
    return wanted[key if key in wanted else f"0.{key}"]


def told(output: str) -> str:
    """The last sentence of psjob's in an output, or its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("psjob: ") and not line.startswith("psjob: waiting")]
    return (ours or lines or ["it printed nothing"])[-1]


def verdict(program: Program, mode: str, ran: Ran, reference: Ran) -> str:
    """Empty where the run is right; else what is wrong with it, in a line."""
    if ran.code == DIFFER:
        line = next(line for line in reversed(ran.output.splitlines()) if line.startswith("Workers differ: "))
        return f"told: {re.split(r'; [0-9]+ steps in', line)[0]}"
    if ran.code:
        refused = told(ran.output).startswith("psjob: ") and "Traceback" not in ran.output
        return f"{'refused' if refused else f'exit code {ran.code}'}: {told(ran.output).removeprefix('psjob: ')}"
    if mode == "async":
        return "" if ran.weights and _as_finite(ran.weights, reference.weights) else "its weights are not finite"
    if mode in ("shard", "worker") and not ran.restarted:
        return "nothing was killed: it makes fewer steps"
    if not ran.weights:
        return "no weights were trained"
    differs, where = farthest(ran.weights, reference.weights)
    if not differs <= program.tolerance:
        return f"weights differ by {differs:.2g}, the most in {where}"
    if not ran.losses or not reference.losses:
        return f"no line says its loss: {program.final}"
    compared = zip(ran.losses, reference.losses, strict=False) if mode == "sync" else [(ran.losses[-1], reference.losses[-1])]
    for found, wanted in compared:
        if not math.isclose(float(found), float(wanted), rel_tol=10 * program.tolerance, abs_tol=10 * program.tolerance):
            return f"a loss is {found} and not {wanted}"
    return ""
