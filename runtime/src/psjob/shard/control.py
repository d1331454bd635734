"""What the coordinator orders and how this shard carries it out. Runs in the thread that brings the order."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from psjob import contract, modes
from psjob.checkpoint import manifest
from psjob.checkpoint.problems import CheckpointProblem
from psjob.checkpoint.rows import read_tables
from psjob.checkpoint.states import read_states
from psjob.layout.blocks import TensorSpec, assign
from psjob.modes import written
from psjob.process.errors import Fenced
from psjob.shard.phase import Phase
from psjob.tables import TableSpec
from psjob.wire.frame import Kind

if TYPE_CHECKING:
    from psjob.shard.server import Server

log = logging.getLogger("psjob.shard")


class Control:
    """`answer` carries a reply back to the coordinator."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.answer: Callable[[dict[str, Any]], None] = lambda body: None
        self.setup = 0
        """Which set-up this shard's first values are of."""
        self._restoring = threading.Lock()

    def order(self, body: Mapping[str, Any]) -> None:
        """Carry out one order; an unknown one is logged and left."""
        act = getattr(self, f"_do_{str(body.get('do')).replace('-', '_')}", None)
        if act is None:
            log.warning("an order that this version does not know: %s", str(body.get("do"))[:40])
            return
        act(body)

    def _do_nothing(self, body: Mapping[str, Any]) -> None:
        """The coordinator is alive."""

    def _do_setup(self, body: Mapping[str, Any]) -> None:
        server, store = self.server, self.server.store
        table = tuple(TensorSpec(str(t["name"]), tuple(t["shape"]), str(t["dtype"]), int(t["group"])) for t in body["table"])
        store.view = int(body["view"])
        self._adopt(body)
        store.set_up(table, str(body["rule"]), tuple(TableSpec.from_json(spec) for spec in body.get("tables", ())))
        self.setup = int(body["setup"])
        server.drop_sessions(rewind=False)  # rank 0 may have sent its values already, to a set-up before this one
        server.changed.set()
        if store.initialised():
            server.initialised()

    def _adopt(self, body: Mapping[str, Any]) -> bool:
        """Take the mode that an order names; True when it is another one than before."""
        store = self.server.store
        if body["mode"] == written(store.mode):
            return False
        store.adopt(modes.read(str(body["mode"])))
        return True

    def _do_restore(self, body: Mapping[str, Any]) -> None:
        """Read the manifest's blocks in a thread of its own, then answer."""
        server = self.server
        server.changed.clear()
        server.store.phase = Phase.BLANK
        server.store.generation += 1
        server.store.view = int(body["view"])
        server.cut_step = -1
        other = self._adopt(body)
        server.drop_sessions(server.store.mode.rewinds_together or other)
        threading.Thread(target=self._restore, args=(dict(body), server.store.generation), name="restore", daemon=True).start()

    def _restore(self, body: dict[str, Any], generation: int) -> None:
        with self._restoring:
            if generation == self.server.store.generation:  # else a later order has come
                self._restore_now(body)

    def _restore_now(self, body: dict[str, Any]) -> None:
        store = self.server.store
        folder = Path(body["folder"])
        try:
            made = manifest.read(folder, str(body["manifest"]))
            fences = {int(rank): (int(f[0]), int(f[1])) for rank, f in body["fences"].items()}
            if made.run != store.run:
                fences = {}
            owner = assign(made.layout, store.shards)
            states = read_states(folder, made, [index for index, shard in enumerate(owner) if shard == store.index])
            tables = read_tables(folder, made, store.index, store.shards)
            if store.mode.ahead == 0:  # versions are clocks here; a checkpoint of another mode may have counted pushes
                states = {index: (state, made.step) for index, (state, _) in states.items()}
                tables = [(table, made.step) for table, _ in tables]
            store.restore(made.layout, made.rule, states, tables)
            load_table(store, made, fences)
            store.most = {int(rank): int(clock) for rank, clock in body["most"].items()}
        except (CheckpointProblem, OSError, ValueError) as error:
            self.answer({"did": "unrestored", "recovery": body["recovery"], "why": str(error)})
            return
        self.answer({"did": "restored", "recovery": body["recovery"]})

    def _do_open(self, body: Mapping[str, Any]) -> None:
        self.server.store.open(int(body["view"]), int(body["recovery"]))
        self.server.changed.set()

    def _do_adopt(self, body: Mapping[str, Any]) -> None:
        self.server.store.view = max(self.server.store.view, int(body["view"]))

    def _do_prepare(self, body: Mapping[str, Any]) -> None:
        self.server.snapshots.prepare(_base(body), lambda: self.answer({"did": "prepared", "number": body["number"]}))

    def _do_cut(self, body: Mapping[str, Any]) -> None:
        step = int(body["step"])
        self.server.cut_step = step
        for rank, clock in dict(body.get("left", {})).items():  # its own LEAVE may still be on its way to this shard
            self.server.store.leave(int(rank), int(clock))
        clocks = body.get("clocks")  # of a decided mode: what blocks hold, whatever was pushed since
        held = None if clocks is None else {int(rank): int(clock) for rank, clock in clocks}
        self.server.snapshots.order(int(body["cut"]), step, bool(body["marks"]), _base(body), self.answer, held)

    def _do_void(self, body: Mapping[str, Any]) -> None:
        self.server.cut_step = -1
        self.server.snapshots.void(int(body["cut"]))

    def _do_committed(self, body: Mapping[str, Any]) -> None:
        self.server.cut_step = -1

    def _do_decide(self, body: Mapping[str, Any]) -> None:
        store = self.server.store
        if store.decided is not None and store.phase is Phase.SERVING:
            store.decided.carry_out(store, body)

    def _do_where(self, body: Mapping[str, Any]) -> None:
        store, rank = self.server.store, int(body["rank"])
        low, high = store.span()
        stored = [cell.stored for cell in store.cells.values() if cell.update is not None]
        with store.lock:
            row = store.admission.rows[rank]
            self.answer(
                {"did": "where", "rank": rank, "ask": body["ask"], "complete": row.complete, "open": len(row.open), "lo": low, "hi": high,
                 "owned": store.admission.owned, "stored": min(stored, default=low)}
            )  # fmt: skip

    def _do_finish(self, body: Mapping[str, Any]) -> None:
        """The final manifest is committed: workers hear it here too, then this shard may go."""
        server = self.server
        server.final = True
        for session in list(server.sessions.values()):
            session.tell(Kind.FINISHED)
        if server.coordinator is None:
            timer = threading.Timer(2.0, server.exit_with, (contract.EXIT_DONE,))
            timer.daemon = True
            timer.start()

    def _do_stop(self, body: Mapping[str, Any]) -> None:
        if self.server.coordinator is None:
            self.server.exit_with(contract.EXIT_RETRY)

    def _do_fenced(self, body: Mapping[str, Any]) -> None:
        view = int(body["view"])
        self.server.fenced(Fenced(f"shard {self.server.store.index}: a newer process of this shard is here (view {view})", view))


def _base(body: Mapping[str, Any]) -> int | None:
    """The cut that the newest manifest holds, in an order; None: everything is to be written."""
    return None if body.get("base") is None else int(body["base"])


def load_table(store: Any, made: manifest.Manifest, fences: dict[int, tuple[int, int]]) -> None:
    """Put the saved table of this shard back; onto another shard count, whole clocks are what all shards agree on."""
    saved = made.tables.get(str(store.index))
    foreign = made.run != store.run
    if made.shards == store.shards and saved is not None:
        rows = {rank: dict(row) for rank, row in saved.items()}
        if foreign:
            rows = {rank: row | {"incarnation": [0, 0]} for rank, row in rows.items()}
        store.admission.load(rows, fences)
        return
    clocks = {int(rank): int(entry["clock"]) for rank, entry in made.workers.items()}
    left = [(int(rank), int(entry["leftAt"])) for rank, entry in made.workers.items() if entry.get("leftAt") is not None]
    store.admission.resharded(clocks, left)
