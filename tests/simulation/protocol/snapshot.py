"""A shard's part of a snapshot: parts are held as they stood, then written to the volume, or given up and deleted."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from psjob.checkpoint.disk import CheckpointProblem
from psjob.protocol.messages import SnapshotVoided, SnapshotWritten
from psjob.protocol.shard import events as e
from psjob.shard.snapshot import order_snapshot, void_snapshot
from tests.simulation.protocol import records
from tests.simulation.protocol.promises import Content
from tests.simulation.protocol.volume import TEMP, Job

if TYPE_CHECKING:
    from tests.simulation.protocol.shard import SimShard


class Pinned:
    """What a cell keeps of a snapshot; contents are values, so there is nothing to copy."""

    def keep(self) -> None:
        """The block changes."""

    def drop(self, void: bool = False) -> None:
        """Nobody needs it any more."""


class Voided(Exception):
    """The writer was told to stop."""


class Snapshots:
    """At most one snapshot is held."""

    def __init__(self, shard: SimShard) -> None:
        self.shard = shard
        self._snapshot: int | None = None
        self._step = -1
        self._held: dict[int, tuple[Content, int]] = {}
        self._table: dict[str, Any] = {}
        self._given_up: set[int] = set()
        self._names: dict[int, str] = {}
        self._base: int | None = None
        self._bases: dict[int, dict[int, tuple[Content, str]]] = {}
        """By snapshot: what each part held, and the file in which it lies."""

    def hold(self, order: e.HoldBlocks) -> None:
        """Hold every part at a step, or now."""
        shard, store = self.shard, self.shard.store
        self._snapshot, self._step, self._held, self._base = order.snapshot, order.step, {}, order.base
        if order.step < 0:
            admission = store.admission
            self._table = admission.save() if order.clocks is None else admission.save_at(order.clocks)
        pin, rows = functools.partial(self._pin, order.snapshot), functools.partial(self._rows, order.snapshot)

        def late() -> None:
            shard.post(e.TooLate(order.snapshot, store.furthest()))

        if not order_snapshot(store, order.step, pin, rows, late):
            self._snapshot = None
            late()
            return
        shard.post(e.Armed(order.snapshot))
        if not store.all_cells():
            self._whole(order.snapshot)

    def _pin(self, snapshot: int, cell: Any) -> Any:
        if self._snapshot == snapshot:
            self._held[cell.part] = (cell.held, cell.n)
            self._whole(snapshot)
        return Pinned()

    def _rows(self, snapshot: int, cell: Any) -> None:
        if self._snapshot == snapshot:
            self._held[cell.part] = (cell.held, cell.n)
            self._whole(snapshot)

    def _whole(self, snapshot: int) -> None:
        store = self.shard.store
        if len(self._held) < len(store.all_cells()):
            return
        if self._step >= 0:
            self._table = self._table_at(self._step)
        self.shard.post(e.Held(snapshot))

    def _table_at(self, step: int) -> dict[str, Any]:
        rows = self.shard.store.admission.save()
        for row in rows.values():
            if row["leftAt"] is not None and row["leftAt"] > step:
                row["leftAt"] = None
            row["complete"] = step if row["leftAt"] is None else row["leftAt"]
            row["open"] = []
        return rows

    def write(self, snapshot: int) -> None:
        """Write what is held; a part that has not changed since the base stays where it lies."""
        shard, held = self.shard, dict(self._held)
        if self._snapshot != snapshot:
            shard.post(e.GaveUp(snapshot))
            return
        name = records.data_name(shard.store.term, snapshot, shard.index, shard.attempt)
        base = self._bases.get(self._base, {}) if self._base is not None else {}
        where = {part: base[part][1] if part in base and base[part][0] is content else name for part, (content, _) in held.items()}
        self._bases = {key: value for key, value in self._bases.items() if key == self._base}
        self._names[snapshot] = name
        content = {"parts": held, "table": self._table, "name": name, "where": where}
        shard.disk.ask(self._writing(snapshot, name, content), lambda result: self._wrote(snapshot, content, result))

    def _writing(self, snapshot: int, name: str, content: dict[str, Any]) -> Job:
        shard, size = self.shard, self.shard.world.plan.shard_bytes
        writing = shard.world.volume.write_whole(shard.pod, name, content, size)
        for seconds in writing:
            if snapshot in self._given_up:
                writing.close()
                shard.world.volume.unlink(shard.pod, name + TEMP)
                raise Voided
            file = shard.world.volume.files.get(name + TEMP)
            shard.moved = (size if file is None else file.size, size)
            yield seconds

    def _wrote(self, snapshot: int, content: dict[str, Any], result: Any) -> None:
        shard = self.shard
        if self._snapshot == snapshot:
            self._snapshot, self._held = None, {}
        if isinstance(result, Voided) or (snapshot in self._given_up and not isinstance(result, Exception)):
            shard.post(e.GaveUp(snapshot))
        elif isinstance(result, CheckpointProblem):
            shard.world.volume.unlink(shard.pod, content["name"])
            shard.post(e.Failed(snapshot, str(result), "ENOSPC" in str(result)))
        elif isinstance(result, Exception):
            raise result
        else:
            rows = content["table"]
            self._bases[snapshot] = {part: (held, content["where"][part]) for part, (held, _) in content["parts"].items()}
            blocks = [{"index": part, "n": n, "file": content["where"][part]} for part, (_, n) in sorted(content["parts"].items())]
            written = SnapshotWritten(
                shard.index, snapshot, {"file": {"name": content["name"]}, "blocks": blocks, "table": {}},
                max((block["n"] for block in blocks), default=0),
                tuple(rows[str(rank)]["complete"] for rank in range(shard.world.plan.workers)),
                {int(rank): row["leftAt"] for rank, row in rows.items() if row["leftAt"] is not None},
            )  # fmt: skip
            shard.post(written)

    def give_up(self, snapshot: int) -> None:
        """Nothing is held any more, and its writer stops."""
        if self._snapshot == snapshot:
            self._snapshot, self._held = None, {}
            void_snapshot(self.shard.store.all_cells())
        self._given_up.add(snapshot)

    def discard(self, snapshot: int) -> None:
        """Delete the files of a snapshot."""
        shard = self.shard

        def deleting() -> Job:
            yield shard.world.volume.seconds(shard.pod)
            name = self._names.pop(snapshot, None)
            for found in (name, name + TEMP) if name is not None else ():
                shard.world.volume.unlink(shard.pod, found)

        shard.disk.ask(deleting(), lambda result: shard.post(SnapshotVoided(shard.index, snapshot)))
