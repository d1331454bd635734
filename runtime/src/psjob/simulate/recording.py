"""A training that is written down so that it can be played again: what a trace holds beside its records, and the line that seals it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from psjob.modes import Batch, Push
from psjob.simulate import trace
from psjob.simulate.engine import Work

COLUMNS = ("base", "begun", "arrived")
"""Of a push: the version that it was computed on, how many pushes had arrived when its worker took that, and its own number among them."""
_AGAIN = "write it again with psjob simulate train --replayable --trace FILE"


class Recording:
    """See `Work`: trains `work`, and gives `written` the COLUMNS of every record."""

    def __init__(self, work: Work, written: trace.Trace) -> None:
        self.work, self.written = work, written
        written.columns = COLUMNS
        self._arrived = 0
        self._begun: dict[int, int] = {}
        self._beside: dict[tuple[int, int], tuple[int, int, int]] = {}

    def begin(self, worker: int) -> None:
        self._begun[worker] = self._arrived
        self.work.begin(worker)

    def push(self, push: Push) -> None:
        self._arrived += 1
        self._beside[push.worker, push.clock] = (push.base or 0, self._begun[push.worker], self._arrived)
        self.work.push(push)

    def decide(self, batch: Batch, version: int) -> list[tuple[float, float]]:
        self.written.beside += [self._beside.pop((push.worker, push.clock)) for push in (*batch.kept, *batch.dropped)]
        return self.work.decide(batch, version)

    def leave(self, worker: int) -> None:
        self.work.leave(worker)


def seal(path: Path, facts: dict[str, Any]) -> None:
    """End a trace file that is written with a line of `facts` and the SHA-256 of all that stands before it, and of them."""
    body = json.dumps(facts)
    with path.open("rb+") as file:
        line = json.dumps({trace.SEAL: facts, "sha256": _sha256(file.read(), body)})
        file.write((("# " if path.suffix == ".csv" else "") + line + "\n").encode())


def opened(path: Path) -> dict[str, Any]:
    """The facts of a sealed file. Raises ValueError where it has no seal, or is not what was sealed, OSError where it cannot be read."""
    rows, _, last = path.read_bytes().removesuffix(b"\n").rpartition(b"\n")
    try:
        told = json.loads(last.removeprefix(b"# "))
        facts, sha256 = told[trace.SEAL], told["sha256"]
    except (ValueError, RecursionError, LookupError, TypeError):
        raise ValueError(f"{path}: has no last line to replay by: it is cut short, or no --replayable trace; {_AGAIN}") from None
    if not isinstance(facts, dict) or _sha256(rows + b"\n" * bool(rows), json.dumps(facts)) != sha256:
        raise ValueError(f"{path}: was changed after it was written (its SHA-256 is another); {_AGAIN}")
    return facts


def events(path: Path) -> Iterator[Push | int]:
    """What happened, in order: a worker (by its rank) took its weights, or a push arrived. Raises ValueError for what is no such trace."""
    happened: list[tuple[int, int, Push | int]] = []
    for number, row in enumerate(trace.rows(path), 1):
        try:
            worker, clock, base, begun, arrived = (int(row[name]) for name in ("worker", "clock", *COLUMNS))
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{path}: record {number} has not the columns {', '.join(COLUMNS)}; {_AGAIN}") from None
        happened += [(begun, 1, worker), (arrived, 0, Push(worker, clock, base))]
    for _, _, what in sorted(happened, key=lambda one: one[:2]):
        yield what


def _sha256(rows: bytes, facts: str) -> str:
    return hashlib.sha256(rows + facts.encode()).hexdigest()
