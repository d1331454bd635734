"""What happened, push by push. Its SHA-256 stands for a whole simulation: the same seeds give the same value."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import struct
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TextIO


class Record(NamedTuple):
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


class Trace:
    """Takes records, hashes them, and writes them to a file where one is given: CSV by its suffix, else JSON lines."""

    def __init__(self, path: Path | None = None) -> None:
        self.rows: list[tuple[float, int, int, int, float, float, float]] = []
        """Records that are not hashed yet; who adds to them calls `flush` now and then."""
        self._hash = hashlib.sha256()
        self._file: TextIO | None = path.open("w", encoding="utf-8", newline="") if path else None
        self._csv = csv.writer(self._file) if self._file and path and path.suffix == ".csv" else None
        if self._csv:
            self._csv.writerow(Record._fields)

    def close(self) -> str:
        """Write what is left; the SHA-256 over all records as little-endian float64 and int64, in hex."""
        self.flush()
        if self._file:
            self._file.close()
        return self._hash.hexdigest()

    def flush(self) -> None:
        """Hash and write what was added."""
        rows, self.rows = self.rows, []
        self._hash.update(struct.pack("<" + _ROW * len(rows), *chain.from_iterable(rows)))
        if self._csv:
            self._csv.writerows(rows)
        elif self._file:
            self._file.writelines(json.dumps(_named(Record(*row))) + "\n" for row in rows)


def read(path: Path) -> Iterator[Record]:
    """The records of a trace file. Raises ValueError naming the line that is none, OSError where the file cannot be read."""
    number = 0
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines: Iterator[dict[str, Any]] = csv.DictReader(file) if path.suffix == ".csv" else map(_json, file)
            for number, row in enumerate(lines, 1):
                yield _record(path, number, row)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: is no trace after record {number} ({error}); give a file that --trace wrote") from None


def _record(path: Path, number: int, row: dict[str, Any]) -> Record:
    try:
        return Record(
            float(row["t"]), int(row["clock"]), int(row["worker"]), int(row["lag"]), float(row["weight"]),
            _float(row["gap"]), _float(row["loss"]),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{path}: record {number} is not one of a trace ({type(error).__name__}: {error})") from None


def _named(row: Record) -> dict[str, float | None]:
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in row._asdict().items()}


def _float(value: float | str | None) -> float:
    return math.nan if value is None else float(value)


def _json(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    return row if isinstance(row, dict) else {}
