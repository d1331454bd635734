"""Sides as real jobs of this machine, one after another: each is one `psjob run`."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from psjob_client.compare.outcome import SideOutcome
from psjob_client.compare.sides import Side
from psjob_client.local.backend import GRACE
from psjob_client.local.children import die_with

LOOK = 0.2
"""Seconds between two looks at a run."""
Told = Callable[[str], None]


def train(side: Side, deadline: float, told: Told) -> SideOutcome:
    """Run a side to its end; `told` hears how far it is. After `deadline` seconds it is stopped, and counts as far as it came.

    Ends the job also where the caller is interrupted. A job that failed is an outcome with the reason.
    """
    words = ["psjob", "run", str(side.manifest), *(word for setting in side.settings for word in ("--set", setting))]
    with tempfile.TemporaryDirectory(prefix="psjob-compare-") as folder:
        history, summary, said = (Path(folder) / name for name in ("history", "summary", "said"))
        argv: list[str | Path] = [
            sys.executable,
            "-m",
            "psjob_client.cli.main",
            *words[1:],
            "--no-progress",
            "--history",
            history,
            "--summary",
            summary,
        ]
        with said.open("wb") as output:
            stop = _watched(argv, output, history, time.monotonic() + deadline, told)
        lines, ended = _lines(history), _json(summary)
        last = (said.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
    result = f"stopped after {deadline:g} s" if stop else str(ended.get("result") or "Failed")
    if result == "Failed":
        result = f"Failed: {ended.get('failure') or last}"
    return outcome(side.title, shlex.join(words), result, lines, ended)


def outcome(title: str, command: str, result: str, lines: Iterable[Mapping[str, Any]], ended: Mapping[str, Any]) -> SideOutcome:
    """What a run came to, by the lines of its `--history` and its `--summary`. Time begins when the first worker trains."""
    lines = list(lines)
    passed = [(float(at), float(step)) for line in lines for step, at in line["passed"]]
    began = next((float(line["began"]) for line in lines if line.get("began") is not None), passed[0][0] if passed else 0.0)
    curves: dict[str, list[tuple[float, float, float]]] = {}
    for line in lines:
        for name, value in line["metrics"].items():
            curve = curves.setdefault(name, [])
            if not curve or curve[-1][2] != value:
                curve.append((max(0.0, line["time"] - began), float(line["step"]), float(value)))
    elapsed, steps = (passed[-1][0] - began, passed[-1][1] - min(float(lines[0]["step"]), passed[0][1])) if passed else (0.0, 0.0)
    # A summary without lag is that of a sync job: no push comes late there.
    lag = float((ended.get("lag") or {"mean": 0.0})["mean"]) if steps and ended else None
    last = lines[-1] if lines else {}
    lags, gaps = (_buckets(last.get(name), float(ended.get("applied") or 0)) for name in ("lag", "gap"))
    idle = last.get("idle") or ()
    told = ("warning", "non_finite", "large_push", "diverged", "drift", "data_problem")
    warnings = [str(ended[what]) for what in told if ended.get(what)]
    return SideOutcome(
        title, command, result, elapsed, steps, curves, dict(ended.get("metrics") or {}), lags, gaps,
        () if None in idle else idle, mean_lag=lag, warnings=warnings, diverged=bool(ended.get("diverged")),
    )  # fmt: skip


def _buckets(told: Mapping[str, Any] | None, applied: float) -> list[tuple[float | None, float]]:
    """(upper bound, pushes) of a histogram of contract.STATUS_KEYS; that of a sync job is empty, and all that were `applied` are at 0."""
    if not told or not told["count"]:
        return [(0.0, applied)] if told and applied else []
    edges, below = zip(*told["buckets"], strict=True)
    counts = [here - before for here, before in zip((*below, told["count"]), (0, *below), strict=True)]
    return list(zip((*edges, None), counts, strict=True))


def _watched(argv: list[str | Path], output: Any, history: Path, until: float, told: Told) -> bool:
    """Whether it was stopped for its deadline."""
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=die_with(os.getpid())
    )
    try:
        while time.monotonic() < until:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LOOK)
                return False
            last = _whole(history)[-1:]
            told(f"step {json.loads(last[0])['step']}" if last else "starting")
        return True
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """As a user does: Ctrl-C, which makes a last checkpoint; once more, which kills."""
    for patience in (GRACE, GRACE):
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)
    if process.poll() is None:
        process.kill()
        process.wait()


def _lines(history: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in _whole(history)]


def _whole(history: Path) -> list[str]:
    """The whole lines of a history that may still grow."""
    text = history.read_text() if history.exists() else ""
    return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found
