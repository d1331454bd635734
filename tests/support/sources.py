"""The files of the three packages, and lines in them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OPERATOR = ROOT / "operator" / "src" / "psjob_operator"
RUNTIME = ROOT / "runtime" / "src" / "psjob"
CLIENT = ROOT / "client" / "src" / "psjob_client"


def sources() -> list[Path]:
    return [file for house in (OPERATOR, RUNTIME, CLIENT) for file in sorted(house.rglob("*.py"))]


def holding(pattern: str, files: list[Path]) -> list[str]:
    """Return `file:line: text` of each line that matches."""
    found = []
    for file in files:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        found += [f"{file.relative_to(ROOT)}:{n}: {line.strip()}" for n, line in enumerate(lines, 1) if re.search(pattern, line)]
    return found
