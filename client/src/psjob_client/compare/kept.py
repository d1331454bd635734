"""Comparisons that were made in a folder: kept beside its runs, so that the page can show them."""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

from psjob_client.compare.outcome import Comparison, SideOutcome
from psjob_client.local.errors import BadInput
from psjob_client.local.folder import RUNS

FOLDER = "comparisons"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}")


def keep(folder: Path, found: Comparison, now: float) -> Path | None:
    """Write it below `folder`; None where the disk does not take it, which spoils nothing."""
    word = re.sub(r"[^a-z0-9]+", "-", found.name.lower()).strip("-")[:60] or "jobs"
    path = folder / RUNS / FOLDER / f"{word}-{time.strftime('%m%d-%H%M%S', time.localtime(now))}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unready = path.with_suffix(".tmp")
        unready.write_text(json.dumps(found.as_json()), encoding="utf-8")
        unready.replace(path)
    except OSError:
        return None
    return path


def names(folder: Path) -> list[dict[str, Any]]:
    """Name and time of each, the newest first."""
    found = []
    for path in (folder / RUNS / FOLDER).glob("*.json"):
        try:
            found.append({"name": path.stem, "time": path.stat().st_mtime})
        except OSError:
            continue
    return sorted(found, key=lambda one: one["time"], reverse=True)


def read(folder: Path, name: str) -> Comparison:
    """A comparison by its name. Raises BadInput where there is none, or where its file is damaged."""
    path = folder / RUNS / FOLDER / f"{name}.json"
    if not NAME.fullmatch(name) or not path.is_file():
        raise BadInput(f"there is no comparison {name} in {path.parent}; `psjob compare` makes one")
    known = {one.name for one in fields(SideOutcome)}
    try:
        raw = json.loads(path.read_bytes())
        sides = [SideOutcome(**{key: value for key, value in side.items() if key in known}) for side in raw["sides"]]
        found = Comparison(raw["name"], raw["unit"], dict(raw["about"]), raw["manifest"], sides, raw.get("lossWanted"))
        for one in sides:
            for curve in filter(None, one.curves.values()):
                at, step, value = zip(*curve, strict=True)
                math.fsum((*at, *step, *value))  # raises where one is no number
            _ = one.rate, one.lag, one.waiting, found.time_to(one)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise BadInput(f"{path}: cannot be read as a comparison: {type(error).__name__}; make it again with `psjob compare`") from None
    return found
