"""The shipped store of a shard with its numerics replaced by a ledger: the store alone says which pushes count and when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from psjob.shard import store as store_module
from psjob.shard.block import ParameterBlock
from psjob.shard.pending import MetadataCache, PendingPush, PushMetadata, Waiter
from psjob.shard.store import Store
from psjob.shard.table import ServedTable
from tests.simulation.protocol.promises import Content, first, update

if TYPE_CHECKING:
    from tests.simulation.protocol.promises import Promises


class Value:
    """What a push brought: one number in place of a gradient."""

    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value

    def free(self) -> None:
        """Nothing: it is no buffer."""


class HeldTable:
    """A table's rows as a ledger."""

    def __init__(self, spec: Any, content: Content) -> None:
        self.spec, self.content = spec, content


class _Ledger:
    """What both kinds of cell have in common. `content` of the ledger is `held`."""

    ledger: LedgerStore
    part: int
    held: Content | None = None

    def note(self, batch: Sequence[PendingPush]) -> None:
        """Write an update down."""
        store = self.ledger
        assert self.held is not None
        pushes = [(a.push.worker, a.push.clock, a.grad.value) for a in batch if isinstance(a.grad, Value)]
        store.promises.applied(store.pod, self.part, self.held, pushes, store.mode)
        self.held = update(self.held, pushes)

    def drop(self, dropped: Sequence[PendingPush]) -> None:
        """Pushes that the mode does not count are decided on too."""
        if dropped and self.held is not None:
            following = list(self.held.next)
            for arrived in dropped:
                following[arrived.push.worker] = max(following[arrived.push.worker], arrived.push.clock + 1)
            self.held = self.held._replace(next=tuple(following))


class LedgerCell(_Ledger, ParameterBlock):
    """A block."""

    def put(self, state: Any, n: int, borrowed: bool = False) -> None:
        self.void_snapshot()
        self.content = object()
        self.state, self.held, self.n, self.stored = state, state, n, n
        self._clips = None
        self.pending.clear()
        self.waiters.clear()

    def tensors(self) -> list[Any]:
        return []

    def forget(self, rank: int) -> None:
        """Nothing is kept of a worker."""

    def reply(self, waiter: Waiter) -> Any:
        return self.held

    def decide(self, decision: Any) -> None:
        self.drop([self.pending[key] for key in decision.dropped if key in self.pending])
        super().decide(decision)

    def _reduced(self, batch: list[PendingPush], weights: Any, writable: bool = False, apart: bool = False) -> Any:
        return Sum()

    def _begin_change(self) -> None:
        self._changing()

    def _squares(self, reduced: Any) -> float:
        return 1.0 + self.index

    def _update(self, batch: list[PendingPush], reduced: Any, staleness: int | None) -> None:
        self._changing()
        self.note(batch)
        self.state = self.held  # type: ignore[assignment]


class Sum:
    """What the pushes of an update are reduced to."""

    def mul_(self, factor: float) -> None:
        """Nothing: it is no gradient."""


class LedgerRowCell(_Ledger, ServedTable):
    """A table's rows on one shard."""

    def put(self, table: Any, n: int) -> None:
        self.held, self.n = table.content, n
        self.pending.clear()
        self.waiters.clear()
        self._snapshot = None

    def decide(self, decision: Any) -> None:
        self.drop([self.pending[key] for key in decision.dropped if key in self.pending])
        super().decide(decision)

    def _apply(self, batch: list[PendingPush], clock: int, weights: Any = None) -> None:
        self.note(batch)


class Clipped(MetadataCache):
    """What every push asks for."""

    def of(self, header: Any) -> PushMetadata:
        return PushMetadata((), frozenset(), clip=1.0)


class LedgerStore(Store):
    """`Store` over ledgers. Parts of the model are numbered: blocks first, then a table's rows by shard."""

    promises: Promises
    pod: str

    def bind(self, promises: Promises, pod: str, clips: bool) -> LedgerStore:
        """Tell `promises` of every update. `clips`: every push asks that the norm of its step be clipped."""
        self.promises, self.pod = promises, pod
        if clips:
            self.infos = Clipped()
        return self

    def given_up(self, rank: int, clock: int) -> None:
        """A worker's pushes below `clock` that are not here never will be, and it was said so: they are decided on."""
        for cell in self.all_cells():
            held = cell.held  # type: ignore[union-attr]
            cell.held = held._replace(next=(*held.next[:rank], max(clock, held.next[rank]), *held.next[rank + 1 :]))  # type: ignore[union-attr]

    def _lay_out(self, *args: Any) -> None:
        shipped = {name: getattr(store_module, name) for name in ("ParameterBlock", "ServedTable")}
        store_module.ParameterBlock, store_module.ServedTable = LedgerCell, LedgerRowCell  # type: ignore[misc]
        try:
            super()._lay_out(*args)
        finally:
            for name, kind in shipped.items():
                setattr(store_module, name, kind)
        assert self.layout is not None
        for index, cell in self.cells.items():
            cell.ledger, cell.part = self, index  # type: ignore[attr-defined]
        for number, table in self.row_cells.items():
            table.ledger, table.part = self, len(self.layout.blocks) + number * self.shards + self.index  # type: ignore[attr-defined]

    def first(self, part: int) -> Content:
        """The content of a part at step 0."""
        return first(part, self.workers)

    def _look(self) -> None:
        """How late pushes are is arithmetic."""

    def _settle(self) -> None:
        """No memory is lent."""
