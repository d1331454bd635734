"""Real jobs whose workers sleep, in each mode that a job can name, against what the simulator predicts for the same step times.

One worker always takes 4 times as long, or 5 % of all steps 5 times. The factor is of pushes that count a second, over sync's, once the
first moments are over, in which a bound does not bind yet.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import clock
import torch

import psjob as ps
from psjob.simulate.engine import Stall, Trace, WorkerSpeeds, simulate
from psjob.simulate.words import mode_of

WORKERS = 4
WARM, SECONDS = 2.0, 10.0
"""How long each worker trains before it counts, and in all."""
STEP = 0.05
SEED = 3
PROFILES = {
    "one worker 4 times as long": WorkerSpeeds(STEP, slow={0: 4.0}),
    "5 % of steps 5 times as long": WorkerSpeeds(STEP, stall=Stall(0.05, factor=5.0)),
}
WANTED = {
    ("one worker 4 times as long", "backup:1"): (0.8, 1.2),
    ("one worker 4 times as long", "async"): (0.8, 1.2),
    ("one worker 4 times as long", "bounded:3"): (0.8, 1.2),
    ("5 % of steps 5 times as long", "bounded:3"): (0.8, 1.2),
}
"""Limits of the served factor over the predicted one; others are told only."""
SAME = ("one worker 4 times as long", "bounded:3", 0.9, 1.1)
"""A bound is no help against a worker that is always slow: the served factor itself is to be so near to 1."""
MODES = ("sync", "bounded:3", "async", "backup:1")


def main() -> None:
    words = clock.asked(__doc__)
    if words.part:
        work(words)
        return
    rows: list[dict[str, Any]] = []
    for profile, speeds in PROFILES.items():
        base: tuple[float, float] | None = None
        for mode in MODES:
            what = f"{profile}: {mode} over sync"
            try:
                pushes, served_rate = served(mode, profile)
            except LookupError as error:
                rows.append({"what": what, "missing": str(error)})
                continue
            rates = served_rate, simulated(mode, speeds, pushes)
            base = base or rates
            if mode != "sync":
                rows += told(profile, mode, what, rates[0] / base[0], rates[1] / base[1])
    clock.answer_rows(rows)


def told(profile: str, mode: str, what: str, factor: float, predicted: float) -> list[dict[str, Any]]:
    """Rows of a mode: the served factor over the predicted one, and where it is to be 1, the factor itself."""
    least, most = WANTED.get((profile, mode), (None, None))
    note = f"served {factor:.2f}, simulated {predicted:.2f}"
    found = [clock.row(what, factor / predicted, "of it", most=most, least=least, note=note)]
    if (profile, mode) == SAME[:2]:
        found.append(clock.row(f"{what}, itself", factor, "times", least=SAME[2], most=SAME[3]))
    return found


def simulated(mode: str, speeds: WorkerSpeeds, pushes: int) -> float:
    """Pushes that count a second after WARM, in a simulation of so many."""
    counted = Counted()
    elapsed = simulate(mode_of(mode), WORKERS, speeds, pushes, SEED, trace=counted).elapsed
    return sum(at > WARM for at in counted.times) / (elapsed - WARM)


class Counted(Trace):
    """When pushes counted."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def flush(self) -> None:
        self.times += (row[0] for row in self.rows if row[4])
        super().flush()


def served(mode: str, profile: str) -> tuple[int, float]:
    """Pushes of a job in `mode`, and how many a second count after WARM. Raises LookupError with the sentence that refuses the mode."""
    from psjob_client.compare.sides import side_of
    from psjob_client.local.manifest import read_job
    from psjob_client.problems import BadInput
    from psjob_operator.api.spec import Training

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.yaml"
        path.write_text(json.dumps(manifest(profile)))
        side = side_of(mode, path, Training())
        try:
            read_job(path, side.settings)
        except BadInput as error:
            raise LookupError(str(error).replace(f"{path}: ", "")) from None
        summary = Path(folder) / "summary.json"
        command = [sys.executable, "-m", "psjob_client.cli.main", "run", str(path), "--no-progress", "--summary", str(summary)]
        for setting in side.settings:
            command += ["--set", setting]
        ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
        if ended.returncode:
            raise RuntimeError(f"psjob run in mode {mode} ended with {ended.returncode}: {ended.stderr[-300:]}")
        found = json.loads(summary.read_text())
        rates = [json.loads(file.read_text()) for file in Path(folder).glob("rate-*.json")]
    return int(found["pushes"]), sum(rates) * found["applied"] / found["pushes"]


def manifest(profile: str) -> dict[str, Any]:
    container = {
        "name": "worker",
        "image": "none",
        "command": ["python", str(Path(__file__).resolve()), "--part", "worker", "--what", profile],
    }
    return {
        "apiVersion": "psjob.dev/v1alpha1", "kind": "PSTrainingJob", "metadata": {"name": "modes"},
        "spec": {
            "shards": {"replicas": 1}, "checkpoint": {"disabled": True},
            "workers": {"replicas": WORKERS, "template": {"spec": {"containers": [container]}}},
        },
    }  # fmt: skip


def work(words: argparse.Namespace) -> None:
    """What a worker does: sleep as long as the simulator's worker of its rank takes, and push."""
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 1)
    model, optimizer = ps.attach(net, torch.optim.SGD(net.parameters(), lr=1e-3))
    times, x = PROFILES[words.what].draws(WORKERS, SEED)[ps.rank()], torch.ones(4, 8)
    began = now = time.monotonic()
    first = (0, began)
    while now < began + SECONDS:
        if now < began + WARM:
            first = (ps.step(), now)
        time.sleep(next(times))
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        now = time.monotonic()
    Path(f"rate-{ps.rank()}.json").write_text(json.dumps((ps.step() - first[0]) / (now - first[1])))


if __name__ == "__main__":
    main()
