"""One snapshot of this shard: its blocks are held as they stood, and written beside the path while pushes continue.

An update waits for at most the copy of the block that it is about to change. Two threads work beside it: one copies the blocks in the
order in which pushes touch them, mostly while the workers compute; the disk thread writes the files. What is held, written or given up
is decided by `psjob.protocol.shard`.

Copies of blocks stay in the memory that is kept for snapshots: a process that goes back to the last checkpoint reads no disk. A copy is
that of the last snapshot that was written, or, after a restore, of what was read. The latter is made by the update that is about to
change the block, or by a thread beside. It lasts until the next snapshot needs its place.
"""

from __future__ import annotations

import functools
import logging
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from psjob import contract
from psjob.checkpoint import disk, files
from psjob.checkpoint.disk import CheckpointProblem
from psjob.checkpoint.files import DeferredTensor
from psjob.checkpoint.states import EMPTY, Base, Lies, staying, write_admission
from psjob.process import supervise
from psjob.process.supervise import ThreadPulse
from psjob.protocol.messages import MemoryReady, Prepare, SnapshotVoided, SnapshotWritten, furthest_of
from psjob.protocol.shard import events as e
from psjob.protocol.shard.events import HoldBlocks
from psjob.shard.block import ParameterBlock
from psjob.shard.snapshot_memory import BackgroundThrottle, BlockSnapshot, SnapshotBuffer, Voided, room
from psjob.shard.store import Store
from psjob.shard.table import RowSnapshots, ServedTable

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Image:
    """A block as it lies in `file`; `take` gives its tensors, and raises Voided if they are gone."""

    file: str
    take: Callable[[], Tensors]


class SnapshotCache:
    """By block. All methods may be called by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._images: dict[int, Image] = {}
        self._kept: dict[int, Image] = {}
        """Those of the snapshot before, while one is written: what has not changed stays as it is."""
        self._pins: list[BlockSnapshot] = []

    def find(self, index: int, file: str) -> Tensors | None:
        """A block's tensors as they lie in `file`, where memory has them. They are not to be changed."""
        with self._lock:
            image = self._images.get(index)
        if image is None or image.file != file:
            return None
        try:
            tensors = dict(image.take())
        except Voided:
            return None
        with self._lock:
            if self._images.get(index) is image:
                self._images[index] = _of(file, tensors)  # its pin may be dropped with the state that is replaced now
        return tensors

    def begin_snapshot(self) -> None:
        """The places of all copies are about to be written over."""
        with self._lock:
            self._kept, self._images = self._images, {}
            pins, self._pins = self._pins, []
        for pin in pins:
            pin.give_up()

    def clear(self) -> None:
        """Nothing is kept any more."""
        self.begin_snapshot()
        with self._lock:
            self._kept = {}

    def written(self, stay: Iterable[int], made: Mapping[int, tuple[str, Tensors]]) -> None:
        """A snapshot was written whole: `made` are the copies of its blocks with their files; those in `stay` lie where they did before."""
        with self._lock:
            kept = {index: self._kept[index] for index in stay if index in self._kept}
            self._images = kept | {index: _of(file, tensors) for index, (file, tensors) in made.items()}
            self._kept = {}

    def read(self, pins: Mapping[int, tuple[str, BlockSnapshot]]) -> None:
        """Blocks were read from files, and are held by pins."""
        with self._lock:
            self._images |= {index: Image(file, pin.take) for index, (file, pin) in pins.items()}
            self._pins = [pin for _, pin in pins.values()]


def _of(file: str, tensors: Tensors) -> Image:
    return Image(file, lambda: tensors)


log = logging.getLogger("psjob.shard")


@dataclass(frozen=True)
class SnapshotTask:
    """What is written of one snapshot, and from which term. `rows` is the admission table."""

    snapshot: int
    term: int
    pins: list[BlockSnapshot]
    base: Base
    rows: Mapping[str, Any]
    transfer: Transfer


