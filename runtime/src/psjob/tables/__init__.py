"""Tables of rows: embeddings as a shard holds them. Pure: no I/O, clock or random source; seeds and clocks are arguments."""

from __future__ import annotations

from psjob.tables.spec import BUCKETS, Partition, TableSpec, bucket_of
from psjob.tables.table import RowTable, merge

__all__ = ["TableSpec", "RowTable", "merge", "Partition", "bucket_of", "BUCKETS"]
