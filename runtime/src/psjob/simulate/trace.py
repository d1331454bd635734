"""What happened, push by push. Its SHA-256 stands for a whole simulation: the same seeds give the same value."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import struct
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple, TextIO


class TraceRecord(NamedTuple):
    """A push at the time when it was decided on."""

    t: float
    clock: int
    worker: int
    lag: int
    """Updates between the weights it was computed on and this one."""
    weight: float
    """Its part in the update; 0: it was dropped."""
    gap: float
    """Root mean square difference between the weights as they stand and those it was computed on; nan where none are simulated."""
    loss: float
    """Of its batch, on the weights it was computed on; nan where none are simulated."""


_ROW = "dqqqddd"
SEAL = "replay"
"""Begins the last line of a trace that can be played again; see `recording`."""
_SEALS = ("# {", f'{{"{SEAL}"')


class Trace:
    """Takes records, hashes them, and writes them to a file where one is given: CSV by its suffix, else JSON lines."""

    def __init__(self, path: Path | None = None) -> None:
        self.rows: list[tuple[float, int, int, int, float, float, float]] = []
        """Records that are not hashed yet; who adds to them calls `flush` now and then."""
        self.columns: tuple[str, ...] = ()
        """Names of what the file has beside each record. The SHA-256 is without them."""
        self.beside: list[tuple[int, ...]] = []
        """Of each of `trace_rows`, where there are such."""
        self._hash = hashlib.sha256()
        self._file: TextIO | None = path.open("w", encoding="utf-8", newline="") if path else None
        self._csv = csv.writer(self._file) if self._file and path and path.suffix == ".csv" else None
        self._begun = False

    def close(self) -> str:
        """Write what is left; the SHA-256 over all records as little-endian float64 and int64, in hex."""
        self.flush()
        if self._file:
            self._file.close()
        return self._hash.hexdigest()

    def flush(self) -> None:
        """Hash and write what was added."""
        rows, self.rows = self.rows, []
        beside, self.beside = self.beside, []
        self._hash.update(struct.pack("<" + _ROW * len(rows), *chain.from_iterable(rows)))
        both = zip(rows, beside, strict=True) if self.columns else zip(rows, repeat(()))
        if self._csv:
            if not self._begun:
                self._csv.writerow(TraceRecord._fields + self.columns)
            self._csv.writerows(row + more for row, more in both)
        elif self._file:
            self._file.writelines(
                json.dumps(_named(TraceRecord(*row)) | dict(zip(self.columns, more, strict=True))) + "\n" for row, more in both
            )
        self._begun = True


def read_trace(path: Path) -> Iterator[TraceRecord]:
    """The records of a trace file. Raises ValueError naming the line that is none, OSError where the file cannot be read."""
    return (_record(path, number, row) for number, row in enumerate(trace_rows(path), 1))


def trace_rows(path: Path) -> Iterator[dict[str, Any]]:
    """What stands in a trace file of each record, by column. Raises ValueError if it cannot be parsed, OSError."""
    number = 0
    try:
        with path.open(encoding="utf-8", newline="") as file:
            records = (line for line in file if not line.startswith(_SEALS))
            lines: Iterator[dict[str, Any]] = csv.DictReader(records) if path.suffix == ".csv" else map(_json, records)
            for number, row in enumerate(lines, 1):  # noqa: B007
                yield row
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: is no trace after record {number} ({error}); give a file that --trace wrote") from None


def _record(path: Path, number: int, row: dict[str, Any]) -> TraceRecord:
    try:
        return TraceRecord(
            float(row["t"]), int(row["clock"]), int(row["worker"]), int(row["lag"]), float(row["weight"]),
            _float(row["gap"]), _float(row["loss"]),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{path}: record {number} is not one of a trace ({type(error).__name__}: {error})") from None


def _named(row: TraceRecord) -> dict[str, float | None]:
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in row._asdict().items()}


def _float(value: float | str | None) -> float:
    return math.nan if value is None else float(value)


def _json(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    return row if isinstance(row, dict) else {}
