"""psjob and its peers on the same work, in turn (A B A B), as ratios with their spread; and what psjob is to keep by itself.

    python -m bench                         every measure but the races
    python -m bench one-worker adam-shared  these
    python -m bench one-worker --peer gloo  only the rows against peers with this word in their title
    python -m bench --pairs 9 --json out.json
    python -m bench.table out.json          the tables of docs/performance

A ratio is the peer's time over psjob's: 2.0 means that psjob takes half as long. Each pair is two whole runs, one after the other, so that
a machine that is busy for a while is busy for both. A row that could not be made is named as missing, with the reason; the others continue.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from bench.measures import MEASURES, Against
from bench.running import rows_of, verdict

NAMES = tuple(dict.fromkeys(measure.name for measure in MEASURES))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measures", nargs="*", metavar="measure", help=", ".join(NAMES))
    parser.add_argument("--pairs", type=int, default=5, help="pairs a peer (default 5)")
    parser.add_argument(
        "--calm", type=float, default=1.0, metavar="SHARE",
        help="make a pair again in which more than this share of the cores' time was stolen by others of the host (default 1: never)",
    )  # fmt: skip
    parser.add_argument("--peer", default="", metavar="WORD", help="only rows against peers with this word in their title")
    parser.add_argument("--json", type=Path, help="write the figures here too, after every row")
    asked = parser.parse_args()
    unknown = sorted(set(asked.measures) - set(NAMES))
    if unknown:
        parser.error(f"no measure {unknown[0]!r}; there are {', '.join(NAMES)}")
    if asked.pairs < 1:
        parser.error(f"--pairs is {asked.pairs}; at least 1")
    rows: list[dict[str, Any]] = []
    about = {"date": time.strftime("%Y-%m-%d"), "machine": machine(), "pairs": asked.pairs}
    print(f"{about['machine']}, {about['date']}, {asked.pairs} pairs")
    for measure in MEASURES:
        if measure.name not in asked.measures if asked.measures else measure.on_request:
            continue
        print(f"\n{measure.name}: {measure.about}")
        if isinstance(measure, Against):
            print(f"  {'against':<34} {'psjob ms':>9} {'peer ms':>9} {'ratio':>6} {'spread':>13} {'stolen':>7}  wanted")
        for row in rows_of(measure, asked.pairs, asked.calm, asked.peer):
            rows.append(row | {"verdict": verdict(row)})
            print(line(rows[-1]), flush=True)
            if asked.json:
                asked.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    missed = [f"{row['measure']}: {row.get('peer') or row['what']}" for row in rows if row["verdict"] in ("missed", "missing")]
    print(f"\n{len(rows)} rows, {len(missed)} missed or missing" + "".join(f"\n  {name}" for name in missed))
    return 0


def line(row: dict[str, Any]) -> str:
    """A row as it is printed."""
    title = row.get("peer") or row["what"]
    if "missing" in row:
        return f"  {title:<34} missing: {row['missing']}"
    limits = [f"{sign} {row[name]:.3g}" for name, sign in (("least", ">="), ("most", "<=")) if row.get(name) is not None]
    wanted = f"{' and '.join(limits)} {row['verdict']}" if limits else ""
    stolen = f"{row['stolen']:>7.1%}"
    if "ratios" not in row:
        note = f"  ({row['note']})" if row.get("note") else ""
        return f"  {title:<58} {row['figure']:>10.4g} {row['unit']:<6} {stolen}  {wanted}{note}"
    ratio, spread = statistics.median(row["ratios"]), f"{min(row['ratios']):.2f}..{max(row['ratios']):.2f}"
    return f"  {title:<34} {row['oursMs']:>9.1f} {row['peerMs']:>9.1f} {ratio:>6.2f} {spread:>13} {stolen}  {wanted}"


def machine() -> str:
    """Processor and cores, memory, Python: what the figures are of."""
    try:
        names = [text.split(":", 1)[1].strip() for text in Path("/proc/cpuinfo").read_text().splitlines() if text.startswith("model name")]
    except OSError:
        names = []
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return f"{os.cpu_count()} cores of {(names or [platform.machine()])[0]}, {memory:.0f} GB, Python {platform.python_version()}"


if __name__ == "__main__":
    sys.exit(main())
