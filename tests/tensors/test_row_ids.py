"""What a worker believes of the ids that a shard names."""

from __future__ import annotations

import pytest
import torch

from psjob.tables import Partition, TableSpec
from psjob.wire.frame import WireError
from psjob.worker.rows import check_page

TWO = Partition.even(2)
OPEN, CLOSED = TableSpec("user", 4, "sgd", None), TableSpec("page", 4, "sgd", 50)
HERE = torch.arange(-100, 100)[TWO.shard_of(torch.arange(-100, 100)) == 0]
THERE = torch.arange(50)[TWO.shard_of(torch.arange(50)) == 1]
EDGES = torch.tensor([-(1 << 63), (1 << 63) - 1])


@pytest.mark.parametrize(
    ("spec", "above", "ids", "words"),
    [
        (OPEN, None, HERE[:0], ""),
        (OPEN, None, HERE, ""),
        (OPEN, HERE[3:4], HERE[4:], ""),
        (OPEN, HERE[3:4], HERE[3:], "not in ascending order"),
        (OPEN, HERE[3:4], HERE[:2], "not in ascending order"),
        (OPEN, None, HERE.flip(0), "not in ascending order"),
        (OPEN, None, HERE[[0, 1, 1]], "not in ascending order"),
        (OPEN, None, EDGES.flip(0), "not in ascending order"),
        (OPEN, None, THERE, "shard 0 names rows of other shards"),
        (CLOSED, None, HERE[HERE >= 0][:5], ""),
        (CLOSED, None, HERE[:3], "ids go from -.* and it has 50 rows"),
        (CLOSED, None, HERE[HERE >= 0], "ids go from .* and it has 50 rows"),
    ],
)
def test_ids_ascend_are_rows_and_lie_there(spec: TableSpec, above: torch.Tensor | None, ids: torch.Tensor, words: str) -> None:
    if not words:
        check_page(spec, TWO, 0, above, ids)
        return
    with pytest.raises(WireError, match=f"ROW_IDS of table {spec.name}: .*{words}"):
        check_page(spec, TWO, 0, above, ids)
