"""What a checkpoint takes from training: windows without and with a save, in turn.

    python bench/peers/snapshot_ps.py --megabytes 334 --optimizer adam --seconds 10

One worker trains with Adam on 334 MB of parameters, so that a checkpoint has 1.0 GB. A step is a sleep of `--what` milliseconds (default
100) in place of the compute, then the optimizer's step; a window has `--seconds`, and a save is asked for a tenth of it after its begin.
The first save makes files and memory that the machine may never have touched, and is not counted. Prints a line a pair, then JSON: `stop`,
the longest step of a window with a save less the median of the window without, `plain`, the same inside the window without, both in ms,
`ratio`, steps with over steps without, and `save`, seconds from asking to the commit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import clock
import job
import torch

import psjob

PAIRS = 3


def main() -> None:
    words = clock.asked(__doc__)
    if words.part:
        work(words)
        return
    saved = {"intervalSeconds": 3600.0, "everySteps": None, "keep": 2, "disabled": False, "resumeFrom": None}
    with job.running(words, checkpoint=saved) as running:
        said, _ = running.workers[0].communicate(timeout=120 + 2.5 * PAIRS * words.seconds)
    print(said, end="")


def work(words: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    folder = Path(os.environ["PSJOB_CONFIG"]).parent / "checkpoints"
    each = words.megabytes * 250_000 // words.tensors
    model = torch.nn.ParameterList([torch.zeros(each) for _ in range(words.tensors)])
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    attached, optimizer = psjob.attach(model, kinds[words.optimizer](model.parameters(), lr=clock.RATE))
    for parameter in attached.parameters():
        parameter.grad = torch.ones_like(parameter)
    compute = float(words.what or 100) / 1e3

    def window(save: bool) -> tuple[list[float], float]:
        """Seconds of each step that began in the window, and how long the save took."""
        before = newest(folder)
        steps: list[float] = []
        begin, asked, saved = time.perf_counter(), 0.0, 0.0
        while (start := time.perf_counter()) < begin + words.seconds:
            if save and not asked and start > begin + words.seconds / 10:
                asked = start
                psjob.checkpoint()
            time.sleep(compute)
            optimizer.step()
            steps.append(time.perf_counter() - start)
            if asked and not saved and newest(folder) > before:
                saved = time.perf_counter() - asked
        if save and not saved:
            raise RuntimeError(f"no checkpoint within {words.seconds * 0.9:.0f} s")
        return steps, saved

    window(True)
    found: dict[str, list[float]] = {"stop": [], "plain": [], "ratio": [], "save": []}
    for _ in range(PAIRS):
        without, _ = window(False)
        beside, seconds = window(True)
        usual = statistics.median(without)
        row = {"stop": (max(beside) - usual) * 1e3, "plain": (max(without) - usual) * 1e3}
        row |= {"ratio": len(beside) / len(without), "save": seconds}
        for key, value in row.items():
            found[key].append(value)
        print(
            f"step {usual * 1e3:.0f} ms; longest +{row['plain']:.0f} ms without a save, +{row['stop']:.0f} ms with one of {seconds:.1f} s; "
            f"steps {len(beside)}/{len(without)} = {row['ratio']:.2f}", flush=True,
        )  # fmt: skip
    print(json.dumps(found), flush=True)
    os._exit(0)  # without a last checkpoint


def newest(folder: Path) -> int:
    """The step of the newest checkpoint, -1 for none."""
    return max((int(path.stem.rsplit("-s", 1)[1]) for path in folder.glob("**/manifest-*.json")), default=-1)


if __name__ == "__main__":
    main()
