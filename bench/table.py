"""Figures of a run as the tables of docs/performance: `python -m bench.table out.json`."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any


def main() -> int:
    if len(sys.argv) != 2:
        print("which file? python -m bench.table out.json", file=sys.stderr)
        return 2
    run = json.loads(Path(sys.argv[1]).read_text())
    print(f"{run['date']}, {run['machine']}; `python -m bench`, medians of {run['pairs']} pairs.\n")
    print(
        "| measure | against | psjob ms | peer ms | ratio | spread | stolen | wanted |\n| --- | --- | --- | --- | --- | --- | --- | --- |"
    )
    print("\n".join(ratio(row) for row in run["rows"] if "peer" in row))
    print("\n| measure | what | figure | stolen | wanted | how |\n" + "| --- " * 6 + "|")
    print("\n".join(alone(row) for row in run["rows"] if "peer" not in row))
    return 0


def ratio(row: dict[str, Any]) -> str:
    begin = f"| {row['measure']} | {row['peer']} |"
    if "missing" in row:
        return f"{begin} missing: {row['missing']} | | | | | |"
    found, stolen = row["ratios"], f"{row['stolen']:.1%}"
    spread = f"{min(found):.2f}..{max(found):.2f}"
    return f"{begin} {row['oursMs']:.1f} | {row['peerMs']:.1f} | {statistics.median(found):.2f} | {spread} | {stolen} | {wanted(row)} |"


def alone(row: dict[str, Any]) -> str:
    if "missing" in row:
        return f"| {row['measure']} | {row['what']} | missing: {row['missing']} | | | |"
    figure = f"{row['figure']:.3g} {row['unit']} | {row['stolen']:.1%}"
    return f"| {row['measure']} | {row['what']} | {figure} | {wanted(row)} | {row.get('note', '')} |"


def wanted(row: dict[str, Any]) -> str:
    signs = [f"{sign} {row[name]:.3g}" for name, sign in (("least", "≥"), ("most", "≤")) if row.get(name) is not None]
    return f"{' and '.join(signs)}: {row['verdict']}" if signs else ""


if __name__ == "__main__":
    sys.exit(main())
