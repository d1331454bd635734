"""A shard's part of a cut: parts are held as they stood, then written to the volume, or given up and deleted."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from psjob.checkpoint.problems import CheckpointProblem
from psjob.protocol.messages import CutWritten
from psjob.protocol.shard import actions as a
from psjob.protocol.shard import events as e
from psjob.shard import snapshot
from tests.simulation.protocol import records
from tests.simulation.protocol.promises import Content
from tests.simulation.protocol.volume import TEMP, Job

if TYPE_CHECKING:
    from tests.simulation.protocol.shard import SimShard


class Pinned:
    """What a cell keeps of a cut; contents are values, so there is nothing to copy."""

    def keep(self) -> None:
        """The block changes."""

    def drop(self, void: bool = False) -> None:
        """Nobody needs it any more."""


class Voided(Exception):
    """The writer was told to stop."""


class Snapshots:
    """At most one cut is held."""

    def __init__(self, shard: SimShard) -> None:
        self.shard = shard
        self._cut: int | None = None
        self._step = -1
        self._held: dict[int, tuple[Content, int]] = {}
        self._table: dict[str, Any] = {}
        self._given_up: set[int] = set()
        self._names: dict[int, str] = {}
        self._base: int | None = None
        self._bases: dict[int, dict[int, tuple[Content, str]]] = {}
        """By cut: what each part held, and the file in which it lies."""

    def hold(self, order: a.Hold) -> None:
        """Hold every part at a step, or now."""
        shard, store = self.shard, self.shard.store
        self._cut, self._step, self._held, self._base = order.cut, order.step, {}, order.base
        if order.step < 0:
            admission = store.admission
            self._table = admission.save() if order.clocks is None else admission.save_at(order.clocks)
        pin, rows = functools.partial(self._pin, order.cut), functools.partial(self._rows, order.cut)
        if not snapshot.order_cut(store, order.step, pin, rows):
            self._cut = None
            shard.post(e.TooLate(order.cut, store.furthest()))
            return
        shard.post(e.Armed(order.cut))
        if not store.all_cells():
            self._whole(order.cut)

    def _pin(self, cut: int, cell: Any) -> Any:
        if self._cut == cut:
            self._held[cell.part] = (cell.held, cell.n)
            self._whole(cut)
        return Pinned()

    def _rows(self, cut: int, cell: Any) -> None:
        if self._cut == cut:
            self._held[cell.part] = (cell.held, cell.n)
            self._whole(cut)

    def _whole(self, cut: int) -> None:
        store = self.shard.store
        if len(self._held) < len(store.all_cells()):
            return
        if self._step >= 0:
            self._table = self._table_at(self._step)
        self.shard.post(e.Held(cut))

    def _table_at(self, step: int) -> dict[str, Any]:
        rows = self.shard.store.admission.save()
        for row in rows.values():
            if row["leftAt"] is not None and row["leftAt"] > step:
                row["leftAt"] = None
            row["complete"] = step if row["leftAt"] is None else row["leftAt"]
            row["open"] = []
        return rows

    def write(self, cut: int) -> None:
        """Write what is held; a part that has not changed since the base stays where it lies."""
        shard, held = self.shard, dict(self._held)
        if self._cut != cut:
            shard.post(e.GaveUp(cut))
            return
        name = records.data_name(shard.store.term, cut, shard.index, shard.attempt)
        base = self._bases.get(self._base, {}) if self._base is not None else {}
        where = {part: base[part][1] if part in base and base[part][0] is content else name for part, (content, _) in held.items()}
        self._bases = {key: value for key, value in self._bases.items() if key == self._base}
        self._names[cut] = name
        content = {"parts": held, "table": self._table, "name": name, "where": where}
        shard.disk.ask(self._writing(cut, name, content), lambda result: self._wrote(cut, content, result))

    def _writing(self, cut: int, name: str, content: dict[str, Any]) -> Job:
        shard, size = self.shard, self.shard.world.plan.shard_bytes
        writing = shard.world.volume.write_whole(shard.pod, name, content, size)
        for seconds in writing:
            if cut in self._given_up:
                writing.close()
                shard.world.volume.unlink(shard.pod, name + TEMP)
                raise Voided
            file = shard.world.volume.files.get(name + TEMP)
            shard.moved = (size if file is None else file.size, size)
            yield seconds

    def _wrote(self, cut: int, content: dict[str, Any], result: Any) -> None:
        shard = self.shard
        if self._cut == cut:
            self._cut, self._held = None, {}
        if isinstance(result, Voided) or (cut in self._given_up and not isinstance(result, Exception)):
            shard.post(e.GaveUp(cut))
        elif isinstance(result, CheckpointProblem):
            shard.world.volume.unlink(shard.pod, content["name"])
            shard.post(e.Failed(cut, str(result), "ENOSPC" in str(result)))
        elif isinstance(result, Exception):
            raise result
        else:
            rows = content["table"]
            self._bases[cut] = {part: (held, content["where"][part]) for part, (held, _) in content["parts"].items()}
            blocks = [{"index": part, "n": n, "file": content["where"][part]} for part, (_, n) in sorted(content["parts"].items())]
            written = CutWritten(
                shard.index, cut, {"file": {"name": content["name"]}, "blocks": blocks, "table": {}},
                max((block["n"] for block in blocks), default=0),
                tuple(rows[str(rank)]["complete"] for rank in range(shard.world.plan.workers)),
                {int(rank): row["leftAt"] for rank, row in rows.items() if row["leftAt"] is not None},
            )  # fmt: skip
            shard.post(e.Wrote(written))

    def give_up(self, cut: int) -> None:
        """Nothing is held any more, and its writer stops."""
        if self._cut == cut:
            self._cut, self._held = None, {}
            snapshot.void_cut(self.shard.store.all_cells())
        self._given_up.add(cut)

    def discard(self, cut: int) -> None:
        """Delete the files of a cut."""
        shard = self.shard

        def deleting() -> Job:
            yield shard.world.volume.seconds(shard.pod)
            name = self._names.pop(cut, None)
            for found in (name, name + TEMP) if name is not None else ():
                shard.world.volume.unlink(shard.pod, found)

        shard.disk.ask(deleting(), lambda result: shard.post(e.Discarded(cut)))