class Snapshots:
    """Holds at most one snapshot. `post` takes what came of it, from whichever thread met it."""

    def __init__(self, store: Store, folder: Path, thread: DiskThread, post: Callable[[e.Event], None]) -> None:
        self._store, self._folder, self._disk, self._post = store, folder, thread, post
        self._lock = threading.Lock()
        self._held: HoldBlocks | None = None
        self._pins: list[BlockSnapshot] = []
        self._spare = SnapshotBuffer({})
        self._table: Mapping[str, Any] = {}
        self._job: SnapshotTask | None = None
        self._bases: dict[int, Base] = {}
        """By snapshot: the newest one that was committed, as far as this shard was told, and the one written after it."""
        self._base = EMPTY
        self._rows = RowSnapshots(folder, store.run)
        self.images = SnapshotCache()

    def make_ready(self, order: Prepare) -> None:
        """Make memory ready for the copies of the snapshot that comes next, in a thread of its own."""
        spare, changed = self._spare_for(order.base)

        def warm() -> None:
            spare.warm(changed)
            self._post(MemoryReady(self._store.index, order.number))

        supervise.start_thread(warm, "spare")

    def hold(self, order: HoldBlocks) -> None:
        """Hold every block and table when it comes to the step, or now.

        What has not changed since the snapshot `base` is named where it lies.
        """
        with self._lock:
            self._held, self._pins, self._table = None, [], {}
            self.images.begin_snapshot()
            self._spare_for(order.base)
            self._base = EMPTY if order.base is None else self._bases.get(order.base, EMPTY)
            self._bases = {} if order.base is None or order.base not in self._bases else {order.base: self._base}
        self._rows.begin(list(self._store.row_cells.values()), order.base)
        with self._lock:
            self._held = order  # from here on others may hold for it
            self._table = self._table_now(order)
        number, store = order.snapshot, self._store

        def late() -> None:  # a block's lock is held, and who gives up takes those of all blocks
            self._disk.put(lambda: self._post(e.TooLate(number, store.furthest())))

        if not order_snapshot(store, order.step, lambda cell: self._hold(number, cell), lambda table: self._hold_rows(number, table), late):
            self._post(e.TooLate(number, store.furthest()))
            return
        self._post(e.Armed(number))
        if not self._store.all_cells():
            with self._lock:
                self._whole(order)
            self._post(e.Held(number))

    def give_up(self, snapshot: int) -> None:
        """What is held is released, and a file that is being written is given up."""
        with self._lock:
            if self._job is not None and self._job.snapshot == snapshot:
                self._job.transfer.stopped = True
            if self._held is None or self._held.snapshot != snapshot:
                return
            self._held = None
            pins, self._pins = self._pins, []
        void_snapshot(self._store.all_cells())
        for pin in pins:
            pin.give_up()
        self._rows.void()

    def write(self, snapshot: int) -> None:
        """Write what is held, in the disk thread."""
        with self._lock:
            if self._held is None or self._held.snapshot != snapshot:
                self._post(e.GaveUp(snapshot))
                return
            pins = sorted(self._pins, key=lambda pin: pin.index)
            job = self._job = SnapshotTask(snapshot, self._store.term, pins, self._base, self._table, Transfer(0))
        self._disk.put(lambda: self._save(job))

    def restored(self, files: Mapping[int, str]) -> None:
        """Blocks were read from these files, and nobody changes them yet: keep them as they are for a process that must go back."""
        spare, _ = self._spare_for(None)
        pins: dict[int, BlockSnapshot] = {}

        def hold(cell: ParameterBlock) -> BlockSnapshot:
            assert cell.state is not None
            return pins.setdefault(cell.index, BlockSnapshot(cell.index, cell.n, cell.state, cell.content, cell.lock, spare))

        for index in files:
            cell = self._store.cells[index]
            with cell.lock:
                cell.order_snapshot(-1, hold)
        self.images.read({index: (files[index], pin) for index, pin in pins.items()})
        supervise.start_thread(_copy_ahead, "copy", list(pins.values()))

    def forget(self) -> None:
        """Give back the memory of the copies; nobody holds a snapshot, and nobody needs what is in them."""
        self.images.clear()
        self._spare = SnapshotBuffer({})

    def discard(self, snapshot: int) -> None:
        """Delete the files of a snapshot, in the disk thread."""
        self._disk.put(lambda: self._discard(snapshot))

    # -- held ----------------------------------------------------------------------------------

    def _spare_for(self, base: int | None) -> tuple[SnapshotBuffer, list[int]]:
        """Memory for a copy of every block, and the blocks that have changed since snapshot `base`. Nobody may be copying or writing."""
        lies = EMPTY.blocks if base is None else self._bases.get(base, EMPTY).blocks
        cells = self._store.cells
        changed = [index for index, cell in cells.items() if index not in lies or lies[index].content is not cell.content]
        sizes = {index: room(cell.tensors()) for index, cell in cells.items()}
        if self._spare.sizes != sizes:
            self._spare = SnapshotBuffer(sizes)
        return self._spare, changed

    def _table_now(self, order: HoldBlocks) -> Mapping[str, Any]:
        """The admission table of a snapshot that is held now; of one at a step it is known when all have come there."""
        if order.step >= 0:
            return {}
        table = self._store.admission
        return table.save() if order.clocks is None else table.save_at(order.clocks)

    def _table_at(self, step: int) -> Mapping[str, Any]:
        rows = self._store.admission.save()
        for row in rows.values():
            if row["leftAt"] is not None and row["leftAt"] > step:
                row["leftAt"] = None
            row["complete"] = step if row["leftAt"] is None else row["leftAt"]
            row["open"] = []
        return rows

    def _hold(self, snapshot: int, cell: ParameterBlock) -> BlockSnapshot:
        """A block has come to the snapshot, and its lock is held; after the last one the writing may begin."""
        assert cell.state is not None
        pin = BlockSnapshot(cell.block.index, cell.n, cell.state, cell.content, cell.lock, self._spare)
        with self._lock:
            if self._held is None or self._held.snapshot != snapshot:
                pin.drop(void=True)
                return pin
            self._pins.append(pin)
            whole = self._whole(self._held)
        if whole:
            self._post(e.Held(snapshot))
        return pin

    def _hold_rows(self, snapshot: int, table: ServedTable) -> None:
        """The same of a table."""
        with self._lock:
            if self._held is None or self._held.snapshot != snapshot:
                return
            self._rows.hold(table)
            whole = self._whole(self._held)
        if whole:
            self._post(e.Held(snapshot))

    def _whole(self, order: HoldBlocks) -> bool:
        """Is everything held? Then the admission table of that moment is too."""
        if len(self._pins) < len(self._store.cells) or not self._rows.complete():
            return False
        if order.step >= 0:
            self._table = self._table_at(order.step)
        return True

    # -- files, in the disk thread -------------------------------------------------------------

    def _save(self, job: SnapshotTask) -> None:
        """Write the files and tell what came of it, once nothing is held for the snapshot any more: the next one may begin at once."""
        try:
            told = self._came(job)
        finally:
            for pin in job.pins:
                pin.leave()
            self._rows.release()
            with self._lock:
                self._job = None
                if self._held is not None and self._held.snapshot == job.snapshot:
                    self._held, self._pins = None, []
        self._post(told)

    def _came(self, job: SnapshotTask) -> e.Event:
        try:
            written = self._written(job)
            job.transfer.check()
        except (Voided, Stopped):
            return e.GaveUp(job.snapshot)
        except CheckpointProblem as problem:
            self._rows.void()  # or the next snapshot would take its rows for saved
            return self._failed(job, problem)
        return written

    def _written(self, job: SnapshotTask) -> SnapshotWritten:
        """Write the files; what the coordinator is told. Raises CheckpointProblem, Voided, Stopped."""
        began = time.monotonic()
        stem = f"v{job.term:06d}-c{job.snapshot:06d}" + contract.SHARD_PART.format(shard=self._store.index, attempt=self._store.attempt)
        name, pins, base, moved = f"{stem}.safetensors", job.pins, job.base, job.transfer.moved
        stay = staying(base, {pin.index: pin.content for pin in pins})
        for pin in pins:
            if pin.index in stay:
                pin.leave()
        written = [pin for pin in pins if pin.index not in stay]
        job.transfer.total = sum(pin.bytes for pin in written) + self._rows.bytes()
        job.transfer.check()
        self._disk.transfer = job.transfer
        supervise.start_thread(_copy_ahead, "copy", written)
        chain = self._rows.write(job.snapshot, stem, moved)
        fact = None
        if written or not stay:
            gaps = BackgroundThrottle(lambda: self._store.pushed)
            tensors = [entry for pin in written for entry in _entries(pin, gaps)]
            fact = files.write_blocks(self._folder, name, tensors, {"run": self._store.run}, moved)
        table = write_admission(self._folder, f"{stem}-admission.json", job.rows)
        lies = {pin.index: base.blocks[pin.index] if pin.index in stay else Lies(name, pin.bytes, pin.content) for pin in pins}
        sizes = base.files if fact is None else {**base.files, name: fact.bytes}
        copies = {pin.index: (name, pin.take()) for pin in written if room(pin.take().values()) <= self._spare.sizes.get(pin.index, 0)}
        with self._lock:
            self.images.written(stay, copies)
            self._bases[job.snapshot] = Base(lies, {file: sizes[file] for file in {place.file for place in lies.values()}})
        stops = [pin.stopped for pin in pins if pin.stopped]
        level, took = logging.INFO if stops else logging.DEBUG, time.monotonic() - began
        told = (job.snapshot, took, len(stops), len(pins), 1e3 * sum(stops))
        log.log(level, "snapshot %d: %.2f s; pushes copied %d of %d blocks, %.1f ms", *told)
        attempt = self._store.attempt
        blocks = [{"index": p.index, "n": p.n, "attempt": attempt, "counts": p.counts, "file": lies[p.index].file} for p in pins]
        left = {int(rank): row["leftAt"] for rank, row in job.rows.items() if row["leftAt"] is not None}
        content = {"file": None if fact is None else fact.to_json(), "blocks": blocks, "table": {"file": table.to_json()}, "rows": chain}
        complete = tuple(row["complete"] for row in job.rows.values())
        return SnapshotWritten(self._store.index, job.snapshot, content, furthest_of(content), complete, left)

    def _failed(self, job: SnapshotTask, problem: CheckpointProblem) -> e.Failed:
        """What was written of the snapshot goes; the sentence says how much room it needs, where there is too little."""
        log.warning("checkpoint not written: %s", problem)
        left = self._remove(job.snapshot)
        why = str(problem)
        if problem.full:
            free = disk.free_bytes(self._folder)
            why += f"; this snapshot needs {job.transfer.total} bytes there" + ("" if free is None else f", {free} are free")
        return e.Failed(job.snapshot, why if left is None else f"{why}; {left}", problem.full)

    def _discard(self, snapshot: int) -> None:
        left = self._remove(snapshot)
        if left is not None:
            log.warning("snapshot %d is void, and its files stay: %s", snapshot, left)
        self._post(SnapshotVoided(self._store.index, snapshot))

    def _remove(self, snapshot: int) -> str | None:
        """Delete what this process wrote of a snapshot; a sentence where something stays."""
        part = contract.SHARD_PART.format(shard=self._store.index, attempt=self._store.attempt)
        mine = re.compile(rf"v\d+-c{snapshot:06d}{part}[.-].*")
        try:
            disk.remove_files(self._folder, [name for name in disk.names_in(self._folder) if mine.fullmatch(name)])
        except CheckpointProblem as problem:
            return str(problem)
        return None


