"""What a delay costs: accuracy of examples/digits and loss of examples/charlm in sync with delay 1 against 0, five seeds each.

`--what digits`, `--what charlm` run jobs, each as `psjob run JOB.yaml --set spec.training.delay=1 --set spec.training.seed=N`. Digits train
with their own rate of 0.2, which is too high with momentum 0.9 and a delay, and with a quarter of it.
`--what simulated` trains digits-64 on the simulator's clock instead, with an exchange of 78 % of a step. A row is the mean of the seeds.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import clock

ROOT = Path(__file__).resolve().parents[2]
SEEDS = range(5)
DIGITS, CHARLM = "examples/digits/job.yaml", "examples/charlm/job-sync.yaml"
METRICS = {DIGITS: ("test_accuracy", 100.0, "%"), CHARLM: ("unseen_loss", 1.0, "nats")}
"""By manifest: the metric of its script, the factor to its unit, the unit."""
TRAININGS = {"digits": ((DIGITS, "", None), (DIGITS, "--lr=0.05", 0.5)), "charlm": ((CHARLM, "", 0.06),)}
"""By `--what`: manifest, word of its script, and how much worse the mean with a delay may be in that unit (None: told only)."""
WORKERS = (1, 4, 8, 16)
MODES = ("sync", "sync:delay=1", "async", "async:delay=1")
EXCHANGE = ("--up", "50", "--down", "50")


def main() -> None:
    words = clock.asked(__doc__)
    if words.what == "simulated":
        clock.answer_rows([row for rule in ("nag", "plain") for workers in WORKERS for row in simulated(rule, workers)])
        return
    asked = [one for what, ones in TRAININGS.items() if words.what in (what, "") for one in ones]
    clock.answer_rows([row for one in asked for row in trained(*one)])


def trained(job: str, word: str, worse: float | None) -> list[dict[str, Any]]:
    """Rows of an example without a delay and with one; the second has the limit."""
    metric, factor, unit = METRICS[job]
    found = {delay: [factor * ended(job, word, delay, seed)["metrics"][metric] for seed in SEEDS] for delay in (0, 1)}
    before, limits = statistics.mean(found[0]), dict[str, float]()
    if worse is not None:
        limits["least" if unit == "%" else "most"] = before - worse if unit == "%" else before + worse
    title = f"{job} {word}: {metric.replace('_', ' ')}, sync"
    return [
        clock.row(title, before, unit, note=spread(found[0])),
        clock.row(f"{title}, delay 1", statistics.mean(found[1]), unit, note=spread(found[1]), **limits),
    ]


def ended(job: str, word: str, delay: int, seed: int) -> dict[str, Any]:
    """The summary of a run. Raises RuntimeError with its last words if it failed."""
    with tempfile.TemporaryDirectory(prefix="psjob-delay-") as folder:
        summary = Path(folder) / "summary.json"
        words = ["--set", f"spec.training.delay={delay}", "--set", f"spec.training.seed={seed}", "--no-progress", "--summary", str(summary)]
        if word:
            words += ["--set", f"spec.workers.template.spec.containers[0].args={json.dumps([word])}"]
        done = psjob("run", str(ROOT / job), *words, folder=folder)
        if done.returncode:
            raise RuntimeError(f"psjob run {job} with delay {delay} and seed {seed} ended with {done.returncode}: {done.stderr[-300:]}")
        found: dict[str, Any] = json.loads(summary.read_text())
        return found


def simulated(rule: str, workers: int) -> list[dict[str, Any]]:
    """A row of each mode: the accuracy of digits-64 by this rule."""
    scores: dict[str, list[float]] = {mode: [] for mode in MODES}
    for seed in SEEDS:
        words = ["--workers", str(workers), "--rule", rule, "--seed", str(seed), "--time-seed", str(1000 + seed), *EXCHANGE]
        done = psjob("simulate", "compare", *words, *(word for mode in MODES for word in ("--mode", mode)), "-o", "json")
        if done.returncode:
            raise RuntimeError(f"psjob simulate compare ended with {done.returncode}: {done.stderr[-300:]}")
        for one in json.loads(done.stdout):
            scores[one["mode"]].append(100 * one["score"])
    return [
        clock.row(f"digits-64 simulated, {rule}, {workers} workers, {mode}", statistics.mean(found), "%", note=spread(found))
        for mode, found in scores.items()
    ]


def spread(found: Sequence[float]) -> str:
    return f"± {statistics.stdev(found):.2g} of {len(found)} seeds"


def psjob(*words: str, folder: str | None = None) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "psjob_client.cli.main", *words]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=900, check=False)


if __name__ == "__main__":
    main()
