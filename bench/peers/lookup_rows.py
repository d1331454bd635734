"""The index of a shard's table: ids of held rows to their places, a batch of unique ids a call, in this process."""

from __future__ import annotations

import itertools
import statistics

import clock
import rows
import torch

from psjob.tables.slab import Index


def main() -> None:
    words = clock.asked(__doc__)
    torch.set_num_threads(1)
    index, ids = Index(), torch.randperm(rows.TABLE, generator=torch.Generator().manual_seed(2)) * 7919 + 3
    for part, slots in zip(ids.split(rows.UNIQUE), torch.arange(rows.TABLE).split(rows.UNIQUE), strict=True):
        index.insert(part, slots)
    chance = torch.Generator().manual_seed(3)
    places = [torch.randperm(rows.TABLE, generator=chance)[: rows.UNIQUE] for _ in range(8)]
    batches = [ids[place] for place in places]
    if any(not torch.equal(index.lookup(batch), place) for batch, place in zip(batches, places, strict=True)):
        raise RuntimeError("the index gives other places than were put in")
    turns = itertools.cycle(batches)
    found = statistics.median(clock.cycles(lambda: index.lookup(next(turns)), words.seconds))
    what = f"look-up of {rows.UNIQUE} ids among {rows.TABLE}"
    clock.answer_rows([clock.row(what, rows.UNIQUE / found / 1e6, "M/s", least=10.0)])


if __name__ == "__main__":
    main()
