"""Copies of one cut, collected while pushes go on, then written beside the path by a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from psjob.checkpoint import files
from psjob.shard.cell import Copy
from psjob.shard.store import Store

Answer = Callable[[dict[str, Any]], None]
log = logging.getLogger("psjob.shard")


class Snapshots:
    """At most one cut is in flight. `release` tells a cut's marked workers that they may go on."""

    def __init__(self, store: Store, folder: Path, release: Callable[[int], None]) -> None:
        self._store, self._folder, self._release = store, folder, release
        self._lock = threading.Lock()
        self._cut: int | None = None
        self._step = -1
        self._answer: Answer = lambda body: None
        self._copies: list[Copy] = []
        self._table: dict[str, Any] = {}
        self._marks: set[int] = set()
        self._wanted = False
        self._writer: threading.Thread | None = None

    def order(self, cut: int, step: int, marks: bool, answer: Answer) -> None:
        """Begin cut `cut` at `step`; a negative one copies as it stands, with `marks` when every live worker has marked."""
        with self._lock:
            if self._writer is not None and self._writer.is_alive():
                answer({"did": "late", "cut": cut, "why": "the cut before is still being written"})
                return
            self._cut, self._step, self._answer = cut, step, answer
            self._copies, self._table, self._marks = [], {}, set()
            self._wanted = marks
        if step < 0:
            answer({"did": "ready", "cut": cut})
            self.recheck()
            return
        self._table = self._table_at(step)
        if not self._store.order_cut(step, lambda copy: self._deliver(cut, copy)):
            self.void(cut)
            answer({"did": "late", "cut": cut, "why": f"blocks are at {self._store.span()[1]}, beyond {step}"})
            return
        answer({"did": "ready", "cut": cut})
        if not self._store.cells:
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
        """Copy now if every live worker has marked (one may just have left)."""
        with self._lock:
            if self._cut is None or self._step >= 0 or self._table:
                return
            if self._wanted and not self._marks >= self._store.admission.live():
                return
            cut = self._cut
            self._table = {"rows": self._store.admission.save()}
        self._store.order_cut(-1, lambda copy: self._deliver(cut, copy))
        if not self._store.cells:
            self._write(cut)
        self._release(cut)

    def void(self, cut: int) -> None:
        """Forget the cut; what it holds is released."""
        with self._lock:
            if self._cut != cut:
                return
            self._cut = None
            self._copies = []
        self._store.void_cut()
        self._release(cut)

    def _table_at(self, step: int) -> dict[str, Any]:
        rows = self._store.admission.save()
        for row in rows.values():
            if row["leftAt"] is not None and row["leftAt"] > step:
                row["leftAt"] = None
            row["complete"] = step if row["leftAt"] is None else row["leftAt"]
            row["open"] = []
        return {"rows": rows}

    def _deliver(self, cut: int, copy: Copy) -> None:
        with self._lock:
            if self._cut != cut:
                return
            self._copies.append(copy)
            if len(self._copies) < len(self._store.cells):
                return
            if self._step >= 0:
                self._table = self._table_at(self._step)
        self._write(cut)

    def _write(self, cut: int) -> None:
        with self._lock:
            copies, table, answer, view = self._copies, self._table, self._answer, self._store.view
            self._copies = []
            self._writer = threading.Thread(target=self._save, args=(cut, copies, table, answer, view), name="snapshot", daemon=True)
            self._writer.start()

    def _save(self, cut: int, copies: list[Copy], table: dict[str, Any], answer: Answer, view: int) -> None:
        name = f"v{view:06d}-c{cut:06d}-shard{self._store.index:03d}-e{self._store.epoch}.safetensors"
        try:
            tensors = []
            blocks = []
            for copy in sorted(copies, key=lambda c: c.index):
                tensors.append((f"{copy.index}.weights", copy.state.weights))
                tensors.extend((f"{copy.index}.{slot}", tensor) for slot, tensor in copy.state.slots.items())
                blocks.append({"index": copy.index, "n": copy.n, "epoch": self._store.epoch, "counts": copy.state.counts()})
            fact = files.write_blocks(self._folder, name, tensors, {"run": self._store.run})
        except files.CheckpointProblem as problem:
            log.warning("checkpoint not written: %s", problem)
            answer({"did": "unwritten", "cut": cut, "why": str(problem)})
            return
        answer({"did": "written", "cut": cut, "file": fact.to_json(), "blocks": blocks, "table": table["rows"]})
