"""The floor: what memory itself costs. `--what memcpy` copies the bytes; `--what pass` makes the fused optimizer's own pass over them;
`--what rows` gathers rows of a table for a worker, makes row-wise Adagrad on them, and puts them back, all in this process."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

import clock
import rows
import torch


def main() -> None:
    words = clock.asked(__doc__)
    torch.set_num_threads(1)
    makers = {"memcpy": memcpy, "pass": one_pass, "rows": row_cycle}
    clock.answer(clock.cycles(makers[words.what](words), words.seconds))


def memcpy(words: argparse.Namespace) -> Callable[[], object]:
    weights, grad = torch.zeros(words.megabytes * 250_000), torch.ones(words.megabytes * 250_000)
    return lambda: weights.copy_(grad)


def one_pass(words: argparse.Namespace) -> Callable[[], object]:
    weights = torch.zeros(words.megabytes * 250_000, requires_grad=True)
    weights.grad = torch.ones_like(weights)
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    return kinds[words.optimizer]([weights], lr=clock.RATE, fused=True).step


def row_cycle(_words: argparse.Namespace) -> Callable[[], object]:
    """Row-wise Adagrad: a row has one sum of mean squares, as FBGEMM has it."""
    table, sums, grad = torch.zeros(rows.TABLE, rows.WIDTH), torch.zeros(rows.TABLE), rows.gradient()
    pulled = torch.empty(rows.UNIQUE, rows.WIDTH)
    turns = itertools.cycle(rows.batches())

    def cycle() -> None:
        ids = next(turns)
        torch.index_select(table, 0, ids, out=pulled)
        held = sums[ids].add_(torch.linalg.vector_norm(grad, dim=1).square_().div_(rows.WIDTH))
        sums.index_copy_(0, ids, held)
        step = held.sqrt_().add_(rows.EPS).reciprocal_().mul_(-rows.RATE)
        table.index_copy_(0, ids, torch.addcmul(pulled, grad, step.unsqueeze(1)))

    return cycle


if __name__ == "__main__":
    main()
