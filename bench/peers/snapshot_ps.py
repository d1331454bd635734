"""What a checkpoint of 1.0 GB takes from training: windows without and with a save, in turn.

One worker trains with Adam on 334 MB of parameters. A step is a sleep of `--what` milliseconds (default 100) in place of the compute, then
the optimizer's step; a save is asked for a second after its window's begin, and the window lasts until it is committed where ten seconds do
not hold it. The first save is not counted: it makes memory that the machine may never have touched. The added stop is the longest step
of a window with a save less the longest of the window without before it: a machine's own noise is in both. Beside it stand what the
shard's log says of the copies that pushes waited for, and the longest stall of a bare pass over memory in a process that does nothing else.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import clock
import job
import torch

import psjob

PAIRS = 5
SECONDS = 10.0
LEAD = 1.0
"""Seconds of a window, and how far into it the save is asked for."""
MEGABYTES = 334
BARE_BYTES = 64 << 20
COPIED = re.compile(r"pushes copied (\d+) of \d+ blocks, ([0-9.]+) ms")


def main() -> None:
    words = clock.asked(__doc__)
    if words.part:
        work(words)
        return
    words.optimizer, words.megabytes = "adam", MEGABYTES
    os.environ["PSJOB_LOG"] = "DEBUG"  # a shard tells of every save
    saved = {"intervalSeconds": 3600.0, "everySteps": None, "keep": 2, "disabled": False, "resumeFrom": None}
    with job.running(words, checkpoint=saved) as running:
        said, _ = running.workers[0].communicate(timeout=150 + 2 * (PAIRS + 1) * SECONDS)
    print(said, end="")


def work(words: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    folder = Path(os.environ["PSJOB_CONFIG"]).parent / "checkpoints"
    each = words.megabytes * 250_000 // words.tensors
    model = torch.nn.ParameterList([torch.zeros(each) for _ in range(words.tensors)])
    attached, optimizer = psjob.attach(model, torch.optim.Adam(model.parameters(), lr=clock.RATE))
    for parameter in attached.parameters():
        parameter.grad = torch.ones_like(parameter)
    compute = float(words.what or 100) / 1e3

    def window(save: bool, most: float = 6 * SECONDS) -> tuple[list[float], float]:
        """Seconds of each step that began in the window, and how long the save took, which may take more than the window up to `most`."""
        before = newest(folder)
        steps: list[float] = []
        begin, asked, saved = time.perf_counter(), 0.0, 0.0
        while (start := time.perf_counter()) < begin + (most if save and not saved else SECONDS):
            if save and not asked and start > begin + LEAD:
                asked = start
                psjob.checkpoint()
            time.sleep(compute)
            optimizer.step()
            steps.append(time.perf_counter() - start)
            if asked and not saved and newest(folder) > before:
                saved = time.perf_counter() - asked
        if save and not saved:
            raise RuntimeError(f"no checkpoint within {most - LEAD:.0f} s")
        return steps, saved

    job.check_road()
    _, first = window(True)
    pairs = []
    for _ in range(PAIRS):
        without, _ = window(False)
        pairs.append((without, *window(True)))
    usual = [statistics.median(without) for without, _, _ in pairs]
    beside = [(max(steps) - one) * 1e3 for (_, steps, _), one in zip(pairs, usual, strict=True)]
    plain = [(max(steps) - one) * 1e3 for (steps, _, _), one in zip(pairs, usual, strict=True)]
    stops = [one - other for one, other in zip(beside, plain, strict=True)]
    ratios = [statistics.mean(without) / statistics.mean(steps) for without, steps, _ in pairs]
    copies = [(int(found[1]), float(found[2])) for found in COPIED.finditer((folder.parent / "shard-0.log").read_text())][-PAIRS:]
    step = f"a step {statistics.median(usual) * 1e3:.0f} ms"
    every = f"{_each(stops)}: {_each(beside)} beyond the usual one, {_each(plain)} without a save; {step}"
    saves = f"{_each(ratios, 2)}; a save takes {_each([seconds for _, _, seconds in pairs], 1)} s, the first {first:.1f} s"
    waited = max(ms for _, ms in copies)
    blocks = f"{_each([count for count, _ in copies])} blocks"
    clock.answer_rows(
        [
            clock.row("longest added stop of a step", statistics.median(stops), "ms", most=30.0, note=every),
            clock.row("steps beside a save", statistics.median(ratios), "of those without", least=0.85, note=saves),
            clock.row("copies that pushes waited for in the worst save", waited, "ms", most=30.0, note=blocks),
            clock.row("longest stall of a bare pass over memory", bare(), "ms in 10 s"),
        ]
    )
    os._exit(0)  # without a last checkpoint


def bare() -> float:
    """Milliseconds by which the slowest of equal passes took longer than the usual one, while nothing trains."""
    memory = torch.zeros(BARE_BYTES // 4)
    end = time.perf_counter() + SECONDS
    passes = []
    while (start := time.perf_counter()) < end:
        memory.add_(1.0)
        passes.append(time.perf_counter() - start)
    return (max(passes) - statistics.median(passes)) * 1e3


def _each(values: Sequence[float], digits: int = 0) -> str:
    return ", ".join(f"{value:.{digits}f}" for value in values)


def newest(folder: Path) -> int:
    """The step of the newest checkpoint, -1 for none."""
    return max((int(path.stem.rsplit("-s", 1)[1]) for path in folder.glob("**/manifest-*.json")), default=-1)


if __name__ == "__main__":
    main()
