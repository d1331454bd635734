"""One run of one program, and what its row says."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.envs import ROOT, Missing, environment_of, python_of, tree_of
from bench.measures import Against, Alone, Program

RETRIES = 2
"""A row bears so many runs that fail; it has its pairs all the same."""
TRIES = 4
"""A row that is to be calm has at most so many tries for each of its pairs."""
SAME_LOSS = 0.01
"""Two programs that tell a loss have done the same work where their losses differ by no more than this share."""


def rows_of(measure: Against | Alone, pairs: int, calm: float, word: str) -> Iterator[dict[str, Any]]:
    """The rows of a measure, each as soon as it is there; one that could not be made says why under `missing`.

    `stolen` is the share of the cores' time that a hypervisor gave to others meanwhile. Pairs above `calm` are made again.
    A comparison is made with those peers that have `word` in their title.
    """
    if isinstance(measure, Against):
        for peer, target in measure.peers:
            if word.lower() not in peer.title.lower():
                continue
            yield {"measure": measure.name, "peer": peer.title, "least": target or None} | compare(measure.ours, peer, pairs, calm)
        return
    try:
        with Stolen() as stolen:
            rows = last_line(measure.program)["rows"]
        for row in rows:
            yield {"measure": measure.name, **row, "stolen": stolen.share}
    except Missing as missing:
        yield {"measure": measure.name, "what": measure.about, "missing": str(missing)}


def compare(ours: Program, peer: Program, pairs: int, calm: float) -> dict[str, Any]:
    """Medians in ms and the ratio of each pair (peer over ours), or `missing` with the reason."""
    mine: list[float] = []
    theirs: list[float] = []
    stolen: list[float] = []
    failed: list[str] = []
    disturbed = 0
    while len(mine) < pairs:
        try:
            with Stolen() as now:
                pair = together(last_line(ours), last_line(peer))
        except Missing as missing:
            failed.append(str(missing))
            if len(failed) > RETRIES or not mine:
                return {"missing": failed[-1]}
            continue
        if now.share > calm:
            disturbed += 1
            if disturbed > (TRIES - 1) * pairs:
                return {"missing": f"more than {calm:.0%} of the cores' time was stolen in {disturbed} of {disturbed + len(mine)} pairs"}
            continue
        mine.append(pair[0])
        theirs.append(pair[1])
        stolen.append(now.share)
    ratios = [their / my for my, their in zip(mine, theirs, strict=True)]
    return {
        "oursMs": statistics.median(mine) * 1e3, "peerMs": statistics.median(theirs) * 1e3,
        "figure": statistics.median(ratios), "ratios": ratios, "failedRuns": len(failed),
        "stolen": statistics.median(stolen), "disturbedPairs": disturbed,
    }  # fmt: skip


class Stolen:
    """The `share` of all cores' time that others of the same host had while this was entered; 0 where the system does not say."""

    def __enter__(self) -> Stolen:
        self.share = 0.0
        self._before = _cpu_times()
        return self

    def __exit__(self, *_: object) -> None:
        spent = [now - then for now, then in zip(_cpu_times(), self._before, strict=True)]
        if sum(spent):
            self.share = spent[7] / sum(spent)


def _cpu_times() -> list[int]:
    """user, nice, system, idle, iowait, irq, softirq, steal: since boot, in ticks (proc(5))."""
    try:
        return [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return [0] * 8


def verdict(row: dict[str, Any]) -> str:
    """`ok`, `missed`, `missing`, or nothing where the row has no limit."""
    if "missing" in row:
        return "missing"
    least, most = row.get("least"), row.get("most")
    if least is None and most is None:
        return ""
    return "ok" if (least is None or row["figure"] >= least) and (most is None or row["figure"] <= most) else "missed"


def together(ours: dict[str, Any], peer: dict[str, Any]) -> tuple[float, float]:
    """Median seconds of a cycle on both sides. Raises Missing if both tell a loss and it is not the same."""
    losses = [answer["loss"] for answer in (ours, peer) if "loss" in answer]
    if len(losses) == 2 and abs(losses[0] - losses[1]) > SAME_LOSS * abs(losses[1]):
        raise Missing(f"psjob's loss is {losses[0]:.4f} and the peer's {losses[1]:.4f}: that is not the same work")
    return statistics.median(ours["seconds"]), statistics.median(peer["seconds"])


def last_line(program: Program) -> dict[str, Any]:
    """What a program answers. Raises Missing with its last words where it does not install, fails or takes too long."""
    python = python_of(program.env) if program.env else sys.executable
    tree = tree_of(program.commit) if program.commit else ROOT
    command = [python, str(tree / "bench" / "peers" / program.file), *program.words]
    environment = {**(environment_of(tree) if program.commit else os.environ), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    try:
        said, wrong = process.communicate(timeout=program.seconds)
    except subprocess.TimeoutExpired:
        raise Missing(f"`{' '.join(command[1:])}` was not through in {program.seconds:.0f} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):  # and the processes that it may have left behind
            os.killpg(process.pid, signal.SIGKILL)
    try:
        if process.returncode:
            raise ValueError
        found: dict[str, Any] = json.loads(said.strip().splitlines()[-1])
        if not {"seconds", "rows"} & found.keys():
            raise ValueError
    except (IndexError, ValueError):
        last = (wrong.strip().splitlines() or ["it said nothing"])[-1]
        raise Missing(f"{program.title} ended with {process.returncode}: {last[:300]}") from None
    return found
