"""The tables of one shard at a cut: held as they stood when they came to it, then written beside the path.

Between two cuts a chain of files grows: all rows in the first, what changed in the next ones. It ends when reading it back would cost
more than the rows are worth. What was written counts as saved when the coordinator names its cut as that of the newest manifest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from psjob.checkpoint.disk import Moved
from psjob.checkpoint.manifest import MAX_CHAIN
from psjob.checkpoint.states import bytes_of, write_rows
from psjob.shard.pins import Voided
from psjob.tables import RowTable, TableSpec
from psjob.tables.table import Rows


class Serving(Protocol):
    """A table that is served: its number, its lock, how often it was updated."""

    number: int
    lock: threading.Lock
    table: RowTable
    n: int


@dataclass(frozen=True)
class Chain:
    """Files in which the rows of `tables` lie as they were at `cut`, the oldest first, with their bytes."""

    cut: int | None = None
    tables: tuple[RowTable, ...] = ()
    files: tuple[tuple[str, int], ...] = ()

    def may_grow(self, more: int) -> bool:
        """Is it worth while to write `more` bytes of changes after it, and not all rows anew?"""
        if not 1 <= len(self.files) < MAX_CHAIN:
            return False
        return sum(size for _, size in self.files[1:]) + more <= self.files[0][1] // 2


class HeldTable:
    """A table at a cut. `lock` is the one that guards the table."""

    def __init__(self, cell: Serving, full: bool, check: Callable[[], None]) -> None:
        self.table, self.n, self.lock, self._check = cell.table, cell.n, cell.lock, check
        self.spec: TableSpec = self.table.spec
        self._cut = self.table.cut(changed_only=not full)
        self.removed: torch.Tensor = self._cut.removed
        self.counts: Rows = self._cut.counts

    def sizes(self) -> list[int]:
        """Rows of each part."""
        return self._cut.sizes()

    def take(self, part: int) -> Rows:
        """Rows of a part. Raises what `check` does, where the cut is void."""
        with self.lock:
            self._check()
            return self._cut.take(part)

    def release(self) -> None:
        """Pushes keep nothing for it any more."""
        with self.lock:
            self._cut.release()

    def settle(self, kept: bool) -> None:
        """`kept`: its rows are saved; otherwise they are still to be."""
        with self.lock:
            self.table.settle(kept)


class RowCuts:
    """At most one cut at a time. `cells` are the shard's tables in order of their numbers."""

    def __init__(self, folder: Path, run: str) -> None:
        self._folder, self._run = folder, run
        self._lock = threading.Lock()
        self._cells: list[Serving] = []
        self._held: dict[int, HeldTable] = {}
        self._full = self._void = False
        self._saved = self._written = Chain()
        """What the newest manifest names, and what was written after it."""

    def begin(self, cells: Sequence[Serving], base: int | None) -> None:
        """A cut is ordered; `base` is the one that the newest manifest holds, which says whether what was written last is saved."""
        with self._lock:
            before, self._held, self._cells, self._void = self._held, {}, list(cells), False
        kept = base is not None and self._written.cut == base
        for held in before.values():
            held.settle(kept)
        if kept:
            self._saved = self._written
        if self._saved.cut != base or any(a is not b.table for a, b in zip(self._saved.tables, cells, strict=False)):
            self._saved = Chain()  # of another manifest, or the tables came from one since
        self._full = not self._saved.may_grow(sum(_changed_bytes(cell) for cell in cells))

    def hold(self, cell: Serving) -> None:
        """A table has come to the cut; its lock is held by the caller."""
        with self._lock:
            self._held[cell.number] = HeldTable(cell, self._full, self._check)

    def complete(self) -> bool:
        """Has every table come to the cut?"""
        return len(self._held) == len(self._cells)

    def release(self) -> None:
        """The cut is written, or will not be: pushes keep nothing for it any more. Not with a table's lock held."""
        for held in list(self._held.values()):
            held.release()

    def void(self) -> None:
        """The cut is given up: what it holds is still to be saved. Not with a table's lock held."""
        with self._lock:
            self._void = True
            before, self._held, self._written = self._held, {}, Chain()
        for held in before.values():
            held.settle(False)

    def bytes(self) -> int:
        """Size of the rows that are held."""
        return sum(bytes_of(held.spec, sum(held.sizes())) for held in list(self._held.values()))

    def write(self, cut: int, stem: str, moved: Moved | None = None) -> dict[str, Any] | None:
        """Write what is held to `<stem>-rows.safetensors`; what the coordinator hears of it, None without tables.

        Raises CheckpointProblem, and Voided where the cut was given up meanwhile.
        """
        if not self._cells:
            return None
        held = [self._held[number] for number in sorted(self._held)]
        fact = write_rows(self._folder, f"{stem}-rows.safetensors", held, {"run": self._run}, moved)
        self.release()
        files = () if self._full else self._saved.files
        chain = Chain(cut, tuple(table.table for table in held), (*files, (fact.name, fact.bytes)))
        with self._lock:
            self._written = chain
        return {"file": fact.to_json(), "chain": [name for name, _ in chain.files], "versions": [table.n for table in held]}

    def _check(self) -> None:
        if self._void:
            raise Voided


def _changed_bytes(cell: Serving) -> int:
    with cell.lock:
        return cell.table.changed_bytes
