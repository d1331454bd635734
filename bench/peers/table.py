"""Our table by itself: pull and push of the rows work in this process, without a frame."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import clock
import rows
import torch

from psjob.rules.base import check_hyperparameters
from psjob.tables import RowTable, TableSpec
from psjob.tables.rules import named


def main() -> None:
    words = clock.asked(__doc__)
    torch.set_num_threads(1)
    clock.answer(clock.cycles(row_cycle(), words.seconds))


def row_cycle() -> Callable[[], object]:
    """As the floor's rows: every row of the table is there."""
    hyperparameters = check_hyperparameters(named("rowwise_adagrad"), {"lr": rows.RATE, "eps": rows.EPS})
    table = RowTable(TableSpec("rows", rows.WIDTH, "rowwise_adagrad", num_rows=rows.TABLE, init="zeros"))
    grad, pulled = rows.gradient(), torch.empty(rows.UNIQUE, rows.WIDTH)
    for start in range(0, rows.TABLE, rows.UNIQUE):
        table.push(torch.arange(start, start + rows.UNIQUE), grad, hyperparameters, 0)
    turns = itertools.cycle(rows.batches())
    clocks = itertools.count(1)

    def cycle() -> None:
        ids = next(turns)
        table.pull(ids, out=pulled)
        table.push(ids, grad, hyperparameters, next(clocks))

    return cycle


if __name__ == "__main__":
    main()
