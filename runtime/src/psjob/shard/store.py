"""The blocks of one shard and the table of what it has taken: set up, initialised or restored, then served.

Lock order: a cell's lock, then the store's. Threads of many streams call in; nothing here talks to a socket or a disk.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from psjob import memory, rules
from psjob.layout import Layout, TensorSpec, assign
from psjob.modes import Push, Served
from psjob.rules.base import BlockState, check_numbers
from psjob.shard.admission import Admission, Verdict
from psjob.shard.cell import Arrived, Cell, Gradient, Info, Received, Replies, Waiter
from psjob.shard.pins import Pin
from psjob.shard.rows import RowCell
from psjob.span import Span
from psjob.tables import Table, TableSpec
from psjob.wire import shared
from psjob.wire.frame import Flag, Header, Kind, WireError


class Phase(Enum):
    """How far this shard is from serving."""

    BLANK = "blank"
    """No layout yet: a new run, or a shard that waits to be told what to restore."""
    INIT = "initialising"
    HELD = "restored"
    SERVING = "serving"


@dataclass
class Counters:
    """What the status port tells. `applied` and `lost` count worker-clocks of this shard."""

    pushes: int = 0
    applied: int = 0
    duplicates: int = 0
    fenced: int = 0
    lost: int = 0
    first_applied: float | None = None


class Store:
    """Blocks, versions and admission of shard `index`. `view` and `attempt` name the set of processes it serves."""

    def __init__(
        self, index: int, shards: int, workers: int, epoch: int, mode: Served, run: str, lanes: int = 1, lends: bool = False
    ) -> None:
        self.index, self.shards, self.workers = index, shards, workers
        self.epoch, self.mode, self.run = epoch, mode, run
        self.lanes = lanes
        """Streams that a worker may open, the first included."""
        self.view = 0
        self.attempt = 0
        self.generation = 0
        """Counts restores: a stream welcomed before one may not push after it."""
        self.phase = Phase.BLANK
        self.lock = threading.RLock()
        self.counters = Counters()
        self.layout: Layout | None = None
        self.assignment: tuple[int, ...] = ()
        self.rule_name = ""
        self.cells: dict[int, Cell] = {}
        self.row_cells: dict[int, RowCell] = {}
        """Tables by number. To whoever counts blocks, table t is block `len(layout.blocks) + t`."""
        self.admission = Admission(workers, 0)
        self.infos: dict[tuple[int, int], Info] = {}
        self.on_step: Callable[[int], None] = lambda step: None
        self._missing: set[int] = set()
        self._pools: dict[int, list[torch.Tensor]] = {}
        """Buffers of the size of the largest block, by rank; a worker's credit bounds how many it needs."""
        self.largest = 0
        """Bytes of the largest block here."""
        self.lends = lends
        """Blocks are kept in memory that workers of this host may borrow."""
        self.pushed = 0.0
        """When the last push came, by the monotonic clock."""
        self.places: Span | None = None
        self.region: shared.Region | None = None
        """In a steady mode: the memory of all answers. No block in it changes before every worker has pushed again."""
        self._reported = 0

    # -- becoming ready ------------------------------------------------------------------------

    def set_up(self, table: tuple[TensorSpec, ...], rule: str, tables: tuple[TableSpec, ...] = ()) -> None:
        """Lay out empty blocks and tables; every block is then expected as INIT, and first rows of every table as ROW_INIT."""
        self._lay_out(Layout.of(table), rule, tables)
        self._missing = {cell.index for cell in self.all_cells()}
        self.phase = Phase.INIT

    def initialise(self, block: int, weights: torch.Tensor) -> bool:
        """Rank 0's values of a block, which are kept, no copy. True when this was the last one missing.

        Values that are given again are left: a cut of the first ones may hold the block already.
        """
        cell = self.cells[block]
        with cell.lock:
            if cell.state is None:
                cell.put(cell.rule.init(weights), 0)
        return self.initialised_one(block)

    def initialised_one(self, index: int) -> bool:
        """A block, or a table, has its first values. True when this was the last one missing."""
        with self.lock:
            self._missing.discard(index)
            return not self._missing

    def initialised(self) -> bool:
        return self.phase is Phase.INIT and not self._missing

    def restore(
        self, layout: Layout, rule: str, states: Mapping[int, tuple[BlockState, int]], tables: Sequence[tuple[Table, int]] = ()
    ) -> None:
        """Put restored blocks (state, version n) and tables (rows, version n) in place; nothing is served before `open`."""
        specs = tuple(table.spec for table, _ in tables)
        known = tuple(cell.spec for cell in self.row_cells.values())
        if self.layout is None or self.layout.digest() != layout.digest() or self.rule_name != rule or known != specs:
            self._lay_out(layout, rule, specs)
        else:
            self._settle()  # workers may read what they borrowed until they rewind
        for index, cell in self.cells.items():
            state, n = states[index]
            with cell.lock:
                cell.put(state, n)
        for number, (table, n) in enumerate(tables):
            with self.row_cells[number].lock:
                self.row_cells[number].put(table, n)
        with self.lock:
            self.infos.clear()
            self._reported = 0
        self._missing = set()
        self.phase = Phase.HELD

    def open(self, view: int, attempt: int) -> None:
        self.view, self.attempt, self.phase = view, attempt, Phase.SERVING
        self._tell_step()

    def _lay_out(self, layout: Layout, rule: str, tables: tuple[TableSpec, ...]) -> None:
        made = rules.named(rule)
        self.layout, self.rule_name = layout, rule
        self.assignment = assign(layout, self.shards)
        mine = [b for b in layout.blocks if self.assignment[b.index] == self.index]
        self.cells = {b.index: Cell(b, position, made, self.mode) for position, b in enumerate(mine)}
        self.row_cells = {
            number: RowCell(number, len(layout.blocks) + number, len(mine) + number, spec, self.mode) for number, spec in enumerate(tables)
        }
        self.admission = Admission(self.workers, len(mine) + len(tables))
        self._pools.clear()
        self.largest = max((b.nbytes for b in mine), default=0)
        self._settle()

    def _settle(self) -> None:
        """Give every block a place in new memory that can be lent."""
        if not self.lends or self.layout is None:
            return
        self.places = Span.of(self.layout, shared.PAGE)
        if not self.mode.steady:
            return
        self.region = shared.Region.lend(self.places.size)
        for index, cell in self.cells.items():
            cell.home = memory.lent(self.region, self.places.offsets[index], cell.block.length, cell.block.dtype)

    # -- serving -------------------------------------------------------------------------------

    def all_cells(self) -> list[Cell | RowCell]:
        """Blocks and tables, in the order of their positions in the admission table."""
        return [*self.cells.values(), *self.row_cells.values()]

    def row_cell(self, table: int) -> RowCell:
        """The cell of a table. Raises WireError when there is none."""
        try:
            return self.row_cells[table]
        except KeyError:
            raise WireError(f"table {table} is not one of this job's {len(self.row_cells)}") from None

    def cell(self, block: int) -> Cell:
        """The cell of a block. Raises WireError when it is not one of this shard's."""
        try:
            return self.cells[block]
        except KeyError:
            raise WireError(f"block {block} is not on shard {self.index}; it has {len(self.cells)} blocks") from None

    def check_push(self, header: Header, cell: Cell, encoded: bool = False) -> None:
        """Refuse a push whose size or clock cannot be right, before anything of it is read; one that is `encoded` has its size checked."""
        expected = 0 if header.flags & (Flag.ABSENT | Flag.SKIP | Flag.HELD) else cell.block.nbytes
        if header.length != expected and not encoded:
            raise WireError(
                f"{header.kind.name} of block {header.block} has {header.length} bytes, expected {expected} "
                f"({cell.block.length} elements of {cell.block.dtype})"
            )
        if header.flags & (Flag.ABSENT | Flag.STORE) or header.kind is Kind.EARLY:
            return
        self.check_info(header, cell.name)

    def check_info(self, header: Header, name: str) -> None:
        """Refuse a push whose numbers are not known."""
        if (header.worker, header.info) not in self.infos:
            raise WireError(f"push of {name} names numbers {header.info}, which were not sent")

    def target(self, header: Header, cell: Cell) -> Gradient | None:
        """Where the payload of an admissible push is received: a buffer of this worker's; None when it will be refused anyway."""
        with self.lock:
            return Gradient(self._pools.setdefault(header.worker, []), self.largest, cell.block) if self.wanted(header, cell) else None

    def wanted(self, header: Header, cell: Cell | RowCell) -> bool:
        """Would a push of now be admitted?"""
        with self.lock:
            row = self.admission.rows[header.worker]
            return header.clock == row.complete and cell.position not in row.open and (header.start, header.rewinds) >= row.incarnation

    def push(self, header: Header, cell: Cell | RowCell, grad: Received | None, replies: Replies, generation: int) -> Verdict:
        """Take a push and register its sender for the version that answers it; FENCED when a restore came between."""
        rank = header.worker
        self.pushed = time.monotonic()
        with cell.lock:
            if generation != self.generation or self.phase is not Phase.SERVING:
                return Verdict.FENCED
            with self.lock:
                self.counters.pushes += 1
                before = self.admission.rows[rank].complete
                verdict = self.admission.admit(rank, (header.start, header.rewinds), header.clock, cell.position)
                self.counters.applied += self.admission.rows[rank].complete - before
                if verdict is Verdict.DUPLICATE:
                    self.counters.duplicates += 1
                elif verdict is Verdict.FENCED:
                    self.counters.fenced += 1
            if verdict in (Verdict.ADMIT, Verdict.DUPLICATE):
                if verdict is Verdict.ADMIT:
                    info = self.infos.get((rank, header.info), Info((), frozenset()))
                    base = header.version[1] if header.version[0] == self.epoch else None
                    cell.pending[rank] = Arrived(Push(rank, header.clock, base), grad, bool(header.flags & Flag.SKIP), info)
                waiter = self.waiter(header, replies, self.mode.version_for(header.clock))
                waiter.update = cell.update is not None
                cell.wait_for(waiter)
                self._advance(cell)
        self._tell_step()
        return verdict

    def waiter(self, header: Header, replies: Replies, version: int, ids: torch.Tensor | None = None) -> Waiter:
        """Who asked by `header`, and wants `version` or later."""
        lent = bool(header.flags & Flag.LENT)
        return Waiter(replies, header.worker, header.request, version, header.clock, time.monotonic(), lent=lent, ids=ids)

    def keep(self, cell: Cell, weights: torch.Tensor, version: int, generation: int) -> None:
        """Worker-side update: weights that a worker stores, unless a restore came between."""
        with cell.lock:
            if generation == self.generation and self.phase is Phase.SERVING:
                cell.store(weights, version)

    def pull(self, header: Header, cell: Cell, replies: Replies) -> None:
        """Serve the block at `header.version[1]` or later."""
        with cell.lock:
            wants_update = cell.update is not None and bool(header.flags & Flag.STORE)
            waiter = self.waiter(header, replies, header.version[1])
            waiter.update = wants_update
            cell.wait_for(waiter)
            cell.answer()

    def leave(self, rank: int, clock: int) -> None:
        """A worker is absent from `clock` on; what waited for it goes on."""
        with self.lock:
            self.admission.leave(rank, clock)
        for cell in self.all_cells():
            with cell.lock:
                self._advance(cell)
        self._tell_step()

    def check_numbers(self, groups: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
        """Hyperparameters of every group, whole and finite. Raises ValueError naming what is wrong (an absent rank has none)."""
        wanted = 0 if self.layout is None or self.rule_name == "reduce" else 1 + max((t.group for t in self.layout.table), default=-1)
        if 0 < len(groups) < wanted:  # the last groups may have no parameter
            raise ValueError(f"numbers of {len(groups)} parameter groups, the model has {wanted}")
        return tuple(check_numbers(rules.named(self.rule_name), group) for group in groups)

    def check_row_numbers(self, tables: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
        """Hyperparameters of every table, whole and finite. Raises ValueError naming what is wrong (an absent rank has none)."""
        if tables and len(tables) != len(self.row_cells):
            raise ValueError(f"numbers of {len(tables)} tables, the job has {len(self.row_cells)}")
        return tuple(check_numbers(cell.table.rule, numbers) for cell, numbers in zip(self.row_cells.values(), tables, strict=False))

    def learn(self, rank: int, version: int, info: Info) -> None:
        """Numbers that later pushes of `rank` name by `version`; the last four are kept."""
        with self.lock:
            self.infos[(rank, version)] = info
            self.infos.pop((rank, version - 4), None)

    def drop_waiters(self, replies: Replies) -> None:
        for cell in self.all_cells():
            with cell.lock:
                cell.drop_waiters(replies)

    # -- cuts ----------------------------------------------------------------------------------

    def order_cut(self, step: int, pin: Callable[[Cell], Pin], hold: Callable[[RowCell], None]) -> bool:
        """Hold on to every block and table at `step` (-1: now). False, and nothing ordered, when one is already beyond it."""
        done: list[Cell | RowCell] = []
        stored = max(row.left_at or 0 for row in self.admission.rows.values())
        for cell in self.all_cells():
            with cell.lock:
                ordered = cell.order_cut(step, pin, stored) if isinstance(cell, Cell) else cell.order_cut(step, hold)
            if not ordered:
                for earlier in done:
                    with earlier.lock:
                        earlier.void_cut()
                return False
            done.append(cell)
        return True

    def void_cut(self) -> None:
        for cell in self.all_cells():
            with cell.lock:
                cell.void_cut()

    # -- sight ---------------------------------------------------------------------------------

    def span(self) -> tuple[int, int]:
        """Lowest and highest version of this shard's blocks; (0, 0) without blocks."""
        versions = [cell.n for cell in self.all_cells()]
        return (min(versions), max(versions)) if versions else (0, 0)

    def clocks(self) -> dict[int, int]:
        """Complete clocks by rank, as this shard has them."""
        with self.lock:
            return {rank: row.complete for rank, row in self.admission.rows.items()}

    def step(self) -> int:
        """Lowest complete clock over the workers that have not left (over all, when all have)."""
        with self.lock:
            live = self.admission.live() or frozenset(self.admission.rows)
            return min((self.admission.rows[rank].complete for rank in live), default=0)

    def _advance(self, cell: Cell | RowCell) -> None:
        made = cell.advance(self.admission.expected)
        if made and self.counters.first_applied is None:
            self.counters.first_applied = time.time()

    def _tell_step(self) -> None:
        if self.phase is not Phase.SERVING:
            return
        step = self.span()[0] if self.mode.rewinds_together else self.step()
        with self.lock:
            if step <= self._reported:
                return
            self._reported = step
        self.on_step(step)
