"""psjob's rows: a worker process pulls unique rows of a table on the shards, and pushes a gradient for each; row-wise Adagrad there.

As in the other programs, finding the unique ids of a batch and the model's own forward and backward are outside what is timed.
"""

from __future__ import annotations

import argparse
import itertools

import clock
import job
import rows
import torch

import psjob
from psjob.api import attach as attaching
from psjob.worker.rows import RowGrads


def main() -> None:
    job.measure(__doc__, work)


def work(words: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    model = psjob.Embedding(rows.TABLE, rows.WIDTH, init="zeros", optimizer="rowwise_adagrad", lr=rows.RATE, eps=rows.EPS)
    psjob.attach(model, torch.optim.SGD(model.parameters(), lr=rows.RATE))
    attached = attaching.current
    assert attached is not None
    session, hyperparameters = attached.session, attached.tables.hyperparameters()
    batches, grad = rows.batches(), rows.gradient()
    pulled = torch.empty(rows.UNIQUE, rows.WIDTH)
    turns = itertools.cycle(batches)

    def cycle() -> None:
        asked = session.rows.ask(0, next(turns), out=pulled)
        session.rows.collect(asked)
        session.rows.offer([RowGrads(asked.ids, grad, asked.counts)], hyperparameters)
        session.push([None], [{"lr": rows.RATE}], False, 1.0, attached.parameters)

    cycle()
    now = session.rows.collect(session.rows.ask(0, batches[0]))
    wanted = -rows.RATE * grad / (grad.pow(2).mean(1, keepdim=True).sqrt() + rows.EPS)
    if not torch.allclose(now, wanted, rtol=1e-3, atol=1e-6):
        raise RuntimeError("the first update is not row-wise Adagrad's")
    clock.answer(clock.cycles(cycle, words.seconds))


if __name__ == "__main__":
    main()
