"""psjob and its peers on the same work, in turn (A B A B), as ratios with their spread.

    python -m bench                         every measure
    python -m bench one-worker adam         these
    python -m bench --pairs 9 --json out.json

A ratio is the peer's time over psjob's: 2.0 means that psjob takes half as long. Each pair is two whole runs, one after the other, so that
a machine that is busy for a while is busy for both. A peer that cannot be installed is named as missing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.envs import HERE, Missing, python_of
from bench.measures import MEASURES, Measure, Program

RUN_SECONDS = 300


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measures", nargs="*", metavar="measure", help=", ".join(measure.name for measure in MEASURES))
    parser.add_argument("--pairs", type=int, default=5, help="pairs a peer (default 5)")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    asked = parser.parse_args()
    unknown = sorted(set(asked.measures) - {measure.name for measure in MEASURES})
    if unknown:
        parser.error(f"no measure {unknown[0]!r}; there are {', '.join(measure.name for measure in MEASURES)}")
    if asked.pairs < 1:
        parser.error(f"--pairs is {asked.pairs}; at least 1")
    print(f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}")
    rows: list[dict[str, Any]] = []
    for measure in MEASURES:
        if asked.measures and measure.name not in asked.measures:
            continue
        print(f"\n{measure.name}: {measure.about}")
        print(f"  {'against':<38} {'psjob ms':>9} {'peer ms':>9} {'ratio':>6} {'spread':>13} {'target':>7}")
        for peer, target in measure.peers:
            rows.append(compare(measure, peer, target, asked.pairs))
            print(line(rows[-1]), flush=True)
    if asked.json:
        asked.json.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "rows": rows}, indent=1) + "\n")
    return 0


def compare(measure: Measure, peer: Program, target: float, pairs: int) -> dict[str, Any]:
    """One row: medians in ms, ratios of the pairs, or `missing` with the reason."""
    row: dict[str, Any] = {"measure": measure.name, "peer": peer.title, "target": target}
    ours: list[float] = []
    theirs: list[float] = []
    try:
        for _ in range(pairs):
            ours.append(run(measure.ours))
            theirs.append(run(peer))
    except Missing as missing:
        return row | {"missing": str(missing)}
    ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
    return row | {"ours": statistics.median(ours) * 1e3, "peerMs": statistics.median(theirs) * 1e3, "ratios": ratios}


def run(program: Program) -> float:
    """Median seconds of a cycle in one run of a program. Raises Missing."""
    python = python_of(program.env) if program.env else sys.executable
    command = [python, str(HERE / "peers" / program.file), *program.words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS, env={**os.environ, "OMP_NUM_THREADS": "1"})
        found: Sequence[float] = json.loads(done.stdout.strip().splitlines()[-1])["seconds"]
    except (subprocess.TimeoutExpired, IndexError, ValueError, KeyError, TypeError):
        raise Missing(f"{program.title} did not run: `{' '.join(command[1:])}` gave no figures") from None
    return statistics.median(found)


def line(row: dict[str, Any]) -> str:
    if "missing" in row:
        return f"  {row['peer']:<38} missing: {row['missing']}"
    ratios = row["ratios"]
    ratio, spread = statistics.median(ratios), f"{min(ratios):.2f}..{max(ratios):.2f}"
    verdict = "" if not row["target"] else f"{row['target']:.2f} {'ok' if ratio >= row['target'] else 'missed'}"
    return f"  {row['peer']:<38} {row['ours']:>9.1f} {row['peerMs']:>9.1f} {ratio:>6.2f} {spread:>13} {verdict}"


if __name__ == "__main__":
    sys.exit(main())
