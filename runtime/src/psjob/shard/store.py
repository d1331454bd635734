"""The blocks of one shard and the table of what it has taken: set up, initialised or restored, then served.

Lock order: a cell's lock, then the store's. Threads of many streams call in; nothing here talks to a socket or a disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch

from psjob import modes, rules
from psjob.layout import memory
from psjob.layout.blocks import Layout, TensorSpec, assign
from psjob.layout.memory import LentSpan
from psjob.modes import Push, ServedMode
from psjob.modes.stages import ALL, Stages
from psjob.protocol.messages import Clip, Decide
from psjob.protocol.shard.events import Phase
from psjob.rules.base import BEFORE, BlockState, Hyperparameters
from psjob.rules.reduction import Reduction, ReductionProblem, mean_in_rank_order
from psjob.shard.block import ParameterBlock
from psjob.shard.coordinated_updates import ClipNorms, CoordinatedUpdates
from psjob.shard.deduplication import Admission, Verdict
from psjob.shard.keeper import LeftMemory
from psjob.shard.pending import Gradient, MetadataCache, PendingPush, PushBuffer, PushMetadata, Received, Replies, StalenessBound, Waiter
from psjob.shard.progress import ShardProgress, room_problem
from psjob.shard.push_metrics import Counters, DifferingPushes, NonFinitePushes, PushNorms, PushSamples, StalenessMetrics, watch
from psjob.shard.state_memory import Outliving, StateMemory, Untaken, told
from psjob.shard.table import ServedTable
from psjob.tables import RowTable, TableSpec
from psjob.wire import shared_memory
from psjob.wire.frame import Flag, Header, WireError


class Store(ShardProgress):
    """Blocks, versions and admission of shard `index`. `term` and `restore_id` name the set of processes it serves."""

    def __init__(
        self, index: int, shards: int, workers: int, attempt: int, mode: ServedMode, run: str, lends: bool = False,
        reduce: Reduction = mean_in_rank_order, stages: Stages = ALL,
    ) -> None:  # fmt: skip
        self.index, self.shards, self.workers, self.stages = index, shards, workers, stages
        super().__init__(mode, Admission(workers, 0))
        self.attempt, self.run = attempt, run
        self.reduce = reduce
        self.term = self.restore_id = 0
        self.restored_by = 0
        """The restore that gave it its blocks: a stream welcomed before it may not push after it."""
        self.most: Mapping[int, int] = {}
        """After a restore of only this shard: by rank, the clocks that it can have acknowledged before, as far as that is known."""
        self.counters = Counters()
        self.layout: Layout | None = None
        self.assignment: tuple[int, ...] = ()
        self.rule_name = ""
        self.cells: dict[int, ParameterBlock] = {}
        self.row_cells: dict[int, ServedTable] = {}
        """Tables by number. To whoever counts blocks, table t is block `len(layout.blocks) + t`."""
        self.decided = CoordinatedUpdates(index, mode) if mode.decided else None
        self.norms = ClipNorms(index)
        self.infos = MetadataCache()
        self.budget = 1 << 62
        """Bytes of gradients that may be held."""
        self.on_problem: Callable[[str], None] = lambda sentence: None
        """Told of pushes that cannot be joined; no other attempt would go better."""
        self.on_failure: Callable[[str], None] = lambda sentence: None
        """Told of an update that broke off: what this shard holds is not to be served any more."""
        self.non_finite = NonFinitePushes()
        self.push_norms: PushNorms | None = None
        self.max_grad_norm: float | None = None
        """`training.sync.maxGradNorm`."""
        self.processes = 1
        """Of one worker at most."""
        self.own: Callable[[str], Hyperparameters] = lambda rule: {}
        """By name of a rule, the hyperparameters that the config gives it."""
        self.flushes = True
        """Does every step of a worker wait for its update? Not in a job of stages without flush."""
        self.samples = PushSamples(0)
        self._differing = DifferingPushes()
        self._missing: set[int] = set()
        self._clipped = False
        """Was a norm asked for?"""
        self._pools: dict[int, list[PushBuffer]] = {}
        """Buffers of the size of the largest block, by rank; a worker's credit bounds how many it needs."""
        self.largest = 0
        """Bytes of the largest block here."""
        self.lends = lends  # blocks lie in memory that workers of this host may borrow
        self.pushed = 0.0
        """When the last push came, by the monotonic clock."""
        self.places: LentSpan | None = None
        self.region: shared_memory.Region | None = None
        """In a steady mode: the memory of all answers. No block in it changes before every worker has pushed again."""
        self.staleness: StalenessMetrics | None = None
        """In a mode that is not steady: how late pushes are."""
        self.silence = 0.0
        """After so many seconds without a sign of life this process hangs; 0: it may be silent."""
        self.outliving = Outliving(None)
        self.kept: StateMemory | None = None
        """What outlives this process; None: nothing does."""
        self._unknown_staleness: set[int] = set()
        """Workers of whose open clock the rule could not apply a block."""

    # -- becoming ready ------------------------------------------------------------------------

    def adopt(self, mode: ServedMode) -> None:
        """Another mode than before: blocks are laid out anew, for the restore that follows."""
        self.stand_down()
        if mode != self.mode:
            self.mode, self.layout, self.region, self.staleness = mode, None, None, None

    def set_up(self, table: tuple[TensorSpec, ...], rule: str, tables: tuple[TableSpec, ...] = ()) -> None:
        """Lay out empty blocks and tables; every block is then expected as INIT, and first rows of every table as ROW_INIT."""
        self.stand_down()
        self._lay_out(Layout.of(table), rule, tables)
        self._missing = {cell.index for cell in self.all_cells()}
        self.phase = Phase.INIT

    def initialise(self, block: int, weights: torch.Tensor) -> bool:
        """Rank 0's values of a block, which are kept, no copy. True when this was the last one missing.

        Values that are given again are left: a snapshot of the first ones may hold the block already.
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
        self,
        layout: Layout,
        rule: str,
        states: Mapping[int, tuple[BlockState, int]],
        tables: Sequence[tuple[RowTable, int]] = (),
        borrowed: Set[int] = frozenset(),
    ) -> None:
        """Put restored blocks (state, version n) and tables (rows, version n) in place; nothing is served before `open`.

        Of the blocks in `borrowed` the state is copied, one after the other, each once the one before it is gone from memory.
        """
        self.stand_down()
        specs = tuple(table.spec for table, _ in tables)
        known = tuple(cell.spec for cell in self.row_cells.values())
        if self.layout is None or self.layout.digest() != layout.digest() or self.rule_name != rule or known != specs:
            self._lay_out(layout, rule, specs)
        else:
            self._settle()  # workers may read what they borrowed until they rewind
            self._look()
        for index, cell in self.cells.items():
            state, n = states[index]
            with cell.lock:
                cell.put(state, n, borrowed=index in borrowed)
        for number, (table, n) in enumerate(tables):
            with self.row_cells[number].lock:
                self.row_cells[number].put(table, n)
        with self.lock:
            self.infos.clear()
            self.samples = PushSamples(self.admission.owned)
            self.begin(cell.n for cell in self.all_cells())
        self._missing = set()
        self.phase = Phase.HELD

    def open(self, term: int, restore_id: int) -> None:
        if self.decided is not None:
            self.decided.begin(self.clocks())
        self.norms.begin()
        self.term, self.restore_id, self.phase = term, restore_id, Phase.SERVING
        self._stand_up()
        self.tell_step()

    # -- for a process after this one ----------------------------------------------------------

    def take_up(self, held: LeftMemory) -> dict[str, Any]:
        """Continue with what a process before this one has left in memory; what it said of itself. Raises Untaken if that cannot be."""
        _, state = held.regions
        said = told(state)
        self.mode, self.restored_by = modes.parse_mode(said["mode"]), int(said["restored_by"])
        self.outliving.found = held
        self._lay_out(Layout.from_json(said["layout"]), str(said["rule"]), ())
        if self.kept is None or self.kept.region is not state:
            raise Untaken("the memory that was left is of another model than it says")
        for cell in self.cells.values():
            cell.take_up()
        self.admission.load(self.kept.rows(), {})
        self.norms.take_up(self.kept.clip)
        self.counters = self.kept.counted(sum(self.clocks().values()))
        self.begin(cell.n for cell in self.all_cells())
        return said

    def _stand_up(self) -> None:
        """From now on another process could continue in place of this one."""
        if (kept := self.kept) is not None:
            with self.lock:
                for rank in self.admission.rows:
                    self.note_rank(rank)
            kept.tell(self._said())
            self.beat()
            kept.serve(True)

    def stand_down(self) -> None:
        """No process could: blocks are put in place, or are not all what they are to be."""
        if (kept := self.kept) is not None:
            kept.serve(False)

    def keep_counts(self) -> None:
        """A process after this one is to count on from here."""
        if (kept := self.kept) is not None:
            with self.lock:
                kept.count(self.counters, sum(row.complete for row in self.admission.rows.values()))

    def beat(self) -> None:
        """This process is alive, as far as it can tell."""
        if (kept := self.kept) is not None:
            kept.beat(self.silence)

    def note_snapshot(self, number: int) -> None:
        """A snapshot is about to be ordered: no other process gives its number again."""
        if (kept := self.kept) is not None:
            kept.note_snapshot(number)

    def note_clip(self, version: int, factor: float) -> None:
        """An update is about to be ordered, or to be made, with a factor for all blocks: it has no other, in any process."""
        self.norms.ordered = version, factor
        if (kept := self.kept) is not None:
            kept.note_clip(version, factor)

    def note_rank(self, rank: int) -> None:
        """Who of a rank may speak, or whether it is there, has changed."""
        if (kept := self.kept) is not None:
            row = self.admission.rows[rank]
            kept.note_rank(rank, row.incarnation, row.left_at)

    def _said(self) -> dict[str, Any]:
        assert self.layout is not None
        return {
            "layout": self.layout.to_json(), "rule": self.rule_name, "mode": modes.format_mode(self.mode), "term": self.term,
            "restore_id": self.restore_id, "restored_by": self.restored_by,
        }  # fmt: skip

    def _keep(self) -> None:
        """Put the blocks in memory that outlives this process, where the mode and the rule let it."""
        assert self.places is not None
        rule = rules.named(self.rule_name)
        # What a version does not say is lost with a process: rows, state by worker, what workers step by themselves, orders.
        plain = rule.name != "reduce" and not rule.per_worker and not self.row_cells and not self.stages
        if plain and self.mode.name == "sync" and not self.mode.decided:
            slots = (*rule.slots, BEFORE) if self.mode.delay else rule.slots
            self.kept = self.outliving.memory(self._said(), self.places, [cell.block for cell in self.cells.values()], self.workers, slots)
        else:
            self.outliving.drop()

    def _lay_out(self, layout: Layout, rule: str, tables: tuple[TableSpec, ...]) -> None:
        made = rules.named(rule)
        self.layout, self.rule_name = layout, rule
        self.assignment = assign(layout, self.shards)
        mine = [b for b in layout.blocks if self.assignment[b.index] == self.index]
        who = [self.stages.who(layout.stages_of(b)) for b in mine]
        self.cells = {b.index: ParameterBlock(b, at, made, self.mode, self.reduce, who[at]) for at, b in enumerate(mine)}
        self.row_cells = {
            number: ServedTable(number, len(layout.blocks) + number, len(mine) + number, spec, self.mode, self.reduce is mean_in_rank_order)
            for number, spec in enumerate(tables)
        }
        for cell in self.all_cells():
            cell.answerable_clocks = None if self.decided is None else self.decided.answerable_clocks
            cell.non_finite = self.non_finite
            cell.push_norms = self.push_norms
        for block in self.cells.values() if self.clips else ():
            block.on_measured = self._measured
            block.limit = None if rule == "reduce" else self.max_grad_norm  # elsewhere each worker clips the mean that it steps with
        self.non_finite.names = [*(spec.name for spec in layout.table), *(f"table {spec.name}" for spec in tables)]
        each = [sum(b.group is None or rank in b.group for b in self.all_cells()) for rank in range(self.workers)] if self.stages else None
        self.admission = Admission(self.workers, len(mine) + len(tables), each)
        self.samples = PushSamples(self.admission.owned)
        self.begin(cell.n for cell in self.all_cells())
        for cell in self.all_cells() if self.mode.ahead else ():
            cell.bound = StalenessBound(self.mode, self.admission, self.lock, cell.position)
        self._check_room(False)
        self._pools.clear()
        self.largest = max((b.nbytes for b in mine), default=0)
        self._settle()
        self._look()

    @property
    def in_step(self) -> bool:
        """Does a worker push a step only once the update of the one before was made of the pushes of all?"""
        return self.mode.name == "sync" and not self.mode.decided and self.flushes

    @property
    def clips(self) -> bool:
        """Can the mean gradient of all blocks be clipped here?"""
        return self.mode.name == "sync" and not self.mode.decided and not self.row_cells

    def _check_room(self, clips: bool) -> None:
        pushes = sum(cell.block.nbytes * (self.workers if cell.group is None else len(cell.group)) for cell in self.cells.values())
        if problem := room_problem(self.workers, self.mode, pushes, self.budget, clips):
            self.on_problem(problem)

    def _measured(self, cell: ParameterBlock, squares: float, limit: float) -> None:
        if not self._clipped:
            self._clipped = True
            self._check_room(True)
        factor = self.norms.factor(cell.n)
        if factor is not None:
            cell.clip(cell.n, factor)
            return
        self.norms.note(self.cells, self.restore_id, cell.index, cell.n, squares, limit)

    def _settle(self) -> None:
        """Give every block a place in new memory that can be lent."""
        if self.kept is not None:
            self.kept.give_up()
        self.kept = None
        if not (self.lends or self.outliving.possible) or self.layout is None:
            return
        self.places = LentSpan.of(self.layout, shared_memory.PAGE)
        if not self.mode.steady:
            self.outliving.drop()
            return
        self._keep()
        self.region = shared_memory.Region.lend(self.places.size) if self.kept is None else self.kept.weights
        for index, cell in self.cells.items():
            cell.kept = None if self.kept is None else self.kept.blocks[index]
            if cell.kept is None:
                cell.home = memory.lent(self.region, self.places.offsets[index], cell.block.length, cell.block.dtype)
            else:
                cell.home = cell.kept.weights

    def _look(self) -> None:
        """Begin to look at the pushes, where some can be late."""
        if not self.mode.steady:
            self.staleness, parts = watch([cell.block for cell in self.cells.values()], self.rule_name, self.index == 0)
            for index, part in parts.items():
                self.cells[index].staleness = part

    # -- serving -------------------------------------------------------------------------------

    def all_cells(self) -> list[ParameterBlock | ServedTable]:
        """Blocks and tables, in the order of their positions in the admission table."""
        return [*self.cells.values(), *self.row_cells.values()]

    def row_cell(self, table: int) -> ServedTable:
        """The cell of a table. Raises WireError when there is none."""
        try:
            return self.row_cells[table]
        except KeyError:
            raise WireError(f"table {table} is not one of this job's {len(self.row_cells)}") from None

    def cell(self, block: int) -> ParameterBlock:
        """The cell of a block. Raises WireError when it is not one of this shard's."""
        try:
            return self.cells[block]
        except KeyError:
            raise WireError(f"block {block} is not on shard {self.index}; it has {len(self.cells)} blocks") from None

    def target(self, header: Header, cell: ParameterBlock) -> Gradient | None:
        """If the payload of a push is received, a buffer of this worker's; None: it will be refused, and not compared."""
        with self.lock:
            if not self.wanted(header, cell) and not self._comes_again(header, cell):
                return None
            return Gradient(self._pools.setdefault(header.worker, []), self.largest, cell.block)

    def wanted(self, header: Header, cell: ParameterBlock | ServedTable) -> bool:
        """Would a push of now be admitted?"""
        with self.lock:
            row = self.admission.rows[header.worker]
            return header.clock == row.complete and cell.position not in row.open and (header.start, header.rewinds) >= row.incarnation

    def _comes_again(self, header: Header, cell: ParameterBlock | ServedTable) -> bool:
        """Is this the newest push of its worker and block once more, with a sample of its bytes at hand?"""
        row = self.admission.rows[header.worker]
        newest = row.complete if cell.position in row.open else row.complete - 1
        return header.clock == newest and self.samples.knows(header.worker, cell.position)

    def _compare(self, header: Header, cell: ParameterBlock | ServedTable, grad: Received | None) -> None:
        """Tell of a push under a taken key that has other bytes than the one that was admitted."""
        raw = grad.raw if isinstance(grad, Gradient) else None
        if header.flags & Flag.HELD or not self._comes_again(header, cell) or not self.samples.differs(header.worker, cell.position, raw):
            return
        self.counters.differing += 1
        self._differing.came(header.worker, header.clock, cell.name, self.pushed)

    def push(self, header: Header, cell: ParameterBlock | ServedTable, grad: Received | None, replies: Replies, restored: int) -> Verdict:
        """Take a push and register its sender for the version that answers it; FENCED when a restore came between."""
        rank = header.worker
        self.pushed = time.monotonic()
        with cell.lock:
            cell.waiters.check(rank, cell.name)
            if restored != self.restored_by or self.phase is not Phase.SERVING:
                return Verdict.FENCED
            with self.lock:
                before = self.admission.rows[rank].complete
                verdict = self.admission.admit(rank, (header.start, header.rewinds), header.clock, cell.position)
                whole = self.admission.rows[rank].complete > before
                self.counters.applied += whole
                if verdict is Verdict.DUPLICATE:
                    self.counters.duplicates += 1
                    self._compare(header, cell, grad)
                elif verdict is Verdict.FENCED:
                    self.counters.fenced += 1
                base = min(header.version[1], cell.n) if header.version[0] == self.attempt else None
                if verdict is Verdict.ADMIT and self.decided is not None:
                    self.decided.took((rank, header.clock), base)
            if verdict in (Verdict.ADMIT, Verdict.DUPLICATE):
                if verdict is Verdict.ADMIT:
                    if isinstance(cell, ParameterBlock):
                        self.samples.keep(rank, cell.position, grad.raw if isinstance(grad, Gradient) else None)
                    info = self.infos.of(header) or PushMetadata((), frozenset())
                    if info.bad is not None:
                        self.non_finite.note(rank, header.clock, self.non_finite.named(info.bad))
                    push, skip = Push(rank, header.clock, base), bool(header.flags & Flag.SKIP)
                    cell.pending[rank, header.clock] = PendingPush(push, grad, skip, info)
                waiter = self.waiter(header, replies, self.mode.version_for(header.clock))
                waiter.update = cell.update is not None
                cell.waiters.add(waiter)
                if whole and self.decided is not None:
                    self.decided.whole((rank, header.clock), self.restore_id)
                self._advance(cell, (rank,))
            self._count(rank, cell, whole, header.length)
        self.tell_step()
        return verdict

    def _count(self, rank: int, cell: ParameterBlock | ServedTable, whole: int, size: int) -> None:
        """One push of so many bytes more, once the coordinator has been told of what it completes.

        A clock with a block that the rule could not apply is lost, not applied; `whole`: the clock has come to its end.
        """
        with self.lock:
            self.counters.pushes, self.counters.bytes = self.counters.pushes + 1, self.counters.bytes + size
            if isinstance(cell, ParameterBlock) and rank in cell.lost:
                cell.lost.discard(rank)
                self._unknown_staleness.add(rank)
            if whole and rank in self._unknown_staleness:
                self._unknown_staleness.discard(rank)
                self.counters.applied -= 1
                self.counters.lost += 1

    def waiter(self, header: Header, replies: Replies, version: int, ids: torch.Tensor | None = None) -> Waiter:
        """Who asked by `header`, and wants `version` or later."""
        lent = bool(header.flags & Flag.LENT)
        now, info = time.monotonic(), self.infos.of(header)
        return Waiter(replies, header.worker, header.request, version, header.clock, now, lent=lent, ids=ids, info=info)

    def keep(self, cell: ParameterBlock, weights: torch.Tensor, version: int, restored: int) -> None:
        """Worker-side update: weights that a worker stores, unless a restore came between."""
        with cell.lock:
            if restored == self.restored_by and self.phase is Phase.SERVING:
                cell.store(weights, version)

    def pull(self, header: Header, cell: ParameterBlock, replies: Replies) -> None:
        """Serve the block at `header.version[1]` or later."""
        with cell.lock:
            cell.waiters.check(header.worker, cell.name)
            wants_update = cell.update is not None and bool(header.flags & Flag.STORE)
            waiter = self.waiter(header, replies, header.version[1])
            waiter.update = wants_update
            waiter.before = bool(header.flags & Flag.BEFORE)
            cell.waiters.add(waiter)
            cell.answer((header.worker,))

    def leave(self, rank: int, clock: int) -> None:
        """A worker is absent from `clock` on; what waited for it continues."""
        for block in self.cells.values():
            with block.lock:
                block.forget(rank)  # first: who restores a snapshot that says it has left does not hear of it again
        with self.lock:
            if not self.mode.rewinds_together:
                # All that it pushed was answered before it left: what is not here was lost by a restore, and nobody can make it again.
                self.counters.lost += self.admission.jump(rank, clock)
            self.admission.leave(rank, clock)
            self.note_rank(rank)
        self.ask_again()

    def ask_again(self) -> None:
        """The admission table has changed by no push: what waited for that continues."""
        for cell in self.all_cells():
            with cell.lock:
                self._advance(cell)
        self.tell_step()

    def carry_out(self, order: Decide) -> None:
        """Make the updates that the coordinator decided on in every block and table, then answer who may go.

        Raises WireError if the order does not fit.
        """
        assert self.decided is not None
        self.decided.begin_order(order)
        decisions, version = order.batches, order.version
        try:
            for cell in self.all_cells():
                with cell.lock:
                    if cell.n != version:
                        raise WireError(f"{cell.name} is at version {cell.n}, and the coordinator decides on {version}")
                    for decision in decisions:
                        cell.decide(decision)
                    self.moved(version, cell.n)
        except ReductionProblem as problem:
            self.on_problem(f"update {version}: {problem}")
            return
        except WireError:
            raise
        except Exception as error:  # some blocks have the update and others have not
            self._not_made(version, error)
            return
        dropped = sum(len(decision.dropped) for decision in decisions)
        with self.lock:
            self.counters.dropped += dropped
            self.counters.applied -= dropped  # each was counted when it was whole
        if any(decision.kept for decision in decisions):
            self._first_applied()
        self.decided.end_order(order)
        for cell in self.all_cells():
            with cell.lock:
                cell.answer(order.go)
        self.tell_step()

    def clip(self, order: Clip) -> None:
        """Make the updates that wait with the ordered factor, and answer. What comes again, or of before a restore, changes nothing."""
        if not self.norms.accept(order):
            return
        version, factor = order.version, order.factor
        self.note_clip(version, factor)
        try:
            for cell in self.cells.values():
                with cell.lock:
                    before = cell.n
                    if before > version:
                        continue  # it has made this update without a norm
                    cell.clip(version, factor)
                    self.moved(before, cell.n)
        except Exception as error:  # some blocks have the update and others have not
            self._not_made(version, error)
            return
        self._first_applied()
        self.tell_step()

    def drop_waiters(self, replies: Replies, rank: int) -> None:
        """Nobody waits for answers to worker `rank` by this stream any more."""
        for cell in self.all_cells():
            with cell.lock:
                cell.waiters.drop(replies, rank)

    # -- inside --------------------------------------------------------------------------------

    def _advance(self, cell: ParameterBlock | ServedTable, ranks: Sequence[int] | None = None) -> None:
        """Make the updates that are due and answer; `ranks` are those of whom there is news, None: of all."""
        if self.mode.decided:
            cell.answer(ranks)
            return
        before = cell.n
        try:
            made = cell.advance(self.expected, ranks)
        except ReductionProblem as problem:
            self.on_problem(f"step {cell.n} of {cell.name}: {problem}")
            return
        except Exception as error:  # the push is taken and not applied: who waits for it would wait forever
            self.on_failure(f"step {cell.n} of {cell.name} was not made, {type(error).__name__}: {str(error)[:300]}")
            return
        if made and self.norms.waits is not None:
            self.norms.passed(self.cells, self.restore_id, cell.index, cell.n)
        self.moved(before, cell.n)
        if made and self.counters.first_applied is None:
            self._first_applied()

    def _first_applied(self) -> None:
        if self.counters.first_applied is None:
            self.counters.first_applied = time.time()

    def _not_made(self, version: int, error: Exception) -> None:
        self.on_failure(f"update {version} was not made, {type(error).__name__}: {str(error)[:300]}")