def _entries(pin: BlockSnapshot, gaps: BackgroundThrottle) -> list[tuple[str, torch.Tensor | DeferredTensor]]:
    """A block's tensors, taken when they are written."""
    return [
        (f"{pin.index}.{name}", DeferredTensor(*shape, functools.partial(_taken, pin, name, gaps))) for name, shape in pin.shapes.items()
    ]


def _taken(pin: BlockSnapshot, name: str, gaps: BackgroundThrottle) -> torch.Tensor:
    gaps.wait()
    return pin.take()[name]


def _copy_ahead(pins: list[BlockSnapshot]) -> None:
    """Copy what no update has needed yet: one that comes later does not wait for it."""
    torch.set_num_threads(1)
    for pin in pins:
        try:
            pin.take()
        except Voided:
            return


def order_snapshot(
    store: Store, step: int, pin: Callable[[ParameterBlock], BlockSnapshot], hold: Callable[[ServedTable], None], late: Callable[[], None]
) -> bool:
    """Hold on to every block and table at `step` (-1: now). False, and nothing ordered, when one is already beyond it.

    `late` is called, perhaps several times and with a block's lock held, if one cannot come to it any more.
    """
    done: list[ParameterBlock | ServedTable] = []
    stored = max(row.left_at or 0 for row in store.admission.rows.values())
    for cell in store.all_cells():
        with cell.lock:
            act: Callable[[Any], Any] = pin if isinstance(cell, ParameterBlock) else hold
            ordered = cell.order_snapshot(step, act, stored, late)
        if not ordered:
            void_snapshot(done)
            return False
        done.append(cell)
    return True


