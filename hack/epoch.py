"""The time that built archives carry: that of the last commit, so that one commit is one archive."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def epoch(checkout: Path = ROOT) -> int:
    """Seconds since 1970: SOURCE_DATE_EPOCH where it is set, else the last commit's. Raises SystemExit outside a git checkout."""
    if told := os.environ.get("SOURCE_DATE_EPOCH"):
        return int(told)
    done = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=checkout, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"git does not tell when the last commit was made ({done.stderr.strip()[:200]}); set SOURCE_DATE_EPOCH")
    return int(done.stdout)
