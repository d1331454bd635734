"""A cut over all blocks and tables of a shard: ordered of every one or of none, and let go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from psjob.shard.cell import Cell
from psjob.shard.pins import Pin

if TYPE_CHECKING:
    from psjob.shard.rows import RowCell
    from psjob.shard.store import Store


def order(store: Store, step: int, pin: Callable[[Cell], Pin], hold: Callable[[RowCell], None]) -> bool:
    """Hold on to every block and table at `step` (-1: now). False, and nothing ordered, when one is already beyond it."""
    done: list[Cell | RowCell] = []
    stored = max(row.left_at or 0 for row in store.admission.rows.values())
    for cell in store.all_cells():
        with cell.lock:
            ordered = cell.order_cut(step, pin, stored) if isinstance(cell, Cell) else cell.order_cut(step, hold)
        if not ordered:
            void(done)
            return False
        done.append(cell)
    return True


def void(cells: Sequence[Cell | RowCell]) -> None:
    """Let go of the cut that was ordered of them, where there is one."""
    for cell in cells:
        with cell.lock:
            cell.void_cut()
            cell.answer()  # it may have been a barrier
