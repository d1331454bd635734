"""One cut of this shard: its blocks are held as they stood, and written beside the path while pushes go on.

An update waits for at most the copy of the block that it is about to change. Two threads work beside it: one copies the blocks in the
order in which pushes touch them, mostly while the workers compute; the other writes the file.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from psjob import contract
from psjob.checkpoint import files
from psjob.checkpoint.files import DeferredTensor
from psjob.checkpoint.increments import EMPTY, Base, Lies, staying
from psjob.shard.cell import Cell
from psjob.shard.gaps import PushGaps
from psjob.shard.pins import Pin, Voided, room
from psjob.shard.rows import RowCell
from psjob.shard.spare import Spare
from psjob.shard.store import Store
from psjob.shard.tables import RowCuts

Answer = Callable[[dict[str, Any]], None]
log = logging.getLogger("psjob.shard")


class Snapshots:
    """At most one cut is in flight. `release` tells a cut's marked workers that they may go on."""

    def __init__(self, store: Store, folder: Path, release: Callable[[int], None]) -> None:
        self._store, self._folder, self._release = store, folder, release
        self._lock = threading.Lock()
        self._cut: int | None = None
        self._step = -1
        self._clocks: Mapping[int, int] | None = None
        self._answer: Answer = lambda body: None
        self._pins: list[Pin] = []
        self._spare = Spare({})
        self._table: dict[str, Any] = {}
        self._marks: set[int] = set()
        self._wanted = False
        self._writer: threading.Thread | None = None
        self._bases: dict[int, Base] = {}
        """By cut: the newest one that was committed, as far as this shard was told, and the one written after it."""
        self._base = EMPTY
        self._rows = RowCuts(folder, store.run)

    def prepare(self, base: int | None, done: Callable[[], None]) -> None:
        """Make memory ready for the copies of the cut that comes next; then call `done`, from a thread of its own."""
        with self._lock:
            if self._cut is not None or self._busy():
                done()
                return
            spare, changed = self._spare_for(base)

        def warm() -> None:
            spare.warm(changed)
            done()

        threading.Thread(target=warm, name="spare", daemon=True).start()

    def order(
        self, cut: int, step: int, marks: bool, base: int | None, answer: Answer, clocks: Mapping[int, int] | None = None
    ) -> None:  # fmt: skip
        """Begin cut `cut` at `step`; a negative one holds blocks as they stand, with `marks` when every live worker has marked.

        `clocks` are the pushes that blocks hold of each worker, where that is not all that was taken.
        `base` is the cut that the newest manifest holds: what has not changed since is named where it lies.
        """
        with self._lock:
            if self._busy():
                answer({"did": "late", "cut": cut, "why": "the cut before is still being written"})
                return
            self._cut, self._step, self._answer, self._clocks = None, step, answer, clocks
            self._pins, self._table, self._marks = [], {}, set()
            self._wanted = marks
            self._spare_for(base)
            self._base = EMPTY if base is None else self._bases.get(base, EMPTY)
            self._bases = {} if base is None or base not in self._bases else {base: self._base}
        self._rows.begin(list(self._store.row_cells.values()), base)
        with self._lock:
            self._cut = cut  # from here on others may hold for it
        if step < 0:
            answer({"did": "ready", "cut": cut})
            self._hold_now(cut)
            return
        self._table = self._table_at(step)
        if not self._store.order_cut(step, lambda cell: self._hold(cut, cell), lambda table: self._hold_rows(cut, table)):
            self.void(cut)
            answer({"did": "late", "cut": cut, "why": f"blocks are at {self._store.furthest()}, beyond {step}"})
            return
        answer({"did": "ready", "cut": cut})
        if not self._store.all_cells():
            self._write(cut)

    def mark(self, rank: int, cut: int) -> None:
        """A worker stands at its step edge and holds its pushes for `cut`; a mark of another cut is released at once."""
        with self._lock:
            current = self._cut == cut
            if current:
                self._marks.add(rank)
        if current:
            self.recheck()
        else:
            self._release(cut)

    def recheck(self) -> None:
        """Hold the blocks now if every live worker has marked (one may just have left).

        A cut without marks is held by its order alone: what is ordered next may move the blocks.
        """
        with self._lock:
            cut = self._cut if self._wanted else None
        if cut is not None:
            self._hold_now(cut)

    def _hold_now(self, cut: int) -> None:
        with self._lock:
            if self._cut != cut or self._step >= 0 or self._table:
                return
            if self._wanted and not self._marks >= self._store.admission.live():
                return
            table = self._store.admission
            self._table = {"rows": table.save() if self._clocks is None else table.save_at(self._clocks)}
        self._store.order_cut(-1, lambda cell: self._hold(cut, cell), lambda table: self._hold_rows(cut, table))
        if not self._store.all_cells():
            self._write(cut)
        self._release(cut)

    def void(self, cut: int) -> None:
        """Forget the cut; what it holds is released, and a file that is being written is given up."""
        with self._lock:
            if self._cut != cut:
                return
            self._cut = None
            pins, self._pins = self._pins, []
        self._store.void_cut()
        for pin in pins:
            pin.give_up()
        self._rows.void()
        self._release(cut)

    def _busy(self) -> bool:
        return self._writer is not None and self._writer.is_alive()

    def _spare_for(self, base: int | None) -> tuple[Spare, list[int]]:
        """Memory for a copy of every block, and the blocks that have changed since cut `base`. Nobody may be copying or writing."""
        lies = EMPTY.blocks if base is None else self._bases.get(base, EMPTY).blocks
        cells = self._store.cells
        changed = [index for index, cell in cells.items() if index not in lies or lies[index].content is not cell.content]
        sizes = {index: room(cell.tensors()) for index, cell in cells.items()}
        if self._spare.sizes != sizes:
            self._spare = Spare(sizes)
        return self._spare, changed

    def _table_at(self, step: int) -> dict[str, Any]:
        rows = self._store.admission.save()
        for row in rows.values():
            if row["leftAt"] is not None and row["leftAt"] > step:
                row["leftAt"] = None
            row["complete"] = step if row["leftAt"] is None else row["leftAt"]
            row["open"] = []
        return {"rows": rows}

    def _hold(self, cut: int, cell: Cell) -> Pin:
        """A block has come to the cut, and its lock is held; with the last one the writing begins."""
        assert cell.state is not None
        pin = Pin(cell.block.index, cell.n, cell.state, cell.content, cell.lock, self._spare)
        with self._lock:
            if self._cut != cut:
                pin.drop(void=True)
                return pin
            self._pins.append(pin)
            whole = self._whole()
        if whole:
            self._write(cut)
        return pin

    def _hold_rows(self, cut: int, table: RowCell) -> None:
        """The same of a table."""
        with self._lock:
            if self._cut != cut:
                return
            self._rows.hold(table)
            whole = self._whole()
        if whole:
            self._write(cut)

    def _whole(self) -> bool:
        """Is everything held? Then the admission table of that moment is too."""
        if len(self._pins) < len(self._store.cells) or not self._rows.complete():
            return False
        if self._step >= 0:
            self._table = self._table_at(self._step)
        return True

    def _write(self, cut: int) -> None:
        with self._lock:
            pins = sorted(self._pins, key=lambda pin: pin.index)
            job = (cut, pins, self._base, self._table["rows"], self._answer, self._store.view)
            self._writer = threading.Thread(target=self._save, args=job, name="snapshot", daemon=True)
            self._writer.start()

    def _save(self, cut: int, pins: list[Pin], base: Base, rows: Any, answer: Answer, view: int) -> None:
        torch.set_num_threads(1)
        began = time.monotonic()
        stem = f"v{view:06d}-c{cut:06d}" + contract.SHARD_PART.format(shard=self._store.index, attempt=self._store.attempt)
        name = f"{stem}.safetensors"
        try:
            stay = staying(base, {pin.index: pin.content for pin in pins})
            for pin in pins:
                if pin.index in stay:
                    pin.leave()
            written = [pin for pin in pins if pin.index not in stay]
            threading.Thread(target=_copy_ahead, args=(written,), name="copy", daemon=True).start()
            chain = self._rows.write(cut, stem)
            fact = None
            if written or not stay:
                gaps = PushGaps(lambda: self._store.pushed)
                tensors = [entry for pin in written for entry in _entries(pin, gaps)]
                fact = files.write_blocks(self._folder, name, tensors, {"run": self._store.run})
        except Voided:
            return
        except files.CheckpointProblem as problem:
            log.warning("checkpoint not written: %s", problem)
            answer({"did": "unwritten", "cut": cut, "why": str(problem)})
            return
        finally:
            for pin in pins:
                pin.leave()
            self._rows.release()
            with self._lock:
                if self._cut == cut:
                    self._cut, self._pins = None, []
        lies = {pin.index: base.blocks[pin.index] if pin.index in stay else Lies(name, pin.bytes, pin.content) for pin in pins}
        sizes = base.files if fact is None else {**base.files, name: fact.bytes}
        with self._lock:
            self._bases[cut] = Base(lies, {file: sizes[file] for file in {place.file for place in lies.values()}})
        stops = [pin.stopped for pin in pins if pin.stopped]
        level, took = logging.INFO if stops else logging.DEBUG, time.monotonic() - began
        log.log(level, "cut %d: %.2f s; pushes copied %d of %d blocks, %.1f ms", cut, took, len(stops), len(pins), 1e3 * sum(stops))
        attempt = self._store.attempt
        blocks = [{"index": p.index, "n": p.n, "attempt": attempt, "counts": p.counts, "file": lies[p.index].file} for p in pins]
        file = None if fact is None else fact.to_json()
        answer({"did": "written", "cut": cut, "file": file, "blocks": blocks, "table": rows, "rows": chain})


def _entries(pin: Pin, gaps: PushGaps) -> list[tuple[str, torch.Tensor | DeferredTensor]]:
    """A block's tensors, taken when they are written."""
    return [
        (f"{pin.index}.{name}", DeferredTensor(*shape, functools.partial(_taken, pin, name, gaps))) for name, shape in pin.shapes.items()
    ]


def _taken(pin: Pin, name: str, gaps: PushGaps) -> torch.Tensor:
    gaps.wait()
    return pin.take()[name]


def _copy_ahead(pins: list[Pin]) -> None:
    """Copy what no update has needed yet: one that comes later does not wait for it."""
    torch.set_num_threads(1)
    for pin in pins:
        try:
            pin.take()
        except Voided:
            return
