"""A shard's part of a checkpoint back into its store. Only its own bytes are read, each under a crc.

A shard that goes back with the others, and wrote that checkpoint last, still has its copy in memory: it reads nothing except its tables."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psjob.checkpoint import manifest
from psjob.checkpoint.disk import CheckpointProblem, Damage
from psjob.checkpoint.manifest import Manifest
from psjob.checkpoint.states import open_blocks, read_admission, read_states, read_tables, state_bytes, state_of, table_bytes
from psjob.layout import memory
from psjob.layout.blocks import assign
from psjob.process import supervise
from psjob.protocol.messages import ShardPosition
from psjob.protocol.shard import events as e
from psjob.protocol.shard.events import Read, SetFences
from psjob.rules.base import BlockState
from psjob.shard.snapshot import DiskThread, Snapshots, Stopped, Transfer
from psjob.shard.store import Store


class Restoring:
    """Reads in the disk thread. `snapshots` have what memory has of the last checkpoint; `post` takes what came of it."""

    def __init__(self, store: Store, thread: DiskThread, snapshots: Snapshots, post: Callable[[e.Event], None]) -> None:
        self._store, self._disk, self._snapshots, self._post = store, thread, snapshots, post
        self._wanted: tuple[int, Transfer] | None = None
        self._placing = threading.Lock()
        self._foreign = False

    def read(self, action: Read) -> None:
        """Begin to read; what was read before is not wanted any more."""
        self.forget()
        transfer = Transfer(0)
        self._wanted = (action.reading, transfer)
        self._disk.put(lambda: self._read(action, transfer))

    def forget(self) -> None:
        """Nothing that is being read is put in place any more."""
        wanted, self._wanted = self._wanted, None
        if wanted is not None:
            wanted[1].stopped = True
        with self._placing:
            pass

    def set_fences(self, action: SetFences) -> None:
        """Older processes of workers may not speak. Those of another run say nothing about this one's.

        A coordinator that was lost may have ordered higher ones, and not told the workers to begin again: the newest order counts.
        """
        store = self._store
        with store.lock:
            for rank, fence in () if self._foreign else action.fences.items():
                store.admission.rows[rank].incarnation = fence
                store.note_rank(rank)
        store.most = dict(action.most)

    def _read(self, action: Read, transfer: Transfer) -> None:
        try:
            transfer.check()
            self._post(self._placed(action, transfer))
        except Stopped:
            return
        except (CheckpointProblem, OSError, ValueError) as error:
            self._post(e.Unread(action.reading, str(error), isinstance(error, Damage | ValueError)))

    def _placed(self, action: Read, transfer: Transfer) -> e.Placed:
        store, folder = self._store, Path(action.folder)
        made = manifest.read_manifest(folder, action.manifest)
        owner = assign(made.layout, store.shards)
        mine = [index for index, shard in enumerate(owner) if shard == store.index]
        states = self._remembered(made, mine)
        remembered = frozenset(states)
        lacking = set(mine) - remembered
        if not remembered:
            self._snapshots.forget()  # before as much memory is taken for what is read
        transfer.total = state_bytes(made, lacking) + table_bytes(made, store.index, store.shards)
        self._disk.transfer = transfer
        states |= read_states(folder, made, lacking, transfer.moved)
        tables = read_tables(folder, made, store.index, store.shards, transfer.moved)
        admission_saved = saved_admission(store, folder, made)
        if store.mode.ahead == 0:  # versions are clocks here; a checkpoint of another mode may have counted pushes
            states = {index: (state, made.step) for index, (state, _) in states.items()}
            tables = [(table, made.step) for table, _ in tables]
        with self._placing, supervise.system_call():  # a large shard is copied for seconds
            transfer.check()
            store.restore(made.layout, made.rule, states, tables, remembered)
            states = {}
            memory.trim()  # the old blocks were freed one by one
            admission_saved.load()
            self._foreign = made.run != store.run
            if store.mode.rewinds_together:  # another shard that is lost sends this one back as well
                self._snapshots.restored({place.index: place.file for place in made.blocks if place.index in lacking})
        admission = store.admission
        left = frozenset(admission.rows) - admission.live()
        complete = tuple(admission.rows[rank].complete for rank in sorted(admission.rows))
        return e.Placed(action.reading, position_of(store), complete, left)

    def _remembered(self, made: Manifest, mine: Sequence[int]) -> dict[int, tuple[BlockState, int]]:
        """Blocks whose copy in memory is the one that the manifest names. Their tensors are that copy itself, not to be changed."""
        wanted, found = set(mine), {}
        for place in made.blocks:
            image = self._snapshots.images.find(place.index, place.file) if place.index in wanted else None
            if image is not None:
                supervise.beat()
                found[place.index] = (state_of(made, place, dict(image)), place.n)
        return found


def position_of(store: Store) -> ShardPosition:
    """How far the blocks of a store are, also by stage where the model has some."""
    low, high = store.span()
    stored = [cell.stored for cell in store.cells.values() if cell.update is not None]
    stages = [
        [cell.n for cell in store.all_cells() if cell.group is None or not cell.group.isdisjoint(ranks)] for ranks in store.stages.all()
    ]
    told = tuple((min(n, default=0), max(n, default=0), len(n)) for n in stages)
    return ShardPosition(low, high, store.admission.owned, min(stored, default=low), told)


@dataclass(frozen=True)
class SavedAdmission:
    """What a checkpoint says of the pushes that its blocks hold: this shard's own table, or, of other shards', which blocks hold what."""

    store: Store
    made: Manifest
    rows: Mapping[str, dict[str, Any]] | None
    open: Mapping[int, Set[int]]

    def load(self) -> None:
        """Put it in the store, whose blocks are restored."""
        made, admission = self.made, self.store.admission
        if self.rows is not None:
            foreign = made.run != self.store.run
            admission.load({rank: row | {"incarnation": [0, 0]} for rank, row in self.rows.items()} if foreign else self.rows, {})
            return
        clocks = {int(rank): int(entry["clock"]) for rank, entry in made.workers.items()}
        left = [(int(rank), int(entry["leftAt"])) for rank, entry in made.workers.items() if entry.get("leftAt") is not None]
        places = {index: cell.position for index, cell in self.store.cells.items()}
        held = {rank: {places[block] for block in blocks & places.keys()} for rank, blocks in self.open.items()}
        admission.resharded(clocks, left, held)


def saved_admission(store: Store, folder: Path, made: Manifest) -> SavedAdmission:
    """Read the table of this shard; where other shards wrote the checkpoint, all of theirs. Raises Damage or CheckpointProblem."""
    if made.shards == store.shards and (rows := read_admission(folder, made, store.index)) is not None:
        return SavedAdmission(store, made, rows, {})
    if store.mode.ahead == 0:  # a step counts once on all blocks, or on none
        return SavedAdmission(store, made, None, {})
    found = {shard: read_admission(folder, made, shard) for shard in range(made.shards)}
    return SavedAdmission(store, made, None, open_blocks(made, {shard: rows for shard, rows in found.items() if rows is not None}))