def void_snapshot(cells: Sequence[ParameterBlock | ServedTable]) -> None:
    """Let go of the snapshot that was ordered of them, where there is one."""
    for cell in cells:
        with cell.lock:
            cell.void_snapshot()
            cell.answer()  # it may have been a barrier


class Stopped(Exception):
    """The transfer is not wanted any more."""


class Transfer:
    """Bytes `done` of `total` that one job writes or reads."""

    def __init__(self, total: int) -> None:
        self.done, self.total = 0, total
        self.stopped = False

    def moved(self, count: int) -> None:
        """So many bytes more. Raises Stopped."""
        self.done += count
        self.check()

    def check(self) -> None:
        """Raise Stopped if the transfer is not wanted any more."""
        if self.stopped:
            raise Stopped


class DiskThread:
    """Its thread begins with the first job."""

    def __init__(self) -> None:
        self.pulse = ThreadPulse("disk")
        self.transfer: Transfer | None = None
        """What is under way."""
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._left = 0
        self._changed = threading.Condition()
        self._begun = False

    def put(self, job: Callable[[], None]) -> None:
        """Do `job` after all that was put before. What it raises ends the process."""
        with self._changed:
            self._left += 1
            begin, self._begun = not self._begun, True
        self._jobs.put(job)
        if begin:
            supervise.start_thread(self._run, "disk")

    def close(self) -> None:
        """End the thread once all is done that was put before."""
        self._jobs.put(None)

    def moving(self) -> tuple[int, int]:
        """Bytes done and in all of what is under way; zeros where nothing is."""
        transfer = self.transfer
        return (0, 0) if transfer is None else (transfer.done, transfer.total)

    @property
    def busy(self) -> bool:
        """Is a job waiting or under way?"""
        return self._left > 0

    def wait(self) -> None:
        """Come back when nothing is left to do."""
        with self._changed:
            self._changed.wait_for(lambda: not self._left)

    def _run(self) -> None:
        torch.set_num_threads(1)
        self.pulse.bind()
        while True:
            self.pulse.idle()
            job = self._jobs.get()
            if job is None:
                return
            self.pulse.beat()
            try:
                job()
            finally:
                self.transfer = None
                with self._changed:
                    self._left -= 1
                    self._changed.notify_all()
